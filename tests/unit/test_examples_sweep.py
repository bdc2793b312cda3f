"""What examples/sweep_stability.sh starts: the paper's sweeps, around the paper's proxy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.options.sweep import AxisOptions, SweepOptions
from tests.unit.launched import Launcher, write_everything

NAME = "sweep_stability"


@pytest.fixture
def launch(tmp_path):
    write_everything(tmp_path)
    return Launcher(tmp_path)


def options_of(launched) -> SweepOptions:
    assert launched.status == 0, launched.errors
    (call,) = launched.calls
    assert call.program == "torchrun"
    assert isinstance(call.options, SweepOptions)
    return call.options


def test_it_sweeps_what_the_paper_does_around_the_papers_centre(launch):
    options = options_of(launch(NAME))
    assert options.axes == AxisOptions(
        sweep_train_iters=(1000, 2000, 5000, 10000),
        sweep_model_size=("60m", "82m", "124m", "210m"),
        sweep_ridge=(1.0, 10.0, 100.0),
        sweep_num_windows=(2048, 4096, 8192),
    )
    proxy = options.proxy
    assert (proxy.model_size, proxy.train_iters, proxy.global_batch_size) == ("82m", 2000, 128)
    assert (proxy.optimizer.lr, proxy.optimizer.min_lr, proxy.bf16) == (5e-4, 1e-4, True)
    assert (options.extraction.num_windows, options.weighting.recipe) == (4096, "reference")
    assert options.corpus == Path("runs/slimpajama/1-corpus")
    assert options.output == Path("runs/slimpajama")


def test_what_is_tried_out_is_tiny_and_on_two_ranks(launch):
    launched = launch(NAME, SIZE="tiny")
    options = options_of(launched)
    assert launched.calls[0].ranks.nproc_per_node == "2"
    assert options.output == Path("runs/tiny") / NAME
    assert options.proxy.model_size == "tiny"
    assert options.axes.sweep_train_iters == (4, 12)
    assert options.proxy.train_iters == 12
    assert options.axes.sweep_ridge == (1.0, 10.0, 100.0)


def test_the_environment_and_flags_choose(launch):
    choices = {"SIZE": "124m", "TP": "2", "SEED": "7", "RUN": "my run"}
    choices |= {"CORPUS": "runs/stack/1-corpus"}
    options = options_of(launch(NAME, "--", "--sweep-ridge", "0.5", "--recipe", "paper", **choices))
    assert options.axes.sweep_ridge == (0.5,)
    assert (options.weighting.recipe, options.output) == ("paper", Path("my run"))
    assert (options.proxy.model_size, options.proxy.seed) == ("124m", 7)
    assert options.proxy.parallel.tensor_model_parallel_size == 2
    assert options.corpus == Path("runs/stack/1-corpus")


def test_a_corpus_that_is_missing_is_told_in_a_line(launch):
    refused = launch(NAME, CORPUS="lost")
    assert (refused.status, refused.calls) == (2, [])
    assert refused.errors.startswith("error: there is no corpus in lost: ")


def test_help_names_the_choices(launch):
    helped = launch(NAME, "--help")
    assert (helped.status, helped.calls, helped.errors) == (0, [], "")
    for word in ("SIZE", "RUN", "CORPUS", "SEED", "TP, PP", "NPROC", "STOP_AT"):
        assert f"\n  {word} " in helped.said
