"""tools/compute_mixture.py --method doge on one rank, and a step of its proxy against autograd."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    Mixture,
    MixtureWarning,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import HookState, find_checkpoint, step_folder
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.doge import METHOD
from megatron_chameleon.methods.doge.compute import compute_doge
from megatron_chameleon.methods.doge.hook import GradientAlignment
from megatron_chameleon.methods.doge.options import DogeOptions, DogeRule
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from megatron_chameleon.training.domain_gradients import GradientRows
from megatron_chameleon.training.options import GuardOptions, OptimizerOptions
from tests.small_corpus import DOMAINS, EOD, write_small_corpus
from tests.unit.training.bad_steps import before_steps, poison, run_out
from tests.unit.training.test_hook import (
    NUM_DOMAINS,
    RATE,
    build_passes,
    domain_mask,
    expected_gradient,
    micro_batches,
    run,
)

__all__ = ["micro_batches"]  # a fixture

STEPS = 6


def doge_options(corpus, output, **changes) -> DogeOptions:
    """A nano proxy of six steps; ``changes`` are of the method or of the proxy."""
    fields = {field.name for field in dataclasses.fields(DogeOptions)}
    own = {name: value for name, value in changes.items() if name in fields}
    of_proxy = {name: value for name, value in changes.items() if name not in fields}
    proxy = {
        "model_size": "nano",
        "seq_length": 32,
        "train_iters": STEPS,
        "global_batch_size": 6,
        "micro_batch_size": 2,
        "log_interval": 1,
        "save_interval": 3,
        "seed": 3,
        "optimizer": OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=2),
        **of_proxy,
    }
    settings = {"rule": DogeRule(doge_mu=0.2), "proxy": ProxyOptions(**proxy), **own}
    return DogeOptions(corpus=corpus.root, output=output, **settings)


@pytest.fixture
def options(corpus, tmp_path):
    """``options(**changes)``: a mixture in ``tmp_path``."""
    return lambda **changes: doge_options(corpus, tmp_path / "doge.json", **changes)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """The read-only folder of a computed mixture."""
    folder = tmp_path_factory.mktemp("doge")
    assert compute_doge(doge_options(corpus, folder / "doge.json"))
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """The work directory of ``options()``, with the finished proxy."""
    return Path(shutil.copytree(finished / "doge", tmp_path / "doge"))


def hooks_of(folder: Path) -> list[dict]:
    return [line["hook"] for line in TrainingRun.load(folder / "doge" / "proxy").metrics()]


def record_of(folder: Path, step: int = STEPS) -> CheckpointRecord:
    return CheckpointRecord.load(step_folder(folder / "doge" / "proxy", step))


def state_of(folder: Path, step: int = STEPS) -> dict:
    record = record_of(folder, step)
    assert record.hook is not None
    return record.hook.state


def moves_of(hooks: list[dict]) -> np.ndarray:
    path = np.array([[1 / 3] * 3, *(list(hook["weights"].values()) for hook in hooks)])
    return np.abs(np.diff(path, axis=0)).sum(1) / 2


def test_the_mixture_is_the_mean_of_the_proxys_weights(finished):
    mixture, hooks = Mixture.load(finished / "doge.json"), hooks_of(finished)
    assert len(hooks) == STEPS
    means = {name: np.mean([hook["weights"][name] for hook in hooks]) for name in DOMAINS}
    assert mixture.weights == pytest.approx(means)
    assert max(means.values()) - min(means.values()) > 0.005
    scores = {name: np.mean([hook["alignment"][name] for hook in hooks]) for name in DOMAINS}
    assert mixture.scores == pytest.approx(scores)
    parameters = mixture.parameters
    assert parameters["last_weights"] == pytest.approx(hooks[-1]["weights"])
    assert parameters["steps_averaged"] == STEPS
    assert parameters["rule"]["mu"] == 0.2
    assert parameters["target_domains"] == list(DOMAINS)
    assert parameters["moved_per_step"] == pytest.approx(moves_of(hooks).mean())
    # Half of the peak learning rate, at the first of two warm-up steps.
    limited = np.clip([hooks[0]["alignment"][name] for name in DOMAINS], 0, 5)
    expected = np.exp(0.5e-2 * limited / 0.2)
    assert list(hooks[0]["weights"].values()) == pytest.approx(expected / expected.sum(), rel=1e-6)
    # Sampling stays uniform.
    run = TrainingRun.load(finished / "doge" / "proxy")
    assert {drawn.got for drawn in run.domain_tokens.values()} == {STEPS * 2 * 32}
    assert run.mixture == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))


def test_cost_and_inputs(finished):
    mixture = Mixture.load(finished / "doge.json")
    (folder,) = mixture.parameters["made_from"]
    run = TrainingRun.load(finished / folder)
    total = mixture.parameters["total_cost"]
    assert mixture.cost.flops == 0
    assert total["flops"] == run.cost.flops > 0
    assert 0 < mixture.parameters["paper_flops"] < run.cost.flops  # without attention and head
    seconds = run.cost.device_seconds + mixture.cost.device_seconds
    assert total["device_seconds"] == pytest.approx(seconds)
    proxy = CheckpointRecord.load(find_checkpoint(run.root))
    assert mixture.provenance is not None
    assert mixture.provenance.inputs["proxy"] == proxy.hash


def test_a_stopped_run_resumes_with_the_same_result(finished, options, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        before_steps(patched, {3: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        assert METHOD.compute(options()) == STOPPED_STATUS
    assert not (tmp_path / "doge.json").exists()
    assert compute_doge(options())
    assert hooks_of(tmp_path) == hooks_of(finished)
    assert state_of(tmp_path) == state_of(finished)
    mixtures = [Mixture.load(folder / "doge.json").weights for folder in (tmp_path, finished)]
    assert mixtures[0] == mixtures[1]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rule": DogeRule(doge_mu=0.3)}, "mu 0.2, not 0.3"),
        ({"target": "news", "train_on_target": True}, r"'poems'\], not \['news'\]"),
        ({"seed": 4}, "--seed 3, not 4"),
    ],
)
def test_a_proxy_of_other_settings_is_an_error(copied, options, tmp_path, capsys, changes, problem):
    with pytest.raises(UserError, match=problem) as error:
        compute_doge(options(**changes))
    assert "--work-dir" in str(error.value)
    assert str(copied / "proxy") in str(error.value)
    assert not (tmp_path / "doge.json").exists()
    assert capsys.readouterr().out == ""


def test_gradients_that_do_not_fit_are_an_error(options, tmp_path, monkeypatch):
    monkeypatch.setattr(GradientRows, "__init__", run_out)
    with pytest.raises(UserError, match=r"^DoGE's proxy: .*gradients of 3 domains 0\.0"):
        compute_doge(options())
    assert not (tmp_path / "doge" / "proxy").exists()


@pytest.mark.parametrize("train_on_target", [False, True])
def test_a_target_is_trained_on_only_if_requested(options, tmp_path, train_on_target):
    settings = {"target": "poems", "rule": DogeRule(), "train_on_target": train_on_target}
    assert compute_doge(options(**settings))
    mixture = Mixture.load(tmp_path / "doge.json")
    assert sum(mixture.weights.values()) == pytest.approx(1.0)
    trained = list(DOMAINS if train_on_target else DOMAINS[:2])
    assert [name for name, weight in mixture.weights.items() if weight > 0] == trained
    assert mixture.parameters["rule"]["mu"] == (0.01 if train_on_target else 0.05)
    assert mixture.parameters["target_domains"] == ["poems"]
    assert mixture.parameters["trained_on"] == trained
    run = TrainingRun.load(tmp_path / "doge" / "proxy")
    assert run.domain_tokens["poems"].got == STEPS * 2 * 32  # sampled for its gradients


def test_a_finished_proxy_is_reused_within_an_epoch_limit(
    corpus, finished, copied, options, tmp_path, capsys
):
    budget = int(2.9 * min(Corpus.load(corpus.root).train_tokens.values()))
    with pytest.warns(MixtureWarning, match="--max-epochs 1"):
        assert compute_doge(options(token_budget=budget, max_epochs=1.0))
    assert "nothing to do" in capsys.readouterr().out
    mixture = Mixture.load(tmp_path / "doge.json")
    assert mixture.epochs is not None
    assert max(mixture.epochs.values()) <= 1.0 + 1e-9
    assert mixture.unconstrained == pytest.approx(Mixture.load(finished / "doge.json").weights)
    assert mixture.parameters["made_from"] == ["doge/proxy"]


@pytest.mark.parametrize("factor", [math.nan, 1e4])
def test_a_skipped_step_moves_no_weight(options, tmp_path, monkeypatch, factor):
    """Both a gradient that is not finite, and a spike with finite products."""
    rule = DogeRule(doge_mu=0.2, doge_max_norm=0.0)  # clipping would hide the spike
    with monkeypatch.context() as patched:
        before_steps(patched, {4: poison(factor)})
        compute_doge(options(rule=rule, guards=GuardOptions(spike_factor=50, spike_window=4)))
    hooks = hooks_of(tmp_path)
    assert TrainingRun.load(tmp_path / "doge" / "proxy").skipped_steps == 1
    assert hooks[3] == hooks[2]
    assert hooks[4] != hooks[3]
    parameters = Mixture.load(tmp_path / "doge.json").parameters
    assert parameters["steps_averaged"] == STEPS - 1
    assert parameters["moved_per_step"] == pytest.approx(moves_of(hooks).sum() / (STEPS - 1))


@pytest.mark.parametrize(
    ("last", "mean", "warning"),
    [
        ([0.02, 0.97, 0.01], [0.02, 0.96, 0.02], "'code' has 96%"),
        ([0.1, 0.2, 0.7], [0.3, 0.3, 0.4], "0.30 .*'poems'"),
        ([0.5, 0.3, 0.2], [0.4, 0.3, 0.3], None),
    ],
)
def test_unsettled_or_collapsed_weights_are_warned_of(
    copied, options, tmp_path, recwarn, last, mean, warning
):
    record = record_of(tmp_path)
    assert record.hook is not None
    state = {**record.hook.state, "log_weights": np.log(last).tolist(), "mean": mean}
    dataclasses.replace(record, hook=HookState(record.hook.name, state)).save()
    compute_doge(options())
    warned = [w for w in recwarn if w.category is MixtureWarning]
    if warning is None:
        assert warned == []
    else:
        with pytest.warns(MixtureWarning, match=warning):
            compute_doge(options())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target": "prose"}, "--target prose"),
        ({"target": "news,code"}, "--target news,code"),
        ({"train_on_target": True}, "--train-on-target"),
        ({"rule": DogeRule(doge_mu=1e-310)}, "--doge-mu"),
        ({"rule": DogeRule(doge_dw_min=9.0)}, "--doge-dw-min"),
        ({"target": "poems", "token_budget": 19_100, "max_epochs": 1.0}, "--max-epochs 1"),
        ({"global_batch_size": 5}, "--global-batch-size 5"),
        ({"output": Path("mixture")}, "--output mixture"),
        ({"output": Path("/dev/null/doge.json")}, "/dev/null"),
    ],
)
def test_mistakes_are_errors_before_training(corpus, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem):
        compute_doge(doge_options(corpus, **{"output": tmp_path / "doge.json", **changes}))
    assert list(tmp_path.iterdir()) == []


def known_document(number: int, rng: np.random.Generator):
    """Three domains: a walk around 20 tokens, the same again, and noise."""
    if number == 2:
        return rng.integers(0, EOD, 400)
    return (rng.integers(20) + np.arange(400)) % 20


def test_learnable_domains_gain_over_noise(tmp_path):
    names = ("walk", "walk again", "noise")
    known = write_small_corpus(tmp_path / "corpus", names, document=known_document)
    run_options = doge_options(
        known,
        tmp_path / "doge.json",
        train_iters=40,
        global_batch_size=12,
        micro_batch_size=4,
        save_interval=100,
        log_interval=20,
        optimizer=OptimizerOptions(lr=3e-3, min_lr=1e-3, lr_warmup_iters=2),
        rule=DogeRule(doge_mu=0.05),
    )
    compute_doge(run_options)
    weights = Mixture.load(run_options.output).weights
    assert weights["walk"] == pytest.approx(weights["walk again"], rel=0.2)
    assert min(weights["walk"], weights["walk again"]) > 1.5 * weights["noise"]


NAMES = ["a", "b", "c", "d"]
PRESENT = (0, 1, 3)  # domains of the batch
ALL = Roles((0, 1, 2, 3), (0, 1, 2, 3))
TOWARDS_B = Roles((0, 2, 3), (1,))


@pytest.fixture
def passes(one_rank):
    return build_passes(one_rank, per_token=True)


def clipped_gradients(passes, batches, max_norm):
    """[k, n] float64 by autograd; zero for the absent domain."""
    found = {}
    for domain in PRESENT:
        masks = [domain_mask(batch, domain) for batch in batches]
        tokens = sum(mask.sum() for mask in masks)
        gradient = expected_gradient(passes, batches, [mask / tokens for mask in masks]).double()
        found[domain] = gradient * min(1.0, max_norm / float(gradient.norm()))
    zero = torch.zeros_like(found[0])
    return torch.stack([found.get(domain, zero) for domain in range(NUM_DOMAINS)])


@pytest.mark.parametrize("roles", [ALL, TOWARDS_B])
@pytest.mark.parametrize("max_norm", [5.0, 0.4])
def test_a_step_equals_the_algorithm_on_whole_gradients(
    passes, micro_batches, one_rank, roles, max_norm
):
    recipe = DogeRecipe(mu=0.2, max_norm=max_norm)
    hook = GradientAlignment(NAMES, recipe, roles)
    _, found = run(hook, passes, micro_batches, one_rank)
    gradients = clipped_gradients(passes, micro_batches, max_norm)
    norms = [float(gradients[i].norm()) for i in roles.train if i in PRESENT]
    assert min(norms) < 5.0  # 0.4 clips all, 5 none
    towards = gradients[list(roles.target)].sum(0)
    mean_norm = sum(norms) / len(norms) + 1e-6
    scores = torch.stack([gradients[i] @ towards / mean_norm for i in roles.train]).clamp(0, 5)
    weights = torch.softmax(RATE * scores / recipe.mu, dim=0)
    logged = hook.metrics()["weights"]
    assert [logged[NAMES[i]] for i in roles.train] == pytest.approx(weights.tolist(), 1e-4)
    assert float(weights.max() - weights.min()) > 0.01
    rows = [row for row, domain in enumerate(roles.train) if domain in PRESENT]
    shares = weights[rows] / weights[rows].sum()
    expected = shares @ gradients[[roles.train[row] for row in rows]]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)
    assert (logged["b"] == 0.0) == (roles is TOWARDS_B)


def test_a_non_finite_gradient_is_ignored(passes, micro_batches, one_rank):
    hook = GradientAlignment(NAMES, DogeRecipe(mu=0.2), ALL)
    before = hook.state_dict()
    for batch in micro_batches:
        batch["loss_mask"][batch["domain"] == 1] *= math.nan
    _, found = run(hook, passes, micro_batches, one_rank)
    assert hook.state_dict() == before
    assert not torch.isfinite(found.norm())  # so that the guard skips the step
