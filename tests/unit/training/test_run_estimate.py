"""The prediction of a run against arithmetic by hand; tests/distributed compares it with ranks."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import rank_groups
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.options import PlanRunOptions
from megatron_chameleon.training.run_estimate import GroupShape, estimate_run, plan_run

H100 = "--model 684m --bf16 --tokens-per-second 88000 --start-up-seconds 0"
LARGE = (
    "--model llama-8b --vocab-size 128256 --bf16 --seq-length 4096 --global-batch-size 4096 "
    "--micro-batch-size 1 --world-size 4096 --tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer --train-tokens 1000000000000 "
    "--mfu 0.45 --intra-node-bandwidth 450 --inter-node-bandwidth 50 --disk-bandwidth 20"
)


def options(flags: str) -> PlanRunOptions:
    return parse_options(PlanRunOptions, flags.split())


def test_the_groups_of_4096_ranks_partition_them():
    parallel = TrainingParallelOptions(8, 4)
    groups = rank_groups(parallel, 4096)
    for kind, size in {"tensor": 8, "pipeline": 4, "data": 128}.items():
        assert {len(ranks) for ranks in groups[kind]} == {size}
        assert sorted(rank for ranks in groups[kind] for rank in ranks) == list(range(4096))
    # Ranks of a pipeline are as far apart as possible, and ranks of a tensor group are neighbours.
    assert groups["tensor"][1] == list(range(8, 16))
    assert groups["pipeline"][1] == [1, 1025, 2049, 3073]
    assert groups["embedding"][1] == [1, 3073]
    assert GroupShape.of(groups["tensor"], 8) == GroupShape(512, 8, 8, 1)
    assert GroupShape.of(groups["tensor"], 4) == GroupShape(512, 8, 4, 2)
    assert GroupShape.of(groups["data"], 16) == GroupShape(32, 128, 2, 64)


def test_epochs_of_the_domains_of_a_corpus(corpus, tmp_path, capsys):
    mixture = tmp_path / "m.json"
    weights = {"news": 0.8, "code": 0.1, "poems": 0.1}
    mixture.write_text(json.dumps({"weights": weights, "max_repetition": {"news": 0.1}}))
    run = "--model nano --seq-length 32 --train-iters 6 --lr-warmup-iters 2 --global-batch-size 8"
    run += f" --eval-interval 0 --corpus {corpus.root} --mixture {mixture}"
    assert plan_run(options(f"{run} --json")) == 0
    planned = json.loads(capsys.readouterr().out)["domains"]
    expected = {name: w * 6 * 8 * 32 / corpus.train_tokens[name] for name, w in weights.items()}
    assert {name: one["epochs"] for name, one in planned.items()} == pytest.approx(expected)
    assert plan_run(options(run)) == 0
    assert "--max-repetition-action" in capsys.readouterr().out
    limited = options(f"{run} --max-repetition-action redistribute")
    assert (domains := estimate_run(limited).domains)
    assert 0.08 < domains["news"].epochs <= 0.1
    with pytest.raises(UserError, match="'news'"):
        estimate_run(options(f"{run} --max-repetition-action stop"))


def test_json_of_a_large_run_adds_up(capsys):
    assert plan_run(options(LARGE + " --json --device-memory-gb 80")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data_parallel_size"] == 128
    assert found["num_microbatches"] == 32
    assert found["train_iters"] == math.ceil(1e12 / 4096 / 4096)
    step = sum(found["step_seconds"].values())
    assert found["mfu"] == pytest.approx(found["step_flops"] / step / 4096 / 989e12)
    assert found["total_seconds"] > found["train_iters"] * step
    # Per parameter, 2 bytes in bfloat16, and three float32 numbers.
    assert found["checkpoint_bytes"] == pytest.approx(8.03e9 * 14, rel=1e-3)
    parts = found["step_seconds"]
    passes = parts["compute"] + parts["imbalance"]
    passes += parts["tensor-parallel communication"] + parts["pipeline communication"]
    assert parts["pipeline bubble"] == pytest.approx(passes * 3 / 32)
    # Of the bytes of all parameters in the first stage, a rank sends 127/128, over one card.
    gathered = found["communication"][0][-1]
    held = found["memory"][0]["parameters"]
    assert gathered["sent_bytes"] == pytest.approx(held * 127 / 128)
    assert gathered["seconds"] == pytest.approx(gathered["sent_bytes"] / 50e9)
    assert parts["parameter gathering"] >= gathered["seconds"]


def test_one_device_has_the_measured_mfu_and_hours():
    found = estimate_run(options(f"{H100} --train-tokens 1000000000 --eval-interval 0"))
    assert found.mfu == pytest.approx(0.388, abs=5e-4)
    assert found.total_seconds == pytest.approx(found.tokens / 88_000)
    assert found.communication == [[]]


def test_the_ranks_of_a_node_share_their_cards_and_hide_the_reduction():
    """A ring over whole nodes leaves each node once, so it uses the cards of all eight ranks."""
    flags = f"{H100} --world-size 16 --global-batch-size 512 --inter-node-bandwidth 50"
    slow = estimate_run(options(flags))
    ((reduction,),) = slow.communication
    ((seconds,),) = slow.communication_seconds
    assert seconds is not None
    assert seconds == pytest.approx(reduction.tensor_bytes * 2 * 15 / 16 / (8 * 50e9))
    within = estimate_run(options(f"{flags} --intra-node-bandwidth 100"))
    assert within.communication_seconds[0][0] == pytest.approx(4 * seconds)
    assert slow.step_seconds is not None
    assert slow.step_seconds["gradient reduction"] == seconds
    hidden = estimate_run(options(f"{flags} --overlap-grad-reduce"))
    assert hidden.step_seconds is not None
    assert hidden.step_seconds["gradient reduction"] == 0


def test_only_passes_of_a_micro_batch_hide_communication():
    flags = f"{H100} --world-size 16 --devices-per-node 1 --inter-node-bandwidth 5"
    flags += " --pipeline-model-parallel-size 4"
    plain, hidden = (
        estimate_run(options(flags + more)).step_seconds for more in ("", " --overlap-grad-reduce")
    )
    assert plain is not None
    assert hidden is not None
    name, bubble = "gradient reduction", "pipeline bubble"
    once = {name, "parameter gathering", "embedding and norm gradients"}
    passes = sum(seconds for part, seconds in plain.items() if part not in {*once, bubble})
    micro_batches = 128 / 8 / 4
    assert hidden[name] > 0
    assert plain[name] - hidden[name] == pytest.approx(passes / micro_batches * 2 / 3)


def test_recomputation_repeats_a_third_of_the_layers_in_training_alone():
    plain, full = (
        estimate_run(options(f"{H100} {flags}"))
        for flags in ("", "--recompute-granularity full --recompute-method uniform")
    )
    layers = 2 * 36 * (12 * 1200**2 + 1024 * 1200)
    assert full.recomputed_flops == pytest.approx(layers * 128 * 1024, rel=1e-6)
    assert full.step_flops == plain.step_flops
    assert full.memory[0]["activations"] < plain.memory[0]["activations"]
    assert plain.validation_seconds is not None
    assert plain.validation_seconds == full.validation_seconds


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        ("--world-size 12 --tensor-model-parallel-size 8", "a multiple of 8 ranks"),
        ("--model 1.2b --world-size 8 --tensor-model-parallel-size 8", "1, 5, 25 do"),
        ("--world-size 24", "--micro-batch-size 8 times 24"),
        ("--train-tokens 1000000", "--lr-warmup-iters 500"),
        ("--model llama-130m --reset-position-ids", "rotary"),
    ],
)
def test_an_impossible_run_fails_with_the_error_of_training(flags, fix):
    with pytest.raises(UserError, match=fix):
        plan_run(options(flags))


def test_a_run_that_does_not_fit_has_status_1(capsys):
    assert plan_run(options("--model llama-8b --device-memory-gb 80")) == 1
    assert "does not fit in 80 GB" in capsys.readouterr().out
    changed = dataclasses.replace(options("--model llama-8b"), device_memory_gb=300.0)
    assert plan_run(changed) == 0
    assert "--inter-node-bandwidth" not in capsys.readouterr().out
