"""DoGE from the command on, on one rank: what is trained, written, told and refused."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Corpus,
    Mixture,
    MixtureWarning,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import HookState, find_checkpoint, step_folder
from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.common.registry import find_methods
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.gradient_alignment.compute import compute_doge
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.training.gradient_rows import GradientRows
from tests.small_corpus import DOMAINS
from tests.unit.training.bad_steps import before_steps, poison, run_out

STEPS = 6


def doge_options(corpus, output, **changes) -> DogeOptions:
    """Of a nano proxy of six steps; what is no option of the method is one of the proxy."""
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
    """The folder of a mixture that was found, for reading only."""
    folder = tmp_path_factory.mktemp("doge")
    assert compute_doge(doge_options(corpus, folder / "doge.json"))
    return folder


def hooks_of(folder: Path) -> list[dict]:
    return [line["hook"] for line in TrainingRun.load(folder / "doge" / "proxy").metrics()]


def state_of(folder: Path, step: int = STEPS) -> dict:
    record = CheckpointRecord.load(step_folder(folder / "doge" / "proxy", step))
    assert record.hook is not None
    return record.hook.state


def test_the_mixture_is_the_mean_of_the_proxys_weights(finished):
    mixture = Mixture.load(finished / "doge.json")
    hooks = hooks_of(finished)
    assert len(hooks) == STEPS
    means = {name: np.mean([hook["weights"][name] for hook in hooks]) for name in DOMAINS}
    assert mixture.weights == pytest.approx(means)
    assert max(means.values()) - min(means.values()) > 0.005
    scores = {name: np.mean([hook["alignment"][name] for hook in hooks]) for name in DOMAINS}
    assert mixture.scores == pytest.approx(scores)
    assert mixture.parameters["last_weights"] == pytest.approx(hooks[-1]["weights"])
    assert mixture.parameters["steps_averaged"] == STEPS
    assert mixture.parameters["rule"]["mu"] == 0.2
    assert mixture.parameters["target_domains"] == list(DOMAINS)
    path = np.array([[1 / 3] * 3, *(list(hook["weights"].values()) for hook in hooks)])
    moves = np.abs(np.diff(path, axis=0)).sum(1) / 2
    assert mixture.parameters["moved_per_step"] == pytest.approx(moves.mean())


def test_the_first_move_has_the_rate_of_its_own_update(finished):
    """Warmed up linearly: half the peak at the first of two steps."""
    first = hooks_of(finished)[0]
    limited = np.clip([first["alignment"][name] for name in DOMAINS], 0, 5)
    expected = np.exp(0.5e-2 * limited / 0.2)
    assert list(first["weights"].values()) == pytest.approx(expected / expected.sum(), rel=1e-6)
    lines = list(TrainingRun.load(finished / "doge" / "proxy").metrics())
    assert lines[0]["lr"] == pytest.approx(0.5e-2)


def test_every_domain_is_drawn_alike_throughout(finished):
    run = TrainingRun.load(finished / "doge" / "proxy")
    assert {drawn.got for drawn in run.domain_tokens.values()} == {STEPS * 2 * 32}
    assert run.mixture == pytest.approx(dict.fromkeys(DOMAINS, 1 / 3))


def test_the_whole_cost_is_told_and_the_proxys_is_not_counted_twice(finished):
    mixture = Mixture.load(finished / "doge.json")
    (folder,) = mixture.parameters["made_from"]
    run = TrainingRun.load(finished / folder)
    assert mixture.cost.flops == 0
    assert mixture.parameters["total_cost"]["flops"] == run.cost.flops > 0
    layers_alone = mixture.parameters["paper_flops"]  # 6 N D, without attention and the head
    assert 0 < layers_alone < run.cost.flops
    seconds = mixture.parameters["total_cost"]["device_seconds"]
    assert seconds == pytest.approx(run.cost.device_seconds + mixture.cost.device_seconds)
    assert mixture.provenance is not None
    proxy = CheckpointRecord.load(find_checkpoint(run.root))
    assert mixture.provenance.inputs["proxy"] == proxy.hash


def test_a_run_that_was_stopped_goes_on_exactly(finished, options, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        before_steps(patched, {3: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        assert find_methods()["doge"].compute(options()) == STOPPED_STATUS
    assert "stopped in the proxy; the same command goes on" in capsys.readouterr().out
    assert not (tmp_path / "doge.json").exists()
    assert compute_doge(options())
    assert hooks_of(tmp_path) == hooks_of(finished)
    assert state_of(tmp_path) == state_of(finished)
    assert Mixture.load(tmp_path / "doge.json").weights == pytest.approx(
        Mixture.load(finished / "doge.json").weights, abs=0
    )


def test_a_run_that_was_killed_goes_on_from_its_checkpoint(finished, options, tmp_path):
    """Step 6 is lost with all that was logged since step 3."""
    shutil.copytree(finished / "doge", tmp_path / "doge")
    run = TrainingRun.load(tmp_path / "doge" / "proxy")
    dataclasses.replace(run, status="running", step=3).save()
    shutil.rmtree(step_folder(run.root, STEPS))
    (run.root / "checkpoints" / "latest").unlink()
    assert compute_doge(options())
    assert state_of(tmp_path) == state_of(finished)


def test_a_finished_proxy_is_used_again(finished, options, tmp_path, capsys):
    shutil.copytree(finished / "doge", tmp_path / "doge")
    budget = {"token_budget": 1000, "max_epochs": 5.0}
    assert compute_doge(options(**budget))
    assert "is finished at step 6; nothing to do" in capsys.readouterr().out
    mixture = Mixture.load(tmp_path / "doge.json")
    assert mixture.weights == pytest.approx(Mixture.load(finished / "doge.json").weights)
    assert mixture.max_epochs == 5.0
    assert mixture.parameters["made_from"] == ["doge/proxy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": DogeRule(doge_mu=0.3)}, "another rule: mu 0.2, not 0.3; give another"),
        ({"target": "news", "train_on_target": True}, "another target: news, code, poems, not new"),
        ({"seed": 4}, "holds a run with --seed 3, not 4"),
    ],
)
def test_a_proxy_of_other_settings_is_refused(finished, options, tmp_path, changes, message):
    shutil.copytree(finished / "doge", tmp_path / "doge")
    with pytest.raises(UserError, match=message):
        compute_doge(options(**changes))
    assert not (tmp_path / "doge.json").exists()


def test_half_a_proxy_of_another_rule_is_refused_before_it_is_trained(
    finished, options, tmp_path, capsys
):
    shutil.copytree(finished / "doge", tmp_path / "doge")
    run = TrainingRun.load(tmp_path / "doge" / "proxy")
    dataclasses.replace(run, status="running", step=3).save()
    shutil.rmtree(step_folder(run.root, STEPS))
    (run.root / "checkpoints" / "latest").unlink()
    said = r"another rule: eps 0\.0, not 0\.1; give another --work-dir, or delete .*/proxy to start"
    with pytest.raises(UserError, match=said):
        compute_doge(options(rule=DogeRule(doge_mu=0.2, doge_eps=0.1)))
    assert TrainingRun.load(run.root).step == 3
    assert capsys.readouterr().out == ""


def test_a_run_that_nobody_watched_is_no_proxy(finished, options, tmp_path):
    shutil.copytree(finished / "doge", tmp_path / "doge")
    record = CheckpointRecord.load(step_folder(tmp_path / "doge" / "proxy", STEPS))
    dataclasses.replace(record, hook=None).save()
    with pytest.raises(UserError, match=r"that DoGE has not watched \(nothing has\); give another"):
        compute_doge(options())


def test_another_methods_proxy_is_refused(finished, options, tmp_path, capsys):
    """DoReMi's has the same name below its folder."""
    shutil.copytree(finished / "doge", tmp_path / "doge")
    record = CheckpointRecord.load(step_folder(tmp_path / "doge" / "proxy", STEPS))
    assert record.hook is not None
    other = HookState("ExcessLossReweighting", record.hook.state)
    dataclasses.replace(record, hook=other).save()
    said = r"DoGE has not watched \(ExcessLossReweighting has\); give another --work-dir, or delete"
    with pytest.raises(UserError, match=said):
        compute_doge(options())
    assert capsys.readouterr().out == ""


def test_room_for_all_gradients_is_taken_before_anything_is_written(options, tmp_path, monkeypatch):
    monkeypatch.setattr(GradientRows, "__init__", run_out)
    said = r"^DoGE's proxy: out of memory: .*gradients of 3 domains 0\.0"
    with pytest.raises(UserError, match=said):
        compute_doge(options())
    assert not (tmp_path / "doge" / "proxy").exists()


def test_epochs_of_a_target_that_is_not_trained_on_fill_no_budget(corpus, options, tmp_path):
    tokens = Corpus.load(corpus.root).train_tokens
    budget = sum(tokens.values())  # one epoch of all three, and more than one of the other two
    given = options(target="poems", token_budget=budget, max_epochs=1.0)
    with pytest.raises(UserError, match="so many epochs of all domains that get a weight are"):
        compute_doge(given)
    assert list(tmp_path.iterdir()) == []


def test_a_target_gets_no_weight_and_is_not_trained_on(options, tmp_path, capsys):
    given = options(target="poems", rule=DogeRule())
    assert compute_doge(given)
    mixture = Mixture.load(tmp_path / "doge.json")
    assert mixture.weights["poems"] == 0.0
    assert sum(mixture.weights.values()) == pytest.approx(1.0)
    assert min(mixture.weights["news"], mixture.weights["code"]) > 0
    assert mixture.parameters["rule"]["mu"] == 0.05  # the paper's for such targets
    assert mixture.parameters["target_domains"] == ["poems"]
    assert mixture.parameters["trained_on"] == ["news", "code"]
    assert "DoGE towards poems (not trained on), mu 0.05" in capsys.readouterr().out
    run = TrainingRun.load(tmp_path / "doge" / "proxy")
    assert run.domain_tokens["poems"].got == STEPS * 2 * 32  # whose gradients are asked


def test_a_target_may_be_trained_on_too(options, tmp_path):
    assert compute_doge(options(target=" poems,news", train_on_target=True, rule=DogeRule()))
    mixture = Mixture.load(tmp_path / "doge.json")
    assert min(mixture.weights.values()) > 0
    assert mixture.parameters["rule"]["mu"] == 0.01
    assert mixture.parameters["target_domains"] == ["news", "poems"]
    assert mixture.parameters["trained_on"] == list(DOMAINS)


def test_the_limit_of_epochs_holds_the_mixture(corpus, finished, options, tmp_path):
    shutil.copytree(finished / "doge", tmp_path / "doge")
    sizes = Corpus.load(corpus.root).train_tokens
    budget = int(2.9 * min(sizes.values()))
    with pytest.warns(MixtureWarning, match="--max-epochs 1 holds"):
        assert compute_doge(options(token_budget=budget, max_epochs=1.0))
    mixture = Mixture.load(tmp_path / "doge.json")
    assert mixture.epochs is not None
    assert max(mixture.epochs.values()) <= 1.0 + 1e-9
    assert mixture.unconstrained == pytest.approx(Mixture.load(finished / "doge.json").weights)


def test_batches_that_lack_domains_are_trained_on(options, tmp_path):
    compute_doge(options(global_batch_size=2, train_iters=9))
    hooks = hooks_of(tmp_path)
    assert len(hooks) == 9
    assert all(math.isfinite(weight) for hook in hooks for weight in hook["weights"].values())
    products = np.array(state_of(tmp_path, 9)["products"])
    assert (products != 0).all()  # each pair was in a batch, though no batch had all three


@pytest.mark.parametrize("factor", [math.nan, 1e4])
def test_a_step_that_is_skipped_moves_no_weight(options, tmp_path, monkeypatch, factor):
    """Whether its gradient is no number, or a spike, of which all products are finite."""
    rule = DogeRule(doge_mu=0.2, doge_max_norm=0.0)  # clipped, it would be no spike
    with monkeypatch.context() as patched:
        before_steps(patched, {4: poison(factor)})
        compute_doge(options(rule=rule, guards=GuardOptions(spike_factor=50, spike_window=4)))
    hooks = hooks_of(tmp_path)
    run = TrainingRun.load(tmp_path / "doge" / "proxy")
    assert run.skipped_steps == 1
    assert hooks[3] == hooks[2]
    assert hooks[4] != hooks[3]
    told = Mixture.load(tmp_path / "doge.json").parameters
    assert told["steps_averaged"] == STEPS - 1
    path = np.array([[1 / 3] * 3, *(list(hook["weights"].values()) for hook in hooks)])
    moves = np.abs(np.diff(path, axis=0)).sum(1) / 2
    assert told["moved_per_step"] == pytest.approx(moves.sum() / (STEPS - 1))


def with_weights(finished, folder, last, mean):
    """A copy of the finished proxy that has come to other weights."""
    shutil.copytree(finished / "doge", folder / "doge")
    record = CheckpointRecord.load(step_folder(folder / "doge" / "proxy", STEPS))
    assert record.hook is not None
    state = {**record.hook.state, "log_weights": np.log(last).tolist(), "mean": mean}
    dataclasses.replace(record, hook=HookState(record.hook.name, state)).save()


@pytest.mark.parametrize(
    ("last", "mean", "told"),
    [
        ([0.02, 0.97, 0.01], [0.02, 0.96, 0.02], "'code' has 96% of the weight, so the others are"),
        ([0.1, 0.2, 0.7], [0.3, 0.3, 0.4], "the last weights are 0.30 .* from their mean, 'poems'"),
    ],
)
def test_weights_that_would_hardly_be_found_again_are_called_out(
    finished, options, tmp_path, last, mean, told
):
    with_weights(finished, tmp_path, last, mean)
    with pytest.warns(MixtureWarning) as warned:
        compute_doge(options())
    (warning,) = [str(w.message) for w in warned if w.category is MixtureWarning]
    assert re.search(told, warning)
    assert "a larger --doge-mu or --doge-eps" in warning


def test_steady_weights_are_not_called_out(finished, options, tmp_path, recwarn):
    with_weights(finished, tmp_path, [0.5, 0.3, 0.2], [0.4, 0.3, 0.3])
    compute_doge(options())
    assert not [w for w in recwarn if w.category is MixtureWarning]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "prose"}, "--target prose: there is no domain 'prose'; those of "),
        ({"target": " , "}, "it names no domain"),
        ({"target": "news,code"}, r"--target news,code: 1 domain\(s\) are left to weigh"),
        ({"train_on_target": True}, "--train-on-target: there is no --target"),
        ({"rule": DogeRule(doge_mu=0.0)}, "--doge-mu is 0.0: it must be a finite number above 0"),
        ({"rule": DogeRule(doge_mu=1e-310)}, "--doge-mu is 1e-310: 1 / mu overflows"),
        ({"rule": DogeRule(doge_eps=2.0)}, "--doge-eps is 2.0"),
        ({"rule": DogeRule(doge_dw_min=9.0)}, "--doge-dw-min is 9.0: it lies below dw_max, 5"),
        ({"rule": DogeRule(doge_max_norm=-1.0)}, "--doge-max-norm is -1.0"),
        ({"max_epochs": 1.0}, "give that too"),
        ({"model_size": "huge"}, "huge"),
        ({"global_batch_size": 5}, "^--global-batch-size 5 is not a multiple of 2, the --micro"),
        ({"output": Path("mixture")}, "--output mixture: give a name that ends with .json"),
        ({"output": Path("/dev/null/doge.json")}, "/dev/null cannot be written to; choose"),
    ],
)
def test_a_mistake_is_told_before_anything_is_trained(corpus, tmp_path, changes, message):
    given = {"output": tmp_path / "doge.json", **changes}
    with pytest.raises(UserError, match=message):
        compute_doge(doge_options(corpus, **given))
    assert list(tmp_path.iterdir()) == []


def test_the_tool_takes_its_flags(tmp_path):
    method = find_methods()["doge"]
    argv = f"--corpus c --output {tmp_path}/m.json --target a,b --train-on-target"
    given = parse_options(method.options, [*argv.split(), "--doge-mu", "0.02", "--lr", "1e-3"])
    assert isinstance(given, DogeOptions)
    assert (given.target, given.train_on_target, given.rule.doge_mu) == ("a,b", True, 0.02)
    assert given.proxy.optimizer.lr == 1e-3
