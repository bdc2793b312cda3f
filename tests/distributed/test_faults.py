"""Test killed ranks, stopped ranks, user errors, and agreement between ranks."""

from __future__ import annotations

import json
import re

import pytest

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.artifacts.checkpoint import step_folder
from tests.distributed import cases
from tests.distributed.conftest import metrics_in

FRAME_OF_OURS = re.compile(r'File ".*/(megatron_chameleon|tools)/.*", line')


@pytest.mark.parametrize(
    ("moment", "saved", "partial"),
    [
        ("in-save", [3], 6),
        ("in-async-save", [3, 6], 9),
    ],
)
def test_killed_rank_leaves_the_checkpoints_saved_before(results, moment, saved, partial):
    launch = results.fault(f"killed-{moment}")
    assert launch["status"] != 0
    assert launch["run_status"] in ("failed", "interrupted", "running"), launch["log"]
    temporary = [name for name in launch["left"] if name.endswith(".tmp")]
    others = [name for name in launch["left"] if not name.endswith(".tmp")]
    assert others == [f"step-{step:08d}" for step in saved]
    (name,) = temporary
    assert re.fullmatch(rf"\.step-{partial:08d}\.\w+\.tmp", name)


def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(results, places):
    last = results.fault(f"killed-{cases.KILLS[-1]}")
    assert last["status"] == 0, last["log"]
    assert (last["run_status"], last["step"]) == ("finished", cases.TRAIN_ITERS)
    assert last["left"] == ["step-00000006", "step-00000009", "step-00000012"]
    run_dir = places.run(cases.KILLED_RUN)
    assert not list(run_dir.glob(".*.tmp"))
    assert metrics_in(run_dir) == results.metrics("dp2-sharded")
    record = CheckpointRecord.load(step_folder(run_dir, cases.TRAIN_ITERS))
    record.verify()
    expected = results.checkpoint("dp2-sharded")
    assert record.hash == expected.hash
    assert record.domain_tokens == expected.domain_tokens


@pytest.mark.parametrize("reason", cases.STOPS)
def test_all_ranks_stop_and_save_at_the_same_step(results, reason):
    launch = results.fault(f"stopped-{reason}")
    assert (launch["run_status"], launch["stopped_by"]) == ("interrupted", reason), launch["log"]
    assert launch["checkpoints"][-1] == f"step-{launch['step']:08d}"
    assert 2 <= launch["step"] < cases.STOPPED_ITERS
    # If the launcher itself receives the signal, its exit status is not 0.
    assert (launch["status"] == 0) == (reason in ("SIGUSR1", "--exit-duration-in-mins"))


def test_each_launch_resumes_where_the_previous_one_stopped(results):
    launches = [results.fault(f"stopped-{reason}") for reason in cases.STOPS]
    steps = [launch["step"] for launch in launches]
    assert steps[0] < steps[1] == steps[2] - 1
    assert launches[-1]["steps"] == list(range(1, steps[2] + 1))


@pytest.mark.parametrize("name", cases.MISTAKES)
def test_user_error_prints_one_line_without_a_traceback(places, results, name):
    launch = results.fault(f"mistake-{name}")
    log = launch["log"]
    # The launcher's status is always 1; its summary shows the status of each rank.
    assert launch["status"] != 0
    assert re.search(r"exitcode +: 2 ", log), log
    assert not FRAME_OF_OURS.search(log), log
    errors = [line for line in log.splitlines() if re.match(r"(\[rank\d\]: )?error: ", line)]
    assert len(errors) == 1, log
    assert {"heads": "--tensor-model-parallel-size", "unwritable": "corpus.json/run"}[
        name
    ] in errors[0]
    assert not places.run("mistake").exists()


def test_ranks_agree_on_memory_signals_and_damaged_files(places, results):
    assert results.fault("agreement")["status"] == 0, results.fault("agreement")["log"]
    first, second = (
        json.loads((places.root / "agreement" / f"{rank}.json").read_text()) for rank in (0, 1)
    )
    assert "poems.bin" in first["damage"]
    for name in ("damage", "signals", "most memory"):
        assert first[name] == second[name]
    assert first["signals"] == ["SIGUSR1"]  # only rank 1 received a signal
    assert first["most memory"] == pytest.approx(second["memory"], rel=0.02)
    assert first["most memory"] > first["memory"] + cases.MORE_BYTES // 2
