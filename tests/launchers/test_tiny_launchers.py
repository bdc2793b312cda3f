"""Launchers of examples/, one of each kind, with SIZE=tiny on two CPU ranks.

tests/unit/test_examples.py parses the commands of all launchers.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Mixture, Sweep, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from tests.distributed.launch import finish, start
from tests.small_corpus import DOMAINS, write_small_corpus

SECONDS = 900.0  # for one launcher on a loaded machine
pytestmark = pytest.mark.timeout(3 * SECONDS)

# Stand-ins for SLURM's programs; both nodes are this machine.
SLURM = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" & first=$!
status=0
SLURM_NODEID=1 "$@" || status=$?
wait "$first" || status=$?
exit "$status"
""",
    "squeue": 'date -d "@$JOB_ENDS" +%Y-%m-%dT%H:%M:%S',
    "scontrol": """
case "$1 $2" in
  "show hostnames") printf 'localhost\\nlocalhost\\n' ;;
  *) echo "$@" >> "$CALLS" ;;
esac
""",
}


@dataclasses.dataclass(frozen=True)
class Launched:
    """Exit status and output of a launcher."""

    status: int
    printed: str


class Launchers:
    """Run launchers on one small corpus, each with its own run folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.corpus = root, root / "corpus"
        self.programs, self.calls = root / "bin", root / "calls"
        write_small_corpus(self.corpus)
        self.programs.mkdir()
        for name, body in SLURM.items():
            (self.programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (self.programs / name).chmod(0o755)

    def folder(self, name: str) -> Path:
        return self.root / name

    def run(self, name: str, *flags: str, **choices: str) -> Launched:
        """Run the launcher ``name`` with ``choices`` in the environment and wait for its end."""
        return self._bash(name, [f"examples/{name}.sh", *flags], choices)

    def submit(self, name: str, ends_in: float, *flags: str, restarts: int) -> Launched:
        """Run the launcher as a SLURM job on two nodes with ``ends_in`` seconds left."""
        job = {
            "SLURM_JOB_ID": str(free_port() - 20000),
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_RESTART_COUNT": str(restarts),
            "JOB_ENDS": str(round(time.time() + ends_in)),
            "CALLS": str(self.calls),
            "NPROC": "1",
        }
        command = ["examples/slurm/pretrain.sbatch", f"examples/{name}.sh", *flags]
        return self._bash(name, command, job)

    def _bash(self, name: str, command: Sequence[str], choices: Mapping[str, str]) -> Launched:
        environment = {
            "PATH": f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SIZE": "tiny",
            "CORPUS": str(self.corpus),
            "RUN": str(self.folder(name)),
            **choices,
        }
        variables = [f"{key}={value}" for key, value in environment.items()]
        log = self.root / f"{name}.log"
        log.unlink(missing_ok=True)
        status = finish(start(["env", *variables, "bash", *command], log), SECONDS)
        return Launched(status, log.read_text(errors="replace"))


def free_port() -> int:
    """Return a free port in the range of examples/slurm/pretrain.sbatch."""
    for port in range(20000 + os.getpid() % 5000, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", port)) != 0:
                return port
    raise RuntimeError("no port is free")


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Launchers:
    return Launchers(tmp_path_factory.mktemp("launchers"))


@pytest.fixture(scope="module")
def launched(launchers: Launchers) -> dict[str, Launched]:
    """One launcher of each kind, two at a time: one computes while the other's ranks start."""

    def with_the_pile_model(name: str) -> Launched:
        pile.result()
        trained = str(launchers.folder("pretrain_684m_pile") / RUNS["pretrain_684m_pile"])
        return launchers.run(name, PRETRAINED=trained, PROXY=trained)

    run = launchers.run
    with ThreadPoolExecutor(2) as pool:
        pile = pool.submit(run, "pretrain_684m_pile", "--", "--train-iters", "7")
        found: dict[str, Future[Launched]] = {
            "pretrain_684m_pile": pile,
            "pretrain_60m_proxy": pool.submit(run, "pretrain_60m_proxy", TP="2"),
            "finetune_stack": pool.submit(with_the_pile_model, "finetune_stack"),
            "transfer_pile": pool.submit(with_the_pile_model, "transfer_pile"),
            "pretrain_82m_proxy": pool.submit(run, "pretrain_82m_proxy", PP="2"),
            "sweep_stability": pool.submit(run, "sweep_stability"),
        }
        return {name: future.result() for name, future in found.items()}


RUNS = {
    "pretrain_60m_proxy": "2-proxy/tiny-seed1",
    "pretrain_82m_proxy": "2-proxy/tiny-seed1",
    "pretrain_684m_pile": "5-base/uniform-seed1",
}


@pytest.mark.parametrize(
    ("name", "steps", "layout"),
    [
        ("pretrain_60m_proxy", 12, (2, 1, 1)),
        ("pretrain_82m_proxy", 12, (1, 2, 1)),
        ("pretrain_684m_pile", 7, (1, 1, 2)),
    ],
)
def test_pretraining_launcher_trains_in_the_chosen_layout(launchers, launched, name, steps, layout):
    assert launched[name].status == 0, launched[name].printed
    folder = launchers.folder(name) / RUNS[name]
    run = TrainingRun.load(folder)
    assert (run.status, run.step) == ("finished", steps)
    found = CheckpointRecord.load(find_checkpoint(folder)).layout
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    assert tuple(found[degree] for degree in degrees) == layout


def test_fine_tuning_starts_from_the_pretrained_weights(launchers, launched):
    assert launched["finetune_stack"].status == 0, launched["finetune_stack"].printed
    start = launchers.folder("pretrain_684m_pile") / RUNS["pretrain_684m_pile"]
    expected = CheckpointRecord.load(find_checkpoint(start)).hash
    scratch = next(TrainingRun.load(start).metrics())["loss"]
    for mixture in ("uniform", "chameleon-finetune", "chameleon-pretrain"):
        run = TrainingRun.load(launchers.folder("finetune_stack") / f"5-base/{mixture}-seed1")
        assert run.status == "finished"
        assert run.provenance.inputs["pretrained checkpoint"] == expected
        assert next(run.metrics())["loss"] < scratch
        weights = dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
        if mixture != "uniform":
            path = launchers.folder("finetune_stack") / f"4-mixture/{mixture}.json"
            weights = dict(Mixture.load(path).weights)
        assert run.mixture == pytest.approx(weights)


def test_launcher_computes_a_mixture(launchers, launched):
    assert launched["transfer_pile"].status == 0, launched["transfer_pile"].printed
    found = Mixture.load(launchers.folder("transfer_pile") / "4-mixture/chameleon-pretrain.json")
    assert (found.method, list(found.weights)) == ("chameleon-pretrain", list(DOMAINS))


def test_sweep_trains_each_proxy_once(launchers, launched):
    assert launched["sweep_stability"].status == 0, launched["sweep_stability"].printed
    folder = launchers.folder("sweep_stability")
    sweep = Sweep.load(folder)
    assert sweep.axes == {
        "train_iters": [4, 12],
        "model_size": ["nano", "tiny"],
        "ridge": [1.0, 10.0, 100.0],
        "num_windows": [32, 64],
    }
    assert [len(sweep.along(axis)) for axis in sweep.axes] == [2, 2, 3, 2]
    assert len(sweep.points) == 6
    for point in sweep.points:
        assert list(sweep.load_mixture(point).weights) == list(DOMAINS)
    runs = sorted(path.name for path in (folder / "2-proxy").iterdir())
    assert runs == ["nano-12steps-seed1", "tiny-12steps-seed1", "tiny-4steps-seed1"]
    for name in runs:
        run = TrainingRun.load(folder / "2-proxy" / name)
        assert run.status == "finished"
        assert CheckpointRecord.load(find_checkpoint(run.root)).layout["data_parallel_size"] == 2
    assert "point 6 of 6: " in launched["sweep_stability"].printed
    assert (folder / "7-report/stability.png").read_bytes().startswith(b"\x89PNG")


def test_slurm_job_on_two_nodes_is_requeued_until_done(launchers):
    """The first job stops at its first step; --overwrite applies to the first start only."""
    name, margin = "pretrain_124m_proxy", 600
    folder = launchers.folder(name) / "2-proxy/tiny-seed1"
    flags = ("--", "--overwrite", "--exit-duration-in-mins")
    first = launchers.submit(name, margin + 6, *flags, "0.001", restarts=0)
    assert first.status == 0, first.printed
    step = TrainingRun.load(folder).step
    assert 0 < step < 12
    (call,) = launchers.calls.read_text().splitlines()
    assert re.fullmatch(r"requeue \d+", call)
    second = launchers.submit(name, margin + 3600, *flags, "60", restarts=1)
    assert second.status == 0, second.printed
    assert f"resuming at step {step}:" in second.printed
    assert TrainingRun.load(folder).status == "finished"
    assert CheckpointRecord.load(find_checkpoint(folder)).layout["data_parallel_size"] == 2
    assert launchers.calls.read_text().splitlines() == [call]
