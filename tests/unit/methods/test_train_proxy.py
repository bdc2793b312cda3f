"""DoReMi and DoGE on one rank: mean weights, resuming, reuse, user errors, reference results."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import CheckpointRecord, Mixture, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import HookState, find_checkpoint, step_folder
from megatron_chameleon.blend.options import DocumentBoundaryOptions
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.doge import DogeOptions, DogeRuleOptions
from megatron_chameleon.methods.doge.compute import Doge, GradientAlignment, held_out_mix
from megatron_chameleon.methods.doremi import DoremiOptions, DoremiRuleOptions
from megatron_chameleon.methods.doremi import compute as doremi_compute
from megatron_chameleon.methods.doremi.compute import Doremi, ExcessLossReweighting
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.methods.options import PriorOptions, ProxyOptions
from megatron_chameleon.mixture.doge import DogeRule, Roles
from megatron_chameleon.model.flops import paper_flops, training_flops
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.hook import GlobalBatch
from megatron_chameleon.training.options import GuardOptions, OptimizerOptions
from tests.random_training import random_batches
from tests.small_corpus import DOMAINS, EOD, write_small_corpus
from tests.unit.training.runs import before_steps, poison, run_out
from tests.unit.training.test_hook import (
    NUM_DOMAINS,
    RATE,
    SHAPE,
    build_passes,
    domain_mask,
    expected_gradient,
    micro_batches,
    run,
)

__all__ = ["micro_batches"]  # without it, ruff would report an unused import

STEPS = 6
# Method -> class of its options, its rule, and changes to the proxy's options. DoReMi's reference
# is the fixture ``finished_run``.
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "doremi": (
        DoremiOptions,
        DoremiRuleOptions(doremi_eta=0.1),
        {"global_batch_size": 8, "micro_batch_size": 4},
    ),
    "doge": (
        DogeOptions,
        DogeRuleOptions(doge_mu=0.2),
        {
            "global_batch_size": 6,
            "micro_batch_size": 2,
            "seed": 3,
            "optimizer": OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=2),
        },
    ),
}


def compute(options: DoremiOptions | DogeOptions) -> bool:
    return Doremi.compute(options) if isinstance(options, DoremiOptions) else Doge.compute(options)


def proxy_run(output: Path) -> TrainingRun:
    return TrainingRun.load(output.with_suffix("") / "proxy")


def hooks_of(output: Path) -> list[dict[str, Any]]:
    return [line["hook"] for line in proxy_run(output).metrics()]


def record_of(output: Path) -> CheckpointRecord:
    return CheckpointRecord.load(step_folder(proxy_run(output).root, STEPS))


def state_of(output: Path) -> dict[str, Any]:
    hook = record_of(output).hook
    assert hook is not None
    return hook.state


def edit_state(output: Path, **changes: Any) -> None:
    """Change the state of the hook in the proxy's last checkpoint."""
    record = record_of(output)
    assert record.hook is not None
    hook = HookState(record.hook.name, {**record.hook.state, **changes})
    dataclasses.replace(record, hook=hook).save()


for_method = partial(pytest.mark.parametrize, indirect=["name"])
of_doremi, of_doge = for_method("name", ["doremi"]), for_method("name", ["doge"])


@pytest.fixture(params=["doremi", "doge"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def options_in(corpus, finished_run):
    """``options_in(name, folder, **changes)``: options of a method; ``changes`` replace options of
    the method or of its proxy."""

    def make(name, folder, **changes):
        options_type, rule, proxy = METHODS[name]
        own = {field.name for field in dataclasses.fields(options_type)}
        settings = {"corpus": corpus.root, "output": folder / "mixture.json", "rule": rule}
        settings["fallback"] = PriorOptions(accept_uncertain=True)
        if name == "doremi":
            settings["reference"] = finished_run
        training = {
            "model": "nano",
            "seq_length": 32,
            "train_iters": STEPS,
            "log_interval": 1,
            "save_interval": 3,
            "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
            **proxy,
        }
        for field, value in changes.items():
            (settings if field in own else training)[field] = value
        return options_type(proxy=ProxyOptions(**training), **settings)

    return make


@pytest.fixture
def options(options_in, name, tmp_path):
    return partial(options_in, name, tmp_path)


@pytest.fixture(scope="module")
def mixture_of(options_in, tmp_path_factory):
    @cache
    def make(name):
        made = options_in(name, tmp_path_factory.mktemp(name))
        assert compute(made)
        return made.output

    return make


@pytest.fixture
def found(mixture_of, name) -> Path:
    """Path of a read-only mixture, next to its proxy."""
    return mixture_of(name)


@pytest.fixture
def copied(found, tmp_path) -> Path:
    """Path of the mixture of ``options()``, next to a copy of the finished proxy."""
    shutil.copytree(found.with_suffix(""), tmp_path / found.stem)
    return tmp_path / found.name


def moves_of(hooks: list[dict]) -> np.ndarray:
    path = np.array([[1 / 3] * 3, *(list(hook["weights"].values()) for hook in hooks)])
    return np.abs(np.diff(path, axis=0)).sum(1) / 2


def test_the_mixture_is_the_mean_of_the_logged_weights(name, found, corpus):
    mixture, hooks, run = Mixture.load(found), hooks_of(found), proxy_run(found)
    parameters, uniform = mixture.parameters, dict.fromkeys(DOMAINS, 1 / 3)
    path = [hook["weights"] for hook in hooks]
    # DoReMi's mean includes the initial weights.
    averaged = [uniform, *path] if name == "doremi" else path
    for domain in DOMAINS:
        own = [weights[domain] for weights in path]
        assert mixture.weights[domain] == pytest.approx(np.mean([w[domain] for w in averaged]))
        assert parameters["trajectory"]["weights"][domain] == own
        later = own[STEPS // 2 :]
        assert parameters["range_in_second_half"][domain] == [min(later), max(later)]
        score = hooks[-1]["excess"][domain] if name == "doremi" else None
        score = score or np.mean([hook["alignment"][domain] for hook in hooks])
        assert (mixture.scores or {})[domain] == pytest.approx(score)
    assert max(mixture.weights.values()) - min(mixture.weights.values()) > 1e-3
    assert parameters["last_weights"] == pytest.approx(path[-1])
    assert parameters["steps_averaged"] == len(averaged) == STEPS + (name == "doremi")
    assert parameters["moved_per_step"] == pytest.approx(moves_of(hooks).mean())
    assert run.mixture == pytest.approx(uniform)  # domains are sampled uniformly
    assert mixture.provenance is not None
    inputs = {"corpus": corpus.hash, "proxy": record_of(found).hash}
    assert inputs.items() <= mixture.provenance.inputs.items()
    runs = [TrainingRun.load(found.parent / place) for place in parameters["made_from"]]
    assert len(runs) == {"doremi": 2, "doge": 1}[name]
    assert runs[-1].root.resolve() == run.root.resolve()
    assert mixture.cost.flops == 0 < sum(run.cost.flops for run in runs)
    assert parameters["total_cost"]["flops"] == sum(run.cost.flops for run in runs)


@for_method(("name", "is_stopped"), [("doremi", False), ("doge", True)])
def test_an_interrupted_run_resumes_with_the_same_result(
    name, found, options, monkeypatch, is_stopped
):
    """The run is stopped by a signal, or killed between two checkpoints."""

    def interrupt(_model):
        if not is_stopped:
            raise RuntimeError("killed")
        os.kill(os.getpid(), signal.SIGTERM)

    made = options()
    with monkeypatch.context() as patched:
        before_steps(patched, {5: interrupt})
        if is_stopped:
            assert find_methods()[name].compute(made) == STOPPED_STATUS
        else:
            with pytest.raises(RuntimeError, match="killed"):
                compute(made)
    assert not made.output.exists()
    assert compute(made)
    assert hooks_of(made.output) == hooks_of(found)
    assert state_of(made.output) == state_of(found)
    assert Mixture.load(made.output).weights == Mixture.load(found).weights


@for_method(("name", "factor"), [("doremi", math.nan), ("doge", math.nan), ("doge", 1e4)])
def test_a_skipped_step_moves_no_weight(name, options, monkeypatch, factor):
    """A step is skipped if a gradient is not finite, or if its norm spikes but stays finite."""
    unclipped = DogeRuleOptions(0.2, doge_max_norm=0.0)
    rule = {} if name == "doremi" else {"rule": unclipped}
    made = options(guards=GuardOptions(spike_factor=50, spike_window=4), **rule)
    before_steps(monkeypatch, {4: poison(factor)})
    compute(made)
    hooks = hooks_of(made.output)
    assert proxy_run(made.output).skipped_steps == 1
    assert hooks[3] == hooks[2]
    assert hooks[4]["weights"] != hooks[3]["weights"]
    parameters = Mixture.load(made.output).parameters
    assert parameters["steps_averaged"] == STEPS - 1 + (name == "doremi")
    assert parameters["moved_per_step"] == pytest.approx(moves_of(hooks).sum() / (STEPS - 1))


def test_a_finished_proxy_is_reused_within_an_epoch_limit(
    corpus, found, copied, options, monkeypatch
):
    monkeypatch.setattr(doremi_compute, "build_model_chunks", run_out)  # must not be called
    metrics = copied.with_suffix("") / "proxy" / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    budget = int(0.9995 * sum(corpus.train_tokens.values()))
    with pytest.warns(MixtureWarning, match="--max-epochs 1"):
        assert compute(options(token_budget=budget, max_epochs=1.0))
    assert metrics.stat().st_mtime_ns == before
    mixture = Mixture.load(copied)
    assert mixture.epochs is not None
    assert max(mixture.epochs.values()) <= 1.0 + 1e-9
    assert mixture.unconstrained == pytest.approx(Mixture.load(found).weights)


@for_method(
    ("name", "last", "mean", "warning"),
    [
        ("doge", [0.02, 0.97, 0.01], [0.02, 0.96, 0.02], "'code' has 96%"),
        ("doge", [0.1, 0.2, 0.7], [0.3, 0.3, 0.4], "0.30 .*'poems'"),
    ],
)
def test_collapsed_or_unsettled_weights_give_a_warning(copied, options, last, mean, warning):
    edit_state(copied, log_weights=np.log(last).tolist(), mean=mean)
    with pytest.warns(MixtureWarning, match=warning):
        compute(options())


@for_method(("name", "mean"), [("doge", [0.5]), ("doge", [[0.1], [0.2, 0.7]]), ("doremi", "x")])
def test_a_damaged_state_is_an_error(copied, options, mean):
    edit_state(copied, mean=mean)
    with pytest.raises(UserError, match="hook is damaged"):
        compute(options())


@for_method(
    ("name", "changes", "problem"),
    [
        ("doremi", {"rule": DoremiRuleOptions("fork", 0.1, 1e-3)}, "clip_tokens True, not False"),
        ("doge", {"target_tokens": 9999}, "--target-tokens None, not 9999"),
        ("doremi", {"reference": None}, "DoReMi's reference"),
        ("doge", {"algorithm": "paper"}, "algorithm held-out, not paper"),
        ("doremi", HookState("GradientAlignment", {}), "GradientAlignment"),
        ("doremi", None, "no training hook"),
    ],
)
def test_a_proxy_of_other_settings_is_an_error(options, copied, capsys, changes, problem):
    if not isinstance(changes, dict):  # a hook state, to be written to the checkpoint
        dataclasses.replace(record_of(copied), hook=changes).save()
        changes = {}
    with pytest.raises(UserError, match=problem) as error:
        compute(options(**changes))
    assert "--work-dir" in str(error.value)
    assert str(copied.with_suffix("") / "proxy") in str(error.value)
    assert not copied.exists()
    assert capsys.readouterr().out == ""


@for_method(
    ("name", "changes", "problem"),
    [
        ("doremi", {"rule": DoremiRuleOptions(excess_ceiling=-1.0)}, "--excess-ceiling"),
        ("doremi", {"seq_length": 16}, "--seq-length 32"),
        ("doge", {"target_tokens": 99}, "--target-tokens 99"),
        ("doge", {"target": "news,code"}, "--target news,code"),
        ("doge", {"seq_length": 512}, "valid split of 'code'.*--split.*--algorithm paper"),
        ("doge", {"rule": DogeRuleOptions(doge_mu=1e-310)}, "--doge-mu"),
        ("doge", {"target": "poems", "token_budget": 19_100, "max_epochs": 1.0}, "--max-epochs 1"),
        ("doge", {"output": Path("mixture")}, "--output mixture"),
    ],
)
def test_mistakes_are_errors_before_training(options, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem):
        compute(options(**changes))
    assert list(tmp_path.iterdir()) == []


def known_document(number: int, rng: np.random.Generator):
    """A document of a domain: domains 0 and 2 repeat a cycle of 20 tokens, domain 1 is noise."""
    if number == 1:
        return rng.integers(0, EOD, 400)
    return (rng.integers(20) + np.arange(400)) % 20


def test_learnable_domains_gain_over_noise_and_copies_stay_equal(name, options, tmp_path):
    names = ("learnable", "noise", "copy")
    corpus = write_small_corpus(tmp_path / "corpus", names, document=known_document)
    changes = {"reference": None} if name == "doremi" else {"rule": DogeRuleOptions(doge_mu=0.05)}
    made = options(
        corpus=corpus.root,
        train_iters=40,
        global_batch_size=12,
        micro_batch_size=4,
        save_interval=100,
        log_interval=20,
        optimizer=OptimizerOptions(lr=3e-3, min_lr=1e-3, lr_warmup_iters=2),
        **changes,
    )
    compute(made)
    weights = Mixture.load(made.output).weights
    assert weights["copy"] == pytest.approx(weights["learnable"], rel=0.2)
    assert min(weights["learnable"], weights["copy"]) > 1.5 * weights["noise"]


class Checked(ExcessLossReweighting):
    """Check each step against a loop over tokens, and the reference against an evaluated model."""

    steps, apart, highest = 0, 0.0, 0.0

    def prepare(self):
        super().prepare()
        assert self._layout is not None
        self.reader = self._reference.reader(self._layout)

    def clipped(self, excess):
        ceiling = math.inf if self._rule.ceiling is None else self._rule.ceiling
        return min(max(excess, self._rule.floor), ceiling)

    def loss_weights(self, batch):
        losses_of_proxy = batch.token_losses()
        weights = super().loss_weights(batch)
        tokens: list[list[float]] = [[], [], []]
        of_proxy: list[list[float]] = [[], [], []]
        for part, losses in zip(batch.micro_batches, losses_of_proxy, strict=True):
            reference = self.reader.token_losses(part["tokens"], part["labels"])
            assert reference is not None
            for row, domain in enumerate(part["domain"].tolist()):
                for column in range(losses.size(1)):
                    if part["loss_mask"][row, column]:
                        proxy = float(losses[row, column])
                        tokens[domain].append(proxy - float(reference[row, column]))
                        of_proxy[domain].append(proxy)
        present = [domain for domain in range(3) if tokens[domain]]
        clipped_tokens = [np.mean([self.clipped(x) for x in tokens[d]]) for d in present]
        clipped_means = [self.clipped(float(np.mean(tokens[d]))) for d in present]
        expected, other = clipped_tokens, clipped_means
        if not self._rule.clip_tokens:
            expected, other = clipped_means, clipped_tokens
        np.testing.assert_allclose(self.state.excess[present], expected, rtol=1e-4, atol=1e-6)
        Checked.apart = max(Checked.apart, float(np.abs(np.subtract(expected, other)).max()))
        Checked.highest = max(Checked.highest, max(max(part, default=0.0) for part in tokens))
        # Domains are sampled uniformly, so the original weights tokens by alpha.
        alpha, counts = self.state.weights, np.array([len(part) for part in tokens])
        each = [alpha[d] * np.sum(of_proxy[d]) for d in range(3)]
        wanted = np.sum(each) / (alpha @ counts)
        if self._rule.domain_means:
            wanted = sum(alpha[d] * np.mean(of_proxy[d]) for d in present)
        # The step's loss is the sum of the weighted token losses, divided by the number of tokens.
        total = sum(
            float((weights[part["domain"]][:, None] * losses * part["loss_mask"]).sum())
            for part, losses in zip(batch.micro_batches, losses_of_proxy, strict=True)
        )
        assert total / counts.sum() == pytest.approx(wanted, rel=1e-5)
        Checked.steps += 1
        return weights


Checked.__name__ = ExcessLossReweighting.__name__  # checkpoints record the class name


@of_doremi
@pytest.mark.parametrize(
    ("rule", "masked"),
    [
        (DoremiRuleOptions(doremi_eta=0.1, excess_ceiling=0.3), False),
        (DoremiRuleOptions("fork", excess_ceiling=0.3), True),
    ],
)
def test_excess_losses_and_the_loss_equal_a_loop_over_tokens(options, monkeypatch, masked, rule):
    monkeypatch.setattr(doremi_compute, "ExcessLossReweighting", Checked)
    for name, value in (("steps", 0), ("apart", 0.0), ("highest", 0.0)):
        monkeypatch.setattr(Checked, name, value)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=masked)
    made = options(rule=rule, train_iters=3, boundaries=boundaries)
    assert compute(made)
    assert Checked.steps == 3
    assert Checked.apart > 1e-3  # otherwise both variants would give the same result
    assert Checked.highest > 0.3  # otherwise the ceiling would have no effect
    if rule.doremi_variant == "fork":
        mixture = Mixture.load(made.output)
        assert (mixture.parameters["eta"], mixture.parameters["eps"]) == (0.1, 0.0)
        assert mixture.parameters["steps_averaged"] == 3
        weights = [hook["weights"]["code"] for hook in hooks_of(made.output)]
        assert mixture.weights["code"] == pytest.approx(np.mean(weights))


@of_doremi
def test_a_reference_of_another_size_and_mixture_is_trained_first(options, corpus):
    made = options(
        reference=None, reference_mixture="natural", reference_model="tiny", train_iters=4
    )
    assert compute(made)
    proxy = proxy_run(made.output)
    reference = TrainingRun.load(proxy.root.with_name("reference"))
    assert (reference.status, proxy.status) == ("finished", "finished")
    total = sum(corpus.train_tokens.values())
    shares = {name: tokens / total for name, tokens in corpus.train_tokens.items()}
    assert reference.mixture == pytest.approx(shares)
    assert proxy.mixture == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))
    sizes = [run.model for run in (reference, proxy)]
    assert [size["hidden_size"] for size in sizes] == [128, 64]
    parameters = Mixture.load(made.output).parameters
    assert parameters["reference"]["model"] == "tiny"
    layers = sum(12 * size["num_layers"] * size["hidden_size"] ** 2 for size in sizes)
    assert parameters["paper_flops"] == 6 * proxy.tokens * layers
    assert parameters["made_from"] == ["mixture/reference", "mixture/proxy"]


def scale_losses(monkeypatch, factor, *, of_reference):
    """Multiply all losses of one model by ``factor`` in the third step."""
    token_losses = GlobalBatch.token_losses

    def losses(batch, other=None, other_shape=None):
        bad = batch.step == 2 and (other is not None) == of_reference
        return [(factor if bad else 1.0) * part for part in token_losses(batch, other, other_shape)]

    monkeypatch.setattr(GlobalBatch, "token_losses", losses)


@of_doremi
def test_non_finite_losses_of_the_proxy_leave_the_weights(options, monkeypatch):
    """The weights are unchanged even if clipping would hide the infinite losses."""
    scale_losses(monkeypatch, math.inf, of_reference=False)
    made = options(rule=DoremiRuleOptions(doremi_eta=0.1, excess_ceiling=0.3))
    compute(made)
    hooks = hooks_of(made.output)
    assert hooks[2] == hooks[1]
    assert state_of(made.output)["counted"] == STEPS


@of_doremi
@pytest.mark.parametrize(("factor", "variant"), [(math.nan, "original"), (math.inf, "fork")])
def test_non_finite_losses_of_the_reference_are_errors(options, monkeypatch, factor, variant):
    """An infinite loss is an error too, even if clipping would make the excess loss 0."""
    scale_losses(monkeypatch, factor, of_reference=True)
    with pytest.raises(UserError, match="'news'"):
        compute(options(rule=DoremiRuleOptions(variant, 0.1)))


@of_doremi
def test_an_unusable_reference_or_corpus_is_an_error(options, tmp_path, trained_run):
    alone = write_small_corpus(tmp_path / "corpus", ("news",))
    with pytest.raises(UserError, match="2 domains"):
        compute(options(corpus=alone.root))
    other = write_small_corpus(tmp_path / "other", seed=1)
    boundaries = DocumentBoundaryOptions(eod_mask_loss=True, reset_attention_mask=True)
    with pytest.warns(MixtureWarning, match="another --reset-attention-mask and --corpus"):
        Doremi(options(corpus=other.root, boundaries=boundaries))
    record = CheckpointRecord.load(find_checkpoint(trained_run))
    dataclasses.replace(record, tokenizer_hash="0" * 64).save()
    with pytest.raises(UserError, match="tokenizer"):
        compute(options(reference=trained_run))
    dataclasses.replace(TrainingRun.load(trained_run), status="interrupted", step=3).save()
    with pytest.raises(UserError, match="no finished run"):
        compute(options(reference=trained_run))
    assert not list(tmp_path.glob("mixture*"))


@of_doge
@pytest.mark.parametrize("train_on_target", [False, True])
def test_a_target_is_trained_on_only_if_requested(options, train_on_target):
    made = options(target="poems", rule=DogeRuleOptions(), train_on_target=train_on_target)
    assert compute(made)
    mixture, run = Mixture.load(made.output), proxy_run(made.output)
    assert sum(mixture.weights.values()) == pytest.approx(1.0)
    trained = list(DOMAINS if train_on_target else DOMAINS[:2])
    assert [name for name, weight in mixture.weights.items() if weight > 0] == trained
    mu = 0.01 if train_on_target else 0.05
    assert mixture.parameters["rule"]["mu"] == mu
    assert mixture.parameters["target_domains"] == ["poems"]
    assert mixture.parameters["trained_on"] == trained
    # The paper's formula counts only the parameters of the layers, so it gives fewer FLOPs.
    assert 0 < mixture.parameters["paper_flops"] < run.cost.flops
    # The target is sampled, since its gradients are needed.
    assert run.domain_tokens["poems"].actual == STEPS * 2 * 32
    first = hooks_of(made.output)[0]
    limited = np.clip([first["alignment"][name] for name in trained], 0, 5)
    expected = np.exp(0.5e-2 * limited / mu)  # the first warm-up step uses half of the peak rate
    assert [first["weights"][name] for name in trained] == pytest.approx(
        expected / expected.sum(), rel=1e-6
    )


@of_doge
def test_a_held_out_domain_may_be_the_target(options, held_out_corpus):
    """The first weights follow the alignment with the gradient of the held-out text, by hand."""
    changes = {"corpus": held_out_corpus.root, "rule": DogeRuleOptions(doge_max_norm=0.0)}
    made = options(target="poems", **changes)
    assert compute(made)
    mixture, run = Mixture.load(made.output), proxy_run(made.output)
    assert [*mixture.weights] == ["news", "code"]
    assert mixture.parameters["rule"]["mu"] == 0.05
    assert mixture.parameters["algorithm"] == "held-out"
    assert mixture.parameters["target_domains"] == ["poems"]
    assert mixture.parameters["trained_on"] == ["news", "code"]
    # Three of the nine samples of a step are held-out text, which is not counted as sampled.
    assert [*run.domain_tokens] == ["news", "code"]
    assert sum(domain.actual for domain in run.domain_tokens.values()) == STEPS * 6 * 32
    config, tokens = CheckpointModel(record_of(made.output)).config, STEPS * 9 * 32
    assert run.cost.flops == pytest.approx(training_flops(config, tokens, 32))
    assert mixture.parameters["paper_flops"] == paper_flops(config, trained_tokens=tokens)
    doge = Doge(made)
    assert doge.mix is not None
    assert doge.target_batch_size == 3
    gradients = []
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        batches = [(doge.plan.samples(doge.plan.schedule).batch(range(6)), i) for i in range(2)]
        batches.append((held_out_mix(doge.plan, doge.mix, 3).batch(range(3)), 0))
        for batch, domain in batches:
            model = build_model(doge.plan.config, layout, seed=doge.plan.options.seed)
            rows = batch["domain"] == domain
            losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
            losses[rows].mean().backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat(parts).double())
    news, code, poems = gradients
    norm = (news.norm() + code.norm()).item() / 2 + 1e-6
    expected = [(each @ poems).item() / norm for each in (news, code)]
    first = hooks_of(made.output)[0]
    assert [*first["alignment"].values()] == pytest.approx(expected, rel=1e-3)
    for wrong, flag in (
        ({"train_on_target": True}, "--train-on-target"),
        ({"algorithm": "paper"}, "--algorithm paper"),
        ({"target": "news,poems"}, "--target news,poems"),  # a single domain is left to train on
    ):
        with pytest.raises(UserError, match=flag):
            Doge(options(**{"target": "poems", **changes, **wrong}))


@of_doge
def test_by_default_no_alignment_is_clipped_at_initialization(options, tmp_path):
    names = [f"domain-{number}" for number in range(8)]
    corpus = write_small_corpus(tmp_path / "corpus", names)
    alignments = {}
    for algorithm in (None, "paper"):
        made = options(
            corpus=corpus.root,
            output=tmp_path / f"{algorithm}.json",
            algorithm=algorithm,
            rule=DogeRuleOptions(),
            train_iters=1,
            global_batch_size=64,
            micro_batch_size=8,
            optimizer=OptimizerOptions(lr=1e-2, lr_warmup_iters=0),
        )
        assert compute(made)
        alignments[algorithm] = list(hooks_of(made.output)[0]["alignment"].values())
    assert max(alignments[None]) < DogeRuleOptions().doge_dw_max / 2
    # The sum over eight domains is larger than the mean, and includes each domain's own gradient.
    assert np.mean(alignments["paper"]) > 8 * np.mean(alignments[None])


def test_a_step_has_equal_parts_of_held_out_text(tmp_path):
    names, size = [f"domain-{number}" for number in range(7)], 21
    corpus = write_small_corpus(tmp_path / "corpus", names)
    proxy = ProxyOptions(model="nano", seq_length=32, global_batch_size=128)
    doge = Doge(DogeOptions(corpus=corpus.root, output=tmp_path / "mixture.json", proxy=proxy))
    assert doge.target_batch_size == size
    assert doge.mix is not None
    assert doge.mix == doge.plan.valid
    samples, again = (held_out_mix(doge.plan, doge.mix, size) for _ in range(2))
    tokens = []
    for step in (1999, 0, 1, 700):
        indices = range(step * size, (step + 1) * size)
        batch = samples.batch(indices)
        assert batch["domain"].bincount().tolist() == [3] * 7
        tokens.append(batch["tokens"])
        # One of three ranks reads the same samples, after other ones.
        assert torch.equal(again.batch(indices[1::3])["tokens"], batch["tokens"][1::3])
    assert not torch.equal(tokens[1], tokens[2])


NAMES = ["a", "b", "c", "d"]
PRESENT = (0, 1, 3)  # positions of the domains in the batch
ALL = Roles((0, 1, 2, 3), (0, 1, 2, 3))
TOWARDS_B = Roles((0, 2, 3), (1,))
TOWARDS_HELD_OUT = Roles((0, 1, 2, 3), (4,))
HELD_OUT_SIZE = 3


class HeldOutText:
    """Random samples, each a function of its number, with 20% of the tokens masked."""

    def __len__(self):
        return 100

    def batch(self, indices):
        assert list(indices) == [15, 16, 17]  # step 5
        generator = torch.Generator().manual_seed(1)
        batch = next(random_batches(100, HELD_OUT_SIZE, 16, num_domains=2))
        batch["tokens"] = torch.randint(100, batch["tokens"].shape, generator=generator)
        batch["loss_mask"] = (torch.rand(HELD_OUT_SIZE, 16, generator=generator) < 0.8).float()
        return batch


@pytest.fixture
def passes(one_rank):
    return build_passes(one_rank, per_token=True)


def clipped_gradients(passes, batches, max_norm):
    """Compute the clipped gradients [k, n] by autograd, in float64; 0 for the absent domain."""
    found = {}
    for domain in PRESENT:
        masks = [domain_mask(batch, domain) for batch in batches]
        tokens = sum(mask.sum() for mask in masks)
        gradient = expected_gradient(passes, batches, [mask / tokens for mask in masks]).double()
        found[domain] = gradient * min(1.0, max_norm / float(gradient.norm()))
    # The gradient of the mean loss of the held-out samples, whatever their domains are.
    held_out = HeldOutText().batch(range(15, 18))
    mean = held_out["loss_mask"] / held_out["loss_mask"].sum()
    gradient = expected_gradient(passes, [held_out], [mean]).double()
    found[NUM_DOMAINS] = gradient * min(1.0, max_norm / float(gradient.norm()))
    zero = torch.zeros_like(found[0])
    return torch.stack([found.get(domain, zero) for domain in range(NUM_DOMAINS + 1)])


@pytest.mark.parametrize(
    ("roles", "max_norm"), [(ALL, 0.4), (TOWARDS_B, 5.0), (TOWARDS_HELD_OUT, 0.4)]
)
def test_a_step_equals_the_algorithm_on_whole_gradients(
    passes, micro_batches, one_rank, roles, max_norm
):
    rule = DogeRule(mu=0.2, dw_min=-5.0, max_norm=max_norm)
    size = HELD_OUT_SIZE if roles is TOWARDS_HELD_OUT else 0
    hook = GradientAlignment(NAMES, rule, roles, HeldOutText() if size else None, size)
    sums, found = run(hook, passes, micro_batches, one_rank)
    assert hook.flops == training_flops(SHAPE, size * 16, 16)
    assert sums.shape == (NUM_DOMAINS, 3)
    assert sums[:, 2].sum() == 6 * 16  # held-out samples are not training samples
    gradients = clipped_gradients(passes, micro_batches, max_norm)
    norms = [float(gradients[i].norm()) for i in roles.train if i in PRESENT]
    assert min(norms) < 5.0  # max_norm 0.4 clips all gradients, 5 none
    towards = gradients[list(roles.target)].sum(0)
    mean_norm = sum(norms) / len(norms) + 1e-6
    scores = torch.stack([gradients[i] @ towards / mean_norm for i in roles.train]).clamp(-5, 5)
    weights = torch.softmax(RATE * scores / rule.mu, dim=0)
    logged = hook.metrics()["weights"]
    assert [logged[NAMES[i]] for i in roles.train] == pytest.approx(weights.tolist(), 1e-4)
    assert float(weights.max() - weights.min()) > 0.01
    rows = [row for row, domain in enumerate(roles.train) if domain in PRESENT]
    shares = weights[rows] / weights[rows].sum()
    expected = shares @ gradients[[roles.train[row] for row in rows]]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)
    assert (logged["b"] == 0.0) == (roles is TOWARDS_B)
