"""What DoReMi and DoGE share: means of a proxy's weights, resuming, reuse, and mistakes."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import HookState
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.doge.options import DogeRule
from megatron_chameleon.methods.doremi import hook as doremi_hook
from megatron_chameleon.methods.doremi.options import DoremiRule
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.training.options import GuardOptions, OptimizerOptions
from tests.small_corpus import DOMAINS, EOD, write_small_corpus
from tests.unit.methods.proxies import (
    STEPS,
    compute,
    edit_state,
    hooks_of,
    method_options,
    proxy_run,
    record_of,
    state_of,
)
from tests.unit.training.runs import before_steps, poison, run_out

for_method = partial(pytest.mark.parametrize, indirect=["name"])


@pytest.fixture(scope="module", params=["doremi", "doge"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def options_in(name, corpus, finished_run):
    """``options_in(folder, **changes)``; the reference of DoReMi is finished."""
    settings = {"corpus": corpus.root}
    if name == "doremi":
        settings["reference"] = finished_run
    return lambda folder, **changes: method_options(
        name, **{"output": folder / "mixture.json", **settings, **changes}
    )


@pytest.fixture
def options(options_in, tmp_path):
    return partial(options_in, tmp_path)


@pytest.fixture(scope="module")
def found(name, options_in, tmp_path_factory) -> Path:
    """A read-only mixture, next to its proxy."""
    made = options_in(tmp_path_factory.mktemp(name))
    assert compute(made)
    return made.output


@pytest.fixture
def copied(found, tmp_path) -> Path:
    """The mixture of ``options()``, with a copy of the finished proxy."""
    shutil.copytree(found.with_suffix(""), tmp_path / found.stem)
    return tmp_path / found.name


def moves_of(hooks: list[dict]) -> np.ndarray:
    path = np.array([[1 / 3] * 3, *(list(hook["weights"].values()) for hook in hooks)])
    return np.abs(np.diff(path, axis=0)).sum(1) / 2


def test_the_mixture_is_the_mean_of_the_logged_weights(name, found, corpus):
    mixture, hooks, run = Mixture.load(found), hooks_of(found), proxy_run(found)
    parameters, uniform = mixture.parameters, dict.fromkeys(DOMAINS, 1 / 3)
    path = [hook["weights"] for hook in hooks]
    averaged = [uniform, *path] if name == "doremi" else path  # the original DoReMi counts both
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
    assert run.mixture == pytest.approx(uniform)  # sampling stays uniform
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
    """Stopped by a signal, or killed between two checkpoints."""

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
    """Both a gradient that is not finite, and a spike with finite products."""
    rule = {} if name == "doremi" else {"rule": DogeRule(0.2, doge_max_norm=0.0)}  # no clipping
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
    monkeypatch.setattr(doremi_hook, "build_model_chunks", run_out)  # no reference is built
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


@for_method(
    ("name", "damage"),
    [("doge", {"mean": [0.5]}), ("doge", {"mean": [[0.1], [0.2, 0.7]]}), ("doremi", {"mean": "x"})],
)
def test_a_damaged_state_is_an_error(copied, options, damage):
    edit_state(copied, **damage)
    with pytest.raises(UserError, match="hook is damaged"):
        compute(options())


@for_method(
    ("name", "changes", "problem"),
    [
        ("doremi", {"rule": DoremiRule("fork", 0.1, 1e-3)}, "clip_tokens True, not False"),
        ("doremi", {"seed": 7}, "--seed 1234, not 7"),
        ("doremi", {"reference": None}, "DoReMi's reference"),
        ("doge", {"rule": DogeRule(doge_mu=0.3)}, "mu 0.2, not 0.3"),
        ("doge", {"target": "news", "train_on_target": True}, r"'poems'\], not \['news'\]"),
        ("doremi", HookState("GradientAlignment", {}), "GradientAlignment"),
        ("doremi", None, "no hook"),
    ],
)
def test_a_proxy_of_other_settings_is_an_error(options, copied, capsys, changes, problem):
    if not isinstance(changes, dict):  # a hook state for the checkpoint
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
        ("doremi", {"rule": DoremiRule(excess_ceiling=-1.0)}, "--excess-ceiling"),
        ("doremi", {"reference": Path("lost")}, "--reference lost"),
        ("doremi", {"reference": None, "reference_mixture": "lost.json"}, "lost.json"),
        ("doremi", {"seq_length": 16}, "--seq-length 32"),
        ("doge", {"target": "prose"}, "--target prose"),
        ("doge", {"target": "news,code"}, "--target news,code"),
        ("doge", {"rule": DogeRule(doge_mu=1e-310)}, "--doge-mu"),
        ("doge", {"target": "poems", "token_budget": 19_100, "max_epochs": 1.0}, "--max-epochs 1"),
        ("doge", {"output": Path("mixture")}, "--output mixture"),
        ("doge", {"output": Path("/dev/null/doge.json")}, "/dev/null"),
    ],
)
def test_mistakes_are_errors_before_training(options, tmp_path, changes, problem):
    with pytest.raises(UserError, match=problem):
        compute(options(**changes))
    assert list(tmp_path.iterdir()) == []


def known_document(number: int, rng: np.random.Generator):
    """Three domains: a walk around 20 tokens, noise, and the walk again."""
    if number == 1:
        return rng.integers(0, EOD, 400)
    return (rng.integers(20) + np.arange(400)) % 20


def test_learnable_domains_gain_over_noise_and_copies_stay_equal(name, options, tmp_path):
    names = ("learnable", "noise", "copy")
    corpus = write_small_corpus(tmp_path / "corpus", names, document=known_document)
    changes = {"reference": None} if name == "doremi" else {"rule": DogeRule(doge_mu=0.05)}
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
