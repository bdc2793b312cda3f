"""tools/compute_mixture.py --method doremi: a reference, a proxy that is watched, and weights."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Mixture,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import find_checkpoint, step_folder
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.methods.doremi import METHOD, DoremiOptions
from megatron_chameleon.methods.excess_loss import compute as compute_module
from megatron_chameleon.methods.excess_loss.compute import compute_doremi
from megatron_chameleon.methods.excess_loss.hook import ExcessLossReweighting
from megatron_chameleon.methods.excess_loss.plan import plan_doremi
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.training import DocumentBoundaryOptions, OptimizerOptions
from tests.small_corpus import DOMAINS, EOD, VOCAB_SIZE, write_small_corpus
from tests.unit.methods.doremi_runs import (
    SLOW,
    STEPS,
    found,
    hook_lines,
    options,
    proxy_of,
    proxy_options,
)

__all__ = ["found", "options"]  # fixtures


def test_the_weights_are_the_mean_over_the_proxys_steps(found):
    mixture, lines = Mixture.load(found), hook_lines(found)
    steps = [dict.fromkeys(DOMAINS, 1 / 3), *(line["weights"] for line in lines)]
    assert len(steps) == STEPS + 1
    for name in DOMAINS:
        mean = np.mean([weights[name] for weights in steps])
        assert mixture.weights[name] == pytest.approx(mean)
        assert mixture.parameters["last_weights"][name] == pytest.approx(steps[-1][name])
        assert mixture.parameters["trajectory"]["weights"][name] == [
            line["weights"][name] for line in lines
        ]
    assert mixture.parameters["trajectory"]["steps"] == list(range(1, STEPS + 1))
    assert mixture.scores == lines[-1]["excess"]
    assert max(mixture.weights.values()) - min(mixture.weights.values()) > 1e-3
    low, high = mixture.parameters["range_in_second_half"]["news"]
    path = [line["weights"]["news"] for line in lines[STEPS // 2 :]]
    assert (low, high) == (min(path), max(path))


def test_every_step_follows_from_the_one_before_by_the_rule(found):
    """From what was logged, by the formula as it stands."""
    alpha = np.full(3, 1 / 3)
    for line in hook_lines(found):
        excess = np.array(list(line["excess"].values()))
        alpha = alpha * np.exp(0.1 * excess)
        alpha = 0.999 * alpha / alpha.sum() + 0.001 / 3
        np.testing.assert_allclose(list(line["weights"].values()), alpha, rtol=1e-12)


class Checked(ExcessLossReweighting):
    """Compares what is found with a loop over tokens, and the reference with its read-out."""

    steps, apart, highest = 0, 0.0, 0.0

    def __init__(self, plan, layout, reference, recipe):
        super().__init__(plan, layout, reference, recipe)
        self.reader = open_reader(reference.checkpoint, layout)
        self.others: list[float] = []

    def limited(self, excess):
        """Between the recipe's limits."""
        ceiling = math.inf if self._recipe.ceiling is None else self._recipe.ceiling
        return min(max(excess, self._recipe.floor), ceiling)

    def loss_weights(self, batch):
        mine = batch.token_losses()
        weights = super().loss_weights(batch)
        tokens: list[list[float]] = [[], [], []]
        weighed = [0.0, 0.0]
        alpha = self._standing.weights
        for part, losses in zip(batch.micro_batches, mine, strict=True):
            theirs = self.reader.token_losses(part["tokens"], part["labels"])
            assert theirs is not None
            for row, domain in enumerate(part["domain"].tolist()):
                for column in range(losses.size(1)):
                    if part["loss_mask"][row, column]:
                        proxy = float(losses[row, column])
                        tokens[domain].append(proxy - float(theirs[row, column]))
                        weighed[0] += alpha[domain] * proxy
                        weighed[1] += alpha[domain]
        there = [domain for domain in range(3) if tokens[domain]]
        token_by_token = [np.mean([self.limited(x) for x in tokens[domain]]) for domain in there]
        means = [self.limited(float(np.mean(tokens[domain]))) for domain in there]
        expected, other = token_by_token, means
        if not self._recipe.clip_tokens:
            expected, other = means, token_by_token
        np.testing.assert_allclose(self._standing.excess[there], expected, rtol=1e-4, atol=1e-6)
        Checked.apart = max(Checked.apart, float(np.abs(np.subtract(expected, other)).max()))
        Checked.highest = max(Checked.highest, max(max(part, default=0.0) for part in tokens))
        # What the loop makes of it: the sum of weight times loss over the number of tokens.
        total = sum(
            float((weights[part["domain"]][:, None] * losses * part["loss_mask"]).sum())
            for part, losses in zip(batch.micro_batches, mine, strict=True)
        )
        assert total / sum(map(len, tokens)) == pytest.approx(weighed[0] / weighed[1], rel=1e-5)
        Checked.steps += 1
        return weights


Checked.__name__ = ExcessLossReweighting.__name__  # checkpoints say it


@pytest.mark.parametrize(
    ("rule", "masked"),
    [
        (SLOW, False),
        (DoremiRule(doremi_eta=0.1, excess_ceiling=0.3), True),
        (DoremiRule("fork"), False),
        (DoremiRule("fork", excess_ceiling=0.3), True),
    ],
)
def test_excess_losses_and_the_loss_are_those_of_a_loop_over_tokens(
    options, monkeypatch, masked, rule
):
    monkeypatch.setattr(compute_module, "ExcessLossReweighting", Checked)
    monkeypatch.setattr(Checked, "steps", 0)
    monkeypatch.setattr(Checked, "apart", 0.0)
    monkeypatch.setattr(Checked, "highest", 0.0)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=masked)
    assert compute_doremi(options(rule=rule, proxy={"train_iters": 3, "boundaries": boundaries}))
    assert Checked.steps == 3
    assert Checked.apart > 1e-3  # the other variant's excess is told apart from this one's
    assert Checked.highest > 0.3  # and so is one without the ceiling


def test_a_proxy_that_is_its_reference_keeps_the_weights_but_for_rounding(
    options, monkeypatch, finished_run
):
    """All excess losses are zero, and the rate of learning is as good as zero too."""
    given = options(
        proxy={"optimizer": OptimizerOptions(lr=1e-30, min_lr=0.0, lr_warmup_iters=0)},
    )
    checkpoint = find_checkpoint(finished_run)

    def from_reference(*arguments):
        plan = plan_doremi(*arguments)
        run = dataclasses.replace(plan.proxy_run, pretrained_checkpoint=checkpoint)
        return dataclasses.replace(plan, proxy_run=run)

    monkeypatch.setattr(compute_module, "plan_doremi", from_reference)
    compute_doremi(given)
    assert Mixture.load(given.output).weights == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    assert max(hook_lines(given.output)[-1]["excess"].values()) < 1e-6


def test_the_cost_is_that_of_two_runs_and_two_forward_passes(found, finished_run):
    mixture, proxy = Mixture.load(found), proxy_of(found)
    made_from = [found.parent / path for path in mixture.parameters["made_from"]]
    assert [path.resolve() for path in made_from] == [finished_run.resolve(), proxy.root.resolve()]
    runs = [TrainingRun.load(path).cost for path in made_from]
    assert runs[1].flops == pytest.approx(runs[0].flops * (1 + 2 / 3))
    total = mixture.parameters["total_cost"]
    assert total["flops"] == pytest.approx(runs[0].flops + runs[1].flops + mixture.cost.flops)
    seconds = sum(cost.device_seconds for cost in (*runs, mixture.cost))
    assert total["device_seconds"] == pytest.approx(seconds)
    assert mixture.cost.flops == 0
    tokens = STEPS * 8 * 32
    assert mixture.parameters["paper_flops"] == 2 * 6 * (12 * 4 * 64**2) * tokens


def test_the_mixture_says_what_it_was_made_of(found, corpus, finished_run):
    mixture = Mixture.load(found)
    assert (mixture.method, mixture.parameters["variant"]) == ("doremi", "original")
    assert (mixture.parameters["eta"], mixture.parameters["eps"]) == (0.1, 1e-3)
    assert mixture.parameters["reference"]["train_iters"] == STEPS
    assert mixture.provenance is not None
    reference = CheckpointRecord.load(find_checkpoint(finished_run))
    assert mixture.provenance.inputs["reference"] == reference.hash
    assert mixture.provenance.inputs["corpus"] == corpus.hash


def test_a_reference_of_another_size_and_mixture_is_trained_first(options, corpus, capsys):
    given = options(
        reference=None,
        reference_mixture="natural",
        reference_model_size="tiny",
        proxy={"train_iters": 4},
    )
    METHOD.compute(given)
    folder = given.output.with_suffix("")
    reference, proxy = (TrainingRun.load(folder / name) for name in ("reference", "proxy"))
    assert (reference.status, proxy.status) == ("finished", "finished")
    total = sum(corpus.train_tokens.values())
    assert reference.mixture == pytest.approx(
        {name: tokens / total for name, tokens in corpus.train_tokens.items()}
    )
    assert proxy.mixture == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    assert (reference.model["size"]["hidden_size"], proxy.model["size"]["hidden_size"]) == (128, 64)
    mixture = Mixture.load(given.output)
    assert mixture.parameters["reference"]["model_size"] == "tiny"
    sizes_trained = [
        12 * run.model["size"]["num_layers"] * run.model["size"]["hidden_size"] ** 2
        for run in (reference, proxy)
    ]
    assert mixture.parameters["paper_flops"] == 6 * proxy.tokens * sum(sizes_trained)
    assert mixture.parameters["made_from"] == ["doremi/reference", "doremi/proxy"]
    # The reference's forward pass counts at its own shape.
    sizes = [
        shape_of(CheckpointRecord.load(step_folder(run.root, 4))) for run in (reference, proxy)
    ]
    forward = [forward_flops(shape, proxy.tokens, 32) for shape in sizes]
    assert reference.cost.flops == pytest.approx(3 * forward[0])
    assert proxy.cost.flops == pytest.approx(4 * forward[1] + forward[0])
    said = capsys.readouterr().out
    assert f"DoReMi's reference, in {folder / 'reference'}" in said
    assert f"written to {given.output}; next: tools/pretrain_gpt.py" in said


def test_the_forks_variant_clips_means(options):
    given = options(rule=DoremiRule(doremi_variant="fork"), proxy={"train_iters": 3})
    compute_doremi(given)
    mixture = Mixture.load(given.output)
    assert (mixture.parameters["eta"], mixture.parameters["eps"]) == (0.1, 0.0)
    assert mixture.parameters["steps_averaged"] == 3
    weights = [line["weights"]["code"] for line in hook_lines(given.output)]
    assert mixture.weights["code"] == pytest.approx(np.mean(weights))


def test_limits_of_the_excess_are_of_each_token(options):
    """Early in training nearly every token is further behind than this."""
    rule = DoremiRule(doremi_eta=0.1, excess_floor=0.01, excess_ceiling=0.02)
    given = options(rule=rule, proxy={"train_iters": 3})
    compute_doremi(given)
    for line in hook_lines(given.output):
        assert all(0.01 <= excess <= 0.02 for excess in line["excess"].values())


def test_a_domain_that_is_absent_from_a_batch_keeps_its_excess_loss(options):
    """Batches of two samples of three domains; at first it is the loss of a guess."""
    given = options(proxy={"global_batch_size": 2, "micro_batch_size": 1})
    compute_doremi(given)
    lines = list(proxy_of(given.output).metrics())
    before = dict.fromkeys(DOMAINS, math.log(VOCAB_SIZE))
    absences = 0
    for line in lines:
        now = line["hook"]["excess"]
        there = {name for name, tokens in line["domain_tokens_drawn"].items() if tokens}
        assert 1 <= len(there) <= 2
        for name in DOMAINS:
            if name not in there:
                assert now[name] == before[name]
                absences += 1
            else:
                assert now[name] != before[name]
        before = now
    assert absences >= STEPS


def constructed_document(number: int, rng: np.random.Generator):
    """Of three domains: a text that can be learned, noise, and another such text."""
    if number == 1:
        return rng.integers(0, EOD, 120)
    return (rng.integers(40) + 3 * np.arange(120)) % 40


def test_weights_move_to_what_can_be_learned_from_noise_and_copies_stay_alike(tmp_path, capsys):
    names = ("learnable", "noise", "copy")
    corpus = write_small_corpus(tmp_path / "corpus", names, document=constructed_document)
    given = DoremiOptions(
        corpus=corpus.root,
        output=tmp_path / "doremi.json",
        proxy=proxy_options(train_iters=30, log_interval=10, save_interval=30),
        rule=DoremiRule(doremi_eta=0.1),
    )
    compute_doremi(given)
    weights = Mixture.load(given.output).weights
    assert weights["noise"] < 0.15
    assert weights["learnable"] > 0.4
    assert weights["copy"] == pytest.approx(weights["learnable"], abs=0.05)
