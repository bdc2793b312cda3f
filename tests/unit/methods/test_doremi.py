"""DoReMi on one rank: excess losses against a loop over tokens, and its reference."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from megatron_chameleon.artifacts import CheckpointRecord, Mixture, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import find_checkpoint
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doremi import compute as compute_module
from megatron_chameleon.methods.doremi.compute import Doremi
from megatron_chameleon.methods.doremi.hook import ExcessLossReweighting
from megatron_chameleon.methods.doremi.options import DoremiRule
from megatron_chameleon.training.hook import GlobalBatch
from tests.small_corpus import DOMAINS, write_small_corpus
from tests.unit.methods.proxies import STEPS, hooks_of, method_options, proxy_run, state_of


@pytest.fixture
def options(corpus, finished_run, tmp_path):
    """``options(**changes)``: with a finished reference."""
    settings = {"corpus": corpus.root, "reference": finished_run}
    settings["output"] = tmp_path / "4-mixture" / "doremi.json"
    return lambda **changes: method_options("doremi", **{**settings, **changes})


class Checked(ExcessLossReweighting):
    """Compares each step with a loop over tokens, and the reference with an evaluated model."""

    steps, apart, highest = 0, 0.0, 0.0

    def prepare(self):
        super().prepare()
        assert self._layout is not None
        self.reader = open_reader(self._reference.checkpoint, self._layout)

    def clipped(self, excess):
        ceiling = math.inf if self._recipe.ceiling is None else self._recipe.ceiling
        return min(max(excess, self._recipe.floor), ceiling)

    def loss_weights(self, batch):
        losses_of_proxy = batch.token_losses()
        weights = super().loss_weights(batch)
        tokens: list[list[float]] = [[], [], []]
        weighed = [0.0, 0.0]
        alpha = self.state.weights
        for part, losses in zip(batch.micro_batches, losses_of_proxy, strict=True):
            reference = self.reader.token_losses(part["tokens"], part["labels"])
            assert reference is not None
            for row, domain in enumerate(part["domain"].tolist()):
                for column in range(losses.size(1)):
                    if part["loss_mask"][row, column]:
                        proxy = float(losses[row, column])
                        tokens[domain].append(proxy - float(reference[row, column]))
                        weighed[0] += alpha[domain] * proxy
                        weighed[1] += alpha[domain]
        present = [domain for domain in range(3) if tokens[domain]]
        clipped_tokens = [np.mean([self.clipped(x) for x in tokens[d]]) for d in present]
        clipped_means = [self.clipped(float(np.mean(tokens[d]))) for d in present]
        expected, other = clipped_tokens, clipped_means
        if not self._recipe.clip_tokens:
            expected, other = clipped_means, clipped_tokens
        np.testing.assert_allclose(self.state.excess[present], expected, rtol=1e-4, atol=1e-6)
        Checked.apart = max(Checked.apart, float(np.abs(np.subtract(expected, other)).max()))
        Checked.highest = max(Checked.highest, max(max(part, default=0.0) for part in tokens))
        # The loss of the step: the sum of weight times loss over the number of tokens.
        total = sum(
            float((weights[part["domain"]][:, None] * losses * part["loss_mask"]).sum())
            for part, losses in zip(batch.micro_batches, losses_of_proxy, strict=True)
        )
        assert total / sum(map(len, tokens)) == pytest.approx(weighed[0] / weighed[1], rel=1e-5)
        Checked.steps += 1
        return weights


Checked.__name__ = ExcessLossReweighting.__name__  # recorded in checkpoints


@pytest.mark.parametrize(
    ("rule", "masked"),
    [
        (DoremiRule(doremi_eta=0.1, excess_ceiling=0.3), False),
        (DoremiRule("fork", excess_ceiling=0.3), True),
    ],
)
def test_excess_losses_and_the_loss_equal_a_loop_over_tokens(options, monkeypatch, masked, rule):
    monkeypatch.setattr(compute_module, "ExcessLossReweighting", Checked)
    for name, value in (("steps", 0), ("apart", 0.0), ("highest", 0.0)):
        monkeypatch.setattr(Checked, name, value)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=masked)
    made = options(rule=rule, train_iters=3, boundaries=boundaries)
    assert Doremi.compute(made)
    assert Checked.steps == 3
    assert Checked.apart > 1e-3  # the variants differ,
    assert Checked.highest > 0.3  # and the ceiling has an effect
    if rule.doremi_variant == "fork":
        mixture = Mixture.load(made.output)
        assert (mixture.parameters["eta"], mixture.parameters["eps"]) == (0.1, 0.0)
        assert mixture.parameters["steps_averaged"] == 3
        weights = [hook["weights"]["code"] for hook in hooks_of(made.output)]
        assert mixture.weights["code"] == pytest.approx(np.mean(weights))


def test_a_reference_of_another_size_and_mixture_is_trained_first(options, corpus):
    made = options(
        reference=None, reference_mixture="natural", reference_model_size="tiny", train_iters=4
    )
    assert Doremi.compute(made)
    proxy = proxy_run(made.output)
    reference = TrainingRun.load(proxy.root.with_name("reference"))
    assert (reference.status, proxy.status) == ("finished", "finished")
    total = sum(corpus.train_tokens.values())
    shares = {name: tokens / total for name, tokens in corpus.train_tokens.items()}
    assert reference.mixture == pytest.approx(shares)
    assert proxy.mixture == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    sizes = [run.model["size"] for run in (reference, proxy)]
    assert [size["hidden_size"] for size in sizes] == [128, 64]
    parameters = Mixture.load(made.output).parameters
    assert parameters["reference"]["model_size"] == "tiny"
    layers = sum(12 * size["num_layers"] * size["hidden_size"] ** 2 for size in sizes)
    assert parameters["paper_flops"] == 6 * proxy.tokens * layers
    assert parameters["made_from"] == ["doremi/reference", "doremi/proxy"]


def scale_losses(monkeypatch, factor, *, of_reference):
    """Multiply all losses of one model by ``factor`` in the third step."""
    token_losses = GlobalBatch.token_losses

    def losses(batch, other=None, other_shape=None):
        bad = batch.step == 2 and (other is not None) == of_reference
        return [(factor if bad else 1.0) * part for part in token_losses(batch, other, other_shape)]

    monkeypatch.setattr(GlobalBatch, "token_losses", losses)


def test_non_finite_losses_of_the_proxy_leave_the_weights(options, monkeypatch):
    """Even if clipping would hide them."""
    scale_losses(monkeypatch, math.inf, of_reference=False)
    made = options(rule=DoremiRule(doremi_eta=0.1, excess_ceiling=0.3))
    Doremi.compute(made)
    hooks = hooks_of(made.output)
    assert hooks[2] == hooks[1]
    assert state_of(made.output)["counted"] == STEPS


@pytest.mark.parametrize(("factor", "variant"), [(math.nan, "original"), (math.inf, "fork")])
def test_non_finite_losses_of_the_reference_are_errors(options, monkeypatch, factor, variant):
    """Also infinite ones, which clipping would turn into an excess loss of 0."""
    scale_losses(monkeypatch, factor, of_reference=True)
    with pytest.raises(UserError, match="'news'"):
        Doremi.compute(options(rule=DoremiRule(variant, 0.1)))


def test_an_unusable_reference_or_corpus_is_an_error(options, tmp_path, trained_run):
    alone = write_small_corpus(tmp_path / "corpus", ("news",))
    with pytest.raises(UserError, match="2 domains"):
        Doremi.compute(options(corpus=alone.root))
    other = write_small_corpus(tmp_path / "other", seed=1)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=True, reset_attention_mask=True)
    with pytest.warns(MixtureWarning, match="another --reset-attention-mask and --corpus"):
        Doremi(options(corpus=other.root, boundaries=boundaries))
    record = CheckpointRecord.load(find_checkpoint(trained_run))
    dataclasses.replace(record, tokenizer_hash="0" * 64).save()
    with pytest.raises(UserError, match="tokenizer"):
        Doremi.compute(options(reference=trained_run))
    dataclasses.replace(TrainingRun.load(trained_run), status="interrupted", step=3).save()
    with pytest.raises(UserError, match="no finished run"):
        Doremi.compute(options(reference=trained_run))
    assert not (tmp_path / "4-mixture").exists()
