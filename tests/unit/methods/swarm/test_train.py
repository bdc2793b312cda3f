"""Swarm members are pretraining runs, trained concurrently; swarms resume bit-identically."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import Cost, Mixture
from megatron_chameleon.artifacts.swarm import MemberRecord, SwarmRecord, member_path
from megatron_chameleon.artifacts.training_run import METRICS_NAME, TrainingRun, read_metrics
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import TaskOptions
from megatron_chameleon.methods.swarm import CollectOptions, RunOptions, SwarmOptions
from megatron_chameleon.methods.swarm.any_trainer import collect_swarm
from megatron_chameleon.methods.swarm.train import Swarm, concurrency, run_members, train_swarm
from megatron_chameleon.model.config import preset
from megatron_chameleon.model.flops import forward_flops, training_flops
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.training.options import StoppingOptions
from megatron_chameleon.training.trainer import pretrain
from tests.distributed.launch import finish, start, torchrun
from tests.small_corpus import DOMAINS, VOCAB_SIZE

STEPS = 6
LLAMA = ArchitectureOptions(
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
)
SHAPE = LLAMA.apply(preset("nano", VOCAB_SIZE, 32))
MIXTURES = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.6, 0.4, 0.0], [0.1, 0.1, 0.8]])


def swarm_options(**changes):
    options = SwarmOptions(
        model="nano",
        architecture=LLAMA,
        train_iters=STEPS,
        seq_length=32,
        global_batch_size=8,
        micro_batch_size=4,
        members_at_once=2,
        lr=1e-2,
        lr_warmup_iters=2,
        eval_interval=4,
        eval_tokens=18 * 32,
        save_interval=2,
        log_interval=1,
    )
    return dataclasses.replace(options, **changes)


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """An uninterrupted swarm, and its folder."""
    folder = tmp_path_factory.mktemp("swarm") / "whole"
    result = train_swarm(swarm_options(), corpus, MIXTURES, folder)
    assert result is not None
    return result, folder


def same(found, expected):
    assert found is not None
    np.testing.assert_array_equal(found.losses, expected.losses)
    assert (found.steps, found.diverged) == (expected.steps, expected.diverged)


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.reader(stream))


def without(whole, folder, *members):
    """Copy the swarm to ``folder``, without the results and runs of these members."""
    shutil.copytree(whole[1], folder)
    (folder / "metrics.csv").unlink()
    for member in members:
        member_path(folder, member).unlink()
        shutil.rmtree(member_path(folder, member).with_suffix(""))
    return folder


def test_a_member_is_an_ordinary_run_with_its_own_seed(whole, corpus, tmp_path):
    result, _ = whole
    swarm = Swarm(swarm_options(), corpus, MIXTURES, tmp_path, 4, 2, 1, 9.0)
    assert len({swarm.member_run(member).seed for member in range(1000)}) == 1000
    path = tmp_path / "mixture.json"
    Mixture(dict(zip(DOMAINS, MIXTURES[1].tolist(), strict=True))).save(path)
    run = dataclasses.replace(swarm.member_run(1), run_dir=tmp_path / "run", mixture=str(path))
    pretrain(run)
    lines = {line["step"]: line for line in read_metrics(tmp_path / "run" / METRICS_NAME)}
    alone = [[lines[step]["validation_loss"][name] for name in DOMAINS] for step in result.steps]
    # Rounding differs with the number of threads.
    np.testing.assert_allclose(result.losses[1], alone, rtol=0, atol=1e-5)


def test_results_tables_and_cost(whole, corpus):
    result, folder = whole
    assert (result.steps, result.diverged) == ([4, STEPS], [])
    last = result.losses[:, -1]
    assert last[1].argmin() == 0  # the loss is lowest on the training domain
    assert last[3].argmin() == 2
    ratios, metrics = rows_of(folder / "ratios.csv"), rows_of(folder / "metrics.csv")
    np.testing.assert_array_equal(np.array(ratios[1:], float)[:, 1:], MIXTURES)
    np.testing.assert_array_equal(np.array(metrics[1:], float)[:, 1:], last)
    seen = len(MIXTURES) * STEPS * 8 * 32
    held_out = sum(min(18 * 32, domain.valid.tokens - 1) for domain in corpus.domains.values())
    measured = len(MIXTURES) * len(result.steps) * held_out
    expected = training_flops(SHAPE, seen, 32) + forward_flops(SHAPE, measured, 32)
    # Not exact, since the last window of a split may be shorter.
    assert result.cost.flops == pytest.approx(expected, rel=1e-3)
    assert SwarmRecord.load(folder).cost == result.cost
    run = TrainingRun.load(folder / "members" / "00002")
    assert (run.status, run.checkpoints) == ("finished", [])


def results(folder):
    """Results of all members but for their costs, which depend on the machine's load."""
    return [
        dataclasses.replace(record, cost=Cost())
        for record in SwarmRecord.load(folder).finished.values()
    ]


def test_members_trained_by_swarm_run_are_the_same(whole, corpus, tmp_path):
    folder = without(whole, tmp_path / "run", 1, 3)
    run = RunOptions(corpus=corpus.root, swarm_dir=folder, members="2:9", members_at_once=1)
    assert run_members(run)
    assert sorted(SwarmRecord.load(folder).finished) == [0, 2, 3]
    collect_swarm(CollectOptions(swarm_dir=folder))
    assert [row[0] for row in rows_of(folder / "metrics.csv")] == ["index", "0", "2", "3"]
    assert run_members(dataclasses.replace(run, members=None))
    assert results(folder) == results(whole[1])
    collect_swarm(CollectOptions(swarm_dir=folder))
    assert (folder / "metrics.csv").read_bytes() == (whole[1] / "metrics.csv").read_bytes()
    for changes, problem in [({"members": "4:5"}, "4:5"), ({"swarm_dir": tmp_path}, "swarm.json")]:
        with pytest.raises(UserError, match=problem):
            run_members(dataclasses.replace(run, **changes))


@pytest.mark.slow
def test_a_member_on_ray_resumes_after_its_worker_was_killed(whole, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    folder = without(whole, tmp_path / "ray", 1)
    run_dir = member_path(folder, 1).with_suffix("")
    killed = list[int]()

    def kill_at_the_first_checkpoint():
        while not (killed or member_path(folder, 1).exists()):
            if any(run_dir.glob("checkpoints/*/checkpoint.json")):
                holder = (run_dir / "run.lock").read_text().split()
                if holder:
                    os.kill(int(holder[1]), signal.SIGKILL)
                    killed.append(int(holder[1]))
            time.sleep(0.005)

    thread = threading.Thread(target=kill_at_the_first_checkpoint, daemon=True)
    thread.start()
    assert run_members(RunOptions(corpus=corpus.root, swarm_dir=folder, ray=True))
    thread.join()
    assert killed
    assert results(folder) == results(whole[1])


@pytest.mark.parametrize(
    ("steps", "losses"), [([5], [[1.0, 2.0, 3.0]]), (None, [[1.0], [2.0]]), (None, [[1.0]])]
)
def test_a_result_of_another_shape_is_rejected(whole, corpus, tmp_path, steps, losses):
    folder = without(whole, tmp_path / "damaged")
    record = MemberRecord.load(member_path(folder, 2))
    steps = record.steps if steps is None else steps
    dataclasses.replace(record, steps=steps, losses=losses).save(member_path(folder, 2))
    with pytest.raises(UserError, match=r"00002\.json: field losses"):
        train_swarm(swarm_options(), corpus, MIXTURES, folder)


@pytest.mark.parametrize("copies", ["result", "folder", "edited", "link"])
def test_the_result_of_another_member_is_rejected(whole, corpus, tmp_path, copies):
    """Its losses would be those of another mixture."""
    folder = without(whole, tmp_path / "copied", 0)
    path, other = member_path(folder, 0), member_path(folder, 1)
    record = MemberRecord.load(other)
    if copies == "link":
        path.symlink_to(other)
    else:
        dataclasses.replace(record, member=0 if copies != "result" else 1).save(path)
    if copies == "edited":
        path.with_suffix("").symlink_to(other.with_suffix(""))
    elif copies == "folder":
        shutil.copytree(other.with_suffix(""), path.with_suffix(""))
    for run in (
        lambda: train_swarm(swarm_options(), corpus, MIXTURES, folder),
        lambda: collect_swarm(CollectOptions(swarm_dir=folder)),
    ):
        with pytest.raises(UserError, match=r"00000\.json (is the result|has the run)"):
            run()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mixtures": [[1.0, 1.0, 0.0]]}, "sum of 1"),
        ({"mixtures": [[0.5, 0.5]]}, "a weight for each domain"),
        ({"domains": [DOMAINS[0], *DOMAINS[:2]]}, "twice"),
    ],
)
def test_an_edited_swarm_is_rejected(whole, corpus, tmp_path, changes, problem):
    fields = json.loads((whole[1] / "swarm.json").read_text())
    del fields["checksum"]
    (tmp_path / "swarm.json").write_text(json.dumps(fields | changes))
    with pytest.raises(UserError, match=problem):
        run_members(RunOptions(corpus=corpus.root, swarm_dir=tmp_path))


def test_a_stopped_swarm_resumes_and_members_are_added(whole, corpus, tmp_path):
    folder = without(whole, tmp_path / "more", 3)
    record = SwarmRecord.load(folder)
    dataclasses.replace(record, mixtures=record.mixtures[:3]).save()
    before = member_path(folder, 0).stat().st_mtime_ns
    late = StoppingOptions(exit_duration_in_mins=1e-3)
    assert train_swarm(swarm_options(stopping=late), corpus, MIXTURES, folder) is None
    same(train_swarm(swarm_options(members_at_once=1), corpus, MIXTURES, folder), whole[0])
    assert member_path(folder, 0).stat().st_mtime_ns == before


COMMAND = """
import sys
import time
from pathlib import Path
from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.swarm.train import train_swarm
from tests.unit.methods.swarm.test_train import MIXTURES, swarm_options

def main():
    corpus, folder = map(Path, sys.argv[1:])
    try:
        result = train_swarm(swarm_options(), Corpus.load(corpus), MIXTURES, folder)
    except UserError as error:
        print(f"failed: {error}", flush=True)
        time.sleep(2)  # torchrun terminates the other rank as soon as this rank has exited
        sys.exit(1)
    sys.exit(0 if result else 75)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_swarm_resumes_to_the_same_bits(whole, corpus, tmp_path, number):
    """SIGTERM goes to every process, as from a scheduler, and members save a checkpoint.

    Afterwards, the swarm is resumed on two ranks; one rank fails in the first attempt.
    """
    result, _ = whole
    folder, script = without(whole, tmp_path / "killed", 2, 3), tmp_path / "swarm.py"
    script.write_text(COMMAND)
    arguments, log = [str(script), str(corpus.root), str(folder)], tmp_path / "log.txt"
    process = start([sys.executable, *arguments], log)
    running = folder / "members" / "00002" / METRICS_NAME
    while not running.exists() or running.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, log.read_text()
        time.sleep(0.005)
    if number == signal.SIGTERM:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(240) == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    if number == signal.SIGTERM:
        assert TrainingRun.load(running.parent).status in ("interrupted", "finished")
        shutil.rmtree(folder / "members" / "00003", ignore_errors=True)
        # Member 3 may have finished before the signal, so its result may exist.
        member_path(folder, 3).unlink(missing_ok=True)
        broken = folder / "members" / "00003" / "run.json"
        broken.parent.mkdir()
        broken.write_text("{")
        assert finish(start(torchrun(2, *arguments), log), 240) == 1
        assert log.read_text().count("failed: member 3: ") == 2  # both ranks report the failure
        broken.unlink()
        assert finish(start(torchrun(2, *arguments), log), 240) == 0, log.read_text()
    same(train_swarm(swarm_options(), corpus, MIXTURES, folder), result)
    assert (folder / "metrics.csv").read_text() == (whole[1] / "metrics.csv").read_text()


def test_the_others_save_if_a_worker_is_killed(corpus, tmp_path):
    killed, other = (member_path(tmp_path / "swarm", member).with_suffix("") for member in (0, 1))

    def kill_when_both_train():
        while not all((folder / METRICS_NAME).exists() for folder in (killed, other)):
            time.sleep(0.005)
        os.kill(int((killed / "run.lock").read_text().split()[1]), signal.SIGKILL)

    threading.Thread(target=kill_when_both_train, daemon=True).start()
    options = swarm_options(train_iters=100_000, eval_interval=0, save_interval=None)
    with pytest.raises(UserError, match="member 0: a worker process was killed"):
        train_swarm(options, corpus, MIXTURES[:3], tmp_path / "swarm")
    assert TrainingRun.load(other).status == "interrupted"
    assert not member_path(tmp_path / "swarm", 2).with_suffix("").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"max_loss": 1e-3}, "held-out loss", marks=pytest.mark.slow),
        ({"lr": 1e38}, "not finite"),
    ],
)
def test_diverged_members_are_recorded_and_left_out(corpus, tmp_path, changes, reason):
    options = swarm_options(eval_interval=0, **changes)
    result = train_swarm(options, corpus, MIXTURES[:1], tmp_path / "swarm")
    assert result is not None
    assert result.diverged == [0]
    assert np.isnan(result.losses).all()
    assert rows_of(tmp_path / "swarm" / "ratios.csv")[1:] == []
    assert reason in json.loads(member_path(tmp_path / "swarm", 0).read_text())["diverged"]


@pytest.mark.parametrize(
    ("changes", "mixtures", "identifier"),
    [
        ({"lr": 5e-3}, MIXTURES, "--lr 0.01, not 0.005"),
        ({"downstream": TaskOptions(tasks=("sciq",))}, MIXTURES, "--tasks"),
        ({"target_tokens": 1000}, MIXTURES, "--target-tokens 1000"),
        ({}, MIXTURES[[0, 2, 1, 3]], "member 1"),
        ({}, MIXTURES[:2], "4 members"),
        ({"seq_length": 10_000, "eval_tokens": 10_000}, MIXTURES, "sequence"),
    ],
)
def test_what_cannot_be_trained_is_rejected(whole, corpus, changes, mixtures, identifier):
    with pytest.raises(UserError, match=identifier):
        train_swarm(swarm_options(**changes), corpus, mixtures, whole[1])


def test_concurrency_follows_from_memory_and_cores(monkeypatch):
    shape, gpu = preset("regmix-1m", 50_257, 2048), torch.device("cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    found = []
    for memory in (80 * 10**9, 4 * 10**9):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device, m=memory: (m, m))
        found.append(concurrency(SwarmOptions(), shape, gpu, 512))
    (large, many), (small, one) = found
    assert (large, one) == (8, 1)
    assert small < large
    assert 1 < many <= 8
