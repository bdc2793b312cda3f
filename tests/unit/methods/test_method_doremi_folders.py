"""DoReMi's folder: what is gone on with, what is used again, what is refused before training."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.doremi import METHOD
from megatron_chameleon.methods.excess_loss import hook as hook_module
from megatron_chameleon.methods.excess_loss.compute import compute_doremi
from megatron_chameleon.methods.gradient_alignment.compute import compute_doge
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.stopping import StoppingOptions
from tests.unit.methods.doremi_runs import (
    STEPS,
    figures_of,
    found,
    half_done,
    options,
    proxy_of,
    proxy_options,
    state_of,
)
from tests.unit.training.bad_steps import before_steps, run_out

__all__ = ["found", "half_done", "options"]  # fixtures


def test_a_proxy_that_was_killed_goes_on_and_finds_the_same(options, found, monkeypatch, capsys):
    def kill(_model):
        raise RuntimeError("killed")

    given = options()
    with monkeypatch.context() as patched:
        before_steps(patched, {5: kill})
        with pytest.raises(RuntimeError, match="killed"):
            compute_doremi(given)
    assert not given.output.exists()
    assert compute_doremi(given)
    assert "continuing at step 3" in capsys.readouterr().out
    assert figures_of(given.output) == figures_of(found)
    assert state_of(given.output) == state_of(found)
    assert Mixture.load(given.output).weights == Mixture.load(found).weights


def test_a_reference_that_was_killed_goes_on_first(options, found, monkeypatch, capsys):
    """The reference that it trains itself is the run that the others were given."""

    def kill(_model):
        raise RuntimeError("killed")

    given = options(reference=None)
    with monkeypatch.context() as patched:
        before_steps(patched, {5: kill})
        with pytest.raises(RuntimeError, match="killed"):
            compute_doremi(given)
    assert not (given.output.with_suffix("") / "proxy").exists()
    assert compute_doremi(given)
    assert "continuing at step 3" in capsys.readouterr().out
    assert Mixture.load(given.output).weights == Mixture.load(found).weights


def test_it_leaves_when_it_is_asked_to_stop(options, capsys):
    given = options(proxy={"stopping": StoppingOptions(exit_duration_in_mins=1e-6)})
    assert METHOD.compute(given) == STOPPED_STATUS
    assert "stopped in the proxy; the same command goes on" in capsys.readouterr().out
    assert (proxy_of(given.output).step, given.output.exists()) == (1, False)


def test_the_same_command_again_trains_nothing(options, half_done, found, capsys):
    before = (half_done / "proxy" / "metrics.jsonl").stat().st_mtime_ns
    given = options()
    compute_doremi(given)
    assert "nothing to do" in capsys.readouterr().out
    assert (half_done / "proxy" / "metrics.jsonl").stat().st_mtime_ns == before
    assert Mixture.load(given.output).weights == Mixture.load(found).weights


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (DoremiRule(doremi_eta=0.2), "another rule: eta 0.1, not 0.2; give another --work-dir"),
        (DoremiRule("fork", 0.1, 1e-3), "another rule: clip_tokens True, not False"),
    ],
)
def test_a_proxy_of_another_rule_is_refused(options, half_done, rule, said, finished):
    if not finished:
        shutil.rmtree(step_folder(half_done / "proxy", STEPS))
    with pytest.raises(UserError, match=said):
        compute_doremi(options(rule=rule))
    assert not options().output.exists()


def test_a_proxy_of_another_reference_is_refused(options, half_done, tmp_path):
    other = options("other", reference=None, proxy={"train_iters": 4})
    compute_doremi(other)
    reference = other.output.with_suffix("") / "reference"
    with pytest.raises(UserError, match=r"compared with another reference than .*step-00000004"):
        compute_doremi(options(reference=reference))


def test_a_run_that_nobody_watched_is_no_proxy(options, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "4-mixture" / "doremi" / "proxy")
    said = r"holds a run that DoReMi has not watched \(nothing has\); give another --work-dir, or"
    with pytest.raises(UserError, match=said):
        compute_doremi(options())


def test_proxies_of_other_options_are_refused_with_the_way_out(options, half_done):
    with pytest.raises(UserError, match="--seed 1234, not 7") as refused:
        compute_doremi(options(proxy={"seed": 7}))
    assert f"or delete {half_done / 'proxy'} to start anew" in str(refused.value)


def folder_of_doge(corpus, output: Path) -> None:
    """A mixture of DoGE in the place of DoReMi's, with its proxy."""
    assert compute_doge(DogeOptions(corpus=corpus.root, output=output, proxy=proxy_options()))
    output.unlink()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, r"holds a proxy, and its reference is not in .*reference, or not finished"),
        ({"proxy": {"seed": 7}}, "doremi/proxy holds a run with --seed 1234, not 7; give another"),
    ],
)
def test_what_the_proxys_folder_holds_is_looked_at_before_the_reference_is_trained(
    options, half_done, changes, said
):
    with pytest.raises(UserError, match=said) as refused:
        compute_doremi(options(reference=None, **changes))
    assert f"delete {half_done / 'proxy'} to start anew" in str(refused.value)
    assert not (half_done / "reference").exists()


def test_another_methods_proxy_is_refused_before_the_reference_is_trained(options, corpus):
    given = options(reference=None)
    folder_of_doge(corpus, given.output)
    said = r"DoReMi has not watched \(GradientAlignment has\); give another --work-dir, or delete"
    with pytest.raises(UserError, match=said):
        compute_doremi(given)
    assert not (given.output.with_suffix("") / "reference").exists()


def test_a_reference_of_other_options_is_refused_before_the_proxy_is(options, half_done, capsys):
    given = options(reference=None, proxy={"seed": 7})
    shutil.copytree(half_done / "proxy", half_done / "reference")
    shutil.rmtree(half_done / "proxy")
    with pytest.raises(UserError, match="reference holds a run with --seed 1234, not 7"):
        compute_doremi(given)
    assert capsys.readouterr().out == ""


def test_a_proxy_that_is_finished_builds_no_reference(options, half_done, monkeypatch):
    monkeypatch.setattr(hook_module, "build_model_chunks", run_out)
    assert compute_doremi(options())
