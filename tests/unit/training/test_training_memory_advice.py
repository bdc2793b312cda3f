"""Which flags are named when memory does not suffice, and what the command prints."""

from __future__ import annotations

import dataclasses
import re

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.model.memory import fullest_stage
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.parallel.options import RecomputeOptions, TrainingParallelOptions
from megatron_chameleon.training.memory import (
    GB,
    describe_out_of_memory,
    find_remedies,
    print_estimate,
    remedies_line,
    training_setup,
)
from megatron_chameleon.training.options import EstimateMemoryOptions, PretrainOptions

LARGE = EstimateMemoryOptions(model_size="684m", world_size=8)
SHAPE = ModelShape(model_size("684m"), LARGE.vocab_size, LARGE.seq_length)
SMALLEST = dataclasses.replace(
    LARGE,
    world_size=1,
    micro_batch_size=1,
    bf16=True,
    parallel=TrainingParallelOptions(recompute=RecomputeOptions("full")),
)


def test_every_remedy_saves_what_it_says():
    setup = training_setup(LARGE, SHAPE, LARGE.world_size)
    flags = {remedy.flag: remedy.total for remedy in find_remedies(setup)}
    assert set(flags) == {
        "--use-distributed-optimizer",
        "--micro-batch-size 4",
        "--bf16",
        "--recompute-granularity full",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
    }
    halved = training_setup(dataclasses.replace(LARGE, micro_batch_size=4), SHAPE, 8)
    assert flags["--micro-batch-size 4"] == fullest_stage(halved).total
    assert list(flags.values()) == sorted(flags.values())
    assert max(flags.values()) < fullest_stage(setup).total


def test_where_a_device_is_known_what_fits_and_costs_least_comes_first():
    setup = training_setup(LARGE, SHAPE, LARGE.world_size)
    remedies = {remedy.flag: remedy.total for remedy in find_remedies(setup)}
    device = remedies["--micro-batch-size 4"] + 1
    fitting = [remedy.total <= device for remedy in find_remedies(setup, device)]
    assert fitting == sorted(fitting, reverse=True)
    assert find_remedies(setup, device)[0].flag == "--micro-batch-size 4"


def test_degrees_are_those_that_the_model_and_the_ranks_allow():
    options = dataclasses.replace(LARGE, model_size="1.2b", world_size=10, global_batch_size=160)
    shape = ModelShape(model_size("1.2b"), 50_257, 1024)
    flags = [r.flag for r in find_remedies(training_setup(options, shape, 10))]
    assert "--tensor-model-parallel-size 5" in flags  # 25 heads
    assert "--pipeline-model-parallel-size 2" in flags


def test_nothing_is_named_where_nothing_is_left():
    setup = training_setup(SMALLEST, SHAPE, 1)
    assert find_remedies(setup) == []
    assert remedies_line(setup).startswith("no flag is left to change")


def test_running_out_of_memory_is_told_in_one_line_with_two_flags(one_rank, tmp_path):
    options = PretrainOptions(
        run_dir=tmp_path, corpus=tmp_path, model_size="684m", micro_batch_size=8
    )
    told = describe_out_of_memory(options, SHAPE, one_rank)
    total = fullest_stage(training_setup(options, SHAPE, 1)).total / GB
    assert "\n" not in told
    assert f"needs about {total:.1f} GB (activations " in told
    first, second = re.findall(r"(--[a-z0-9 -]+) \(\d+\.\d GB\)", told)
    setup = training_setup(options, SHAPE, 1)
    assert [first, second] == [remedy.flag for remedy in find_remedies(setup)[:2]]
    assert {first, second} == {"--micro-batch-size 4", "--recompute-granularity full"}


def test_what_is_held_beside_the_training_is_told_and_what_saves_of_it(one_rank, tmp_path):
    def beside(setup, _stage):
        sharded = setup.parallel.use_distributed_optimizer
        return {"five gradients": int((1 if sharded else 8) * GB), "a model": int(GB / 10)}

    options = PretrainOptions(
        run_dir=tmp_path, corpus=tmp_path, model_size="684m", micro_batch_size=8
    )
    told = describe_out_of_memory(options, SHAPE, one_rank, beside)
    total = fullest_stage(training_setup(options, SHAPE, 1)).total / GB + 8.1
    assert f"needs about {total:.1f} GB (" in told
    assert "five gradients 8.0" in told
    assert "a model 0.1" in told
    setup = training_setup(LARGE, SHAPE, LARGE.world_size)
    plain = {remedy.flag: remedy.total for remedy in find_remedies(setup)}
    found = {remedy.flag: remedy.total for remedy in find_remedies(setup, beside=beside)}
    more = {flag: round((found[flag] - plain[flag]) / GB, 1) for flag in plain}
    assert more.pop("--use-distributed-optimizer") == 1.1
    assert set(more.values()) == {8.1}


def test_the_table_adds_up(capsys):
    assert print_estimate(LARGE) == 0
    said = capsys.readouterr().out
    assert "684,181,200 parameters on 8 rank(s): tensor 1, pipeline 1, data 8" in said
    *parts, total = (float(size) for size in re.findall(r"([\d.]+) GB", said))
    assert len(parts) == 7
    assert sum(parts) == pytest.approx(total, abs=0.05)


def test_whether_it_fits_is_the_exit_status(capsys):
    assert print_estimate(dataclasses.replace(LARGE, device_memory_gb=100.0)) == 0
    assert "fits in 100 GB" in capsys.readouterr().out
    assert print_estimate(dataclasses.replace(LARGE, device_memory_gb=24.0)) == 1
    assert re.search(
        r"does not fit in 24 GB: [\d.]+ GB .*fix it: --.* or --", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"world_size": 0}, "--world-size 0"),
        ({"vocab_size": 0}, "--vocab-size 0"),
        ({"device_memory_gb": 0.0}, "--device-memory-gb 0"),
        ({"model_size": "1.3b"}, "there is no such size"),
        ({"global_batch_size": 100}, "--global-batch-size 100 is not a multiple of 64"),
        (
            {"parallel": TrainingParallelOptions(tensor_model_parallel_size=16)},
            "8 rank\\(s\\) cannot be laid out",
        ),
        (
            {"model_size": "1.2b", "parallel": TrainingParallelOptions(2)},
            "2 does not divide 25 attention heads; 1, 5, 25 do",
        ),
    ],
)
def test_runs_that_could_not_be_started_are_refused(changes, problem):
    with pytest.raises(UserError, match=problem):
        print_estimate(dataclasses.replace(LARGE, **changes))
