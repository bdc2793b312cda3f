"""Run the launchers of examples/ with SIZE=tiny on two CPU ranks.

tests/unit/repository/test_examples.py parses the commands of all launchers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import transformers

from megatron_chameleon.artifacts import Mixture, Sweep, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from megatron_chameleon.model.huggingface_config import config_fields, read_model_config
from megatron_chameleon.report.cost import ledger_of
from megatron_chameleon.report.run_folder import RunFolder
from tests.distributed.launch import REPOSITORY, finish, start
from tests.families import FAMILIES
from tests.small_corpus import DOMAINS, write_small_corpus

SECONDS = 900.0  # limit for one launcher on a loaded machine
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

    def run(self, name: str, *flags: str, **choices: str) -> str:
        """Run examples/NAME.sh with ``choices`` in the environment; return its output."""
        return self._bash(name, [f"examples/{name}.sh", *flags], choices)

    def submit(self, name: str, ends_in: float, *flags: str, restarts: int) -> str:
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

    def _bash(self, name: str, command: Sequence[str], choices: Mapping[str, str]) -> str:
        environment = {
            "PATH": f"{self.programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SIZE": "tiny",
            "CORPUS": str(self.corpus),
            "RUN": str(self.folder(name)),
            **choices,
        }
        variables = [f"{key}={value}" for key, value in environment.items()]
        log = self.root / f"{Path(name).name}.log"
        log.unlink(missing_ok=True)
        status = finish(start(["env", *variables, "bash", *command], log), SECONDS)
        printed = log.read_text(errors="replace")
        assert status == 0, printed
        return printed


@pytest.mark.slow
def test_quickstart_runs_from_an_empty_folder(tmp_path):
    steps = {"STEPS": "4", "WARMUP": "2", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "megatron_chameleon", "quickstart", "--run-dir", "first"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, **steps}, check=True)
    assert (tmp_path / "first/7-report/report.html").is_file()


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
def pile(launchers: Launchers) -> Path:
    """The run of the Pile's launcher, on two data-parallel ranks."""
    name = "pretrain_684m_pile"
    launchers.run(name, "--", "--train-iters", "7")
    folder = launchers.folder(name) / "5-base/uniform-seed1"
    assert_trained(folder, 7, (1, 1, 2))
    return folder


def assert_trained(folder: Path, steps: int, layout: tuple[int, int, int]) -> None:
    """Check that the run is finished, and its tensor, pipeline and data-parallel sizes."""
    run = TrainingRun.load(folder)
    assert (run.status, run.step) == ("finished", steps)
    found = CheckpointRecord.load(find_checkpoint(folder)).layout
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    assert tuple(found[degree] for degree in degrees) == layout


@pytest.mark.parametrize(
    ("name", "choices", "layout"),
    [
        ("pretrain_60m_proxy", {"PP": "2"}, (1, 2, 1)),
        pytest.param("pretrain_82m_proxy", {"TP": "2"}, (2, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_pretraining_launcher_trains_in_the_chosen_layout(launchers, name, choices, layout):
    launchers.run(name, **choices)
    assert_trained(launchers.folder(name) / "2-proxy/tiny-seed1", 12, layout)


@pytest.mark.slow
def test_fine_tuning_starts_from_the_pretrained_weights(launchers, pile):
    launchers.run("finetune_stack", PRETRAINED=str(pile), PROXY=str(pile))
    expected = CheckpointRecord.load(find_checkpoint(pile)).hash
    scratch = next(TrainingRun.load(pile).metrics())["loss"]
    folder = launchers.folder("finetune_stack")
    for mixture in ("uniform", "chameleon-finetune", "chameleon-pretrain"):
        run = TrainingRun.load(folder / f"5-base/{mixture}-seed1")
        assert run.status == "finished"
        assert run.provenance.inputs["pretrained checkpoint"] == expected
        assert next(run.metrics())["loss"] < scratch
        weights = dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
        if mixture != "uniform":
            weights = dict(Mixture.load(folder / f"4-mixture/{mixture}.json").weights)
        assert run.mixture == pytest.approx(weights)


@pytest.mark.slow
def test_llama_launcher_runs_every_stage(launchers):
    launchers.run("pretrain_llama_130m")
    folder = launchers.folder("pretrain_llama_130m")
    weights = dict(Mixture.load(folder / "4-mixture/chameleon-pretrain.json").weights)
    for mixture in ("uniform", "chameleon-pretrain"):
        assert_trained(folder / f"5-base/{mixture}-seed1", 12, (1, 1, 2))
    run = TrainingRun.load(folder / "5-base/chameleon-pretrain-seed1")
    assert run.mixture == pytest.approx(weights)
    assert (run.model["activation"], run.model["position_embedding_type"]) == ("swiglu", "rope")
    assert (folder / "7-report/report.html").is_file()


@pytest.mark.slow
def test_huggingface_model_is_fine_tuned_and_exported(launchers, tmp_path):
    words = enumerate("abcdefgh" * 30)
    texts = [f"the {word} of a text, and {number} more" for number, word in words]
    inputs = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{name} {text}"}) + "\n" for text in texts))
        inputs.append(f"{name}={path}")
    model = tmp_path / "llama"
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=300, max_sequence_length=128)
    settings = transformers.AutoConfig.for_model(**config_fields(config, "float32", 0))
    transformers.AutoModelForCausalLM.from_config(settings).save_pretrained(model)
    (model / "tokenizer.json").write_bytes(byte_level_bpe(iter(texts), 290, "<|endoftext|>"))
    name, run = "finetune_huggingface", launchers.folder("finetune_huggingface")
    choices = {"INPUT": " ".join(inputs), "CORPUS": str(run / "1-corpus")}
    launchers.run(name, str(model), **choices)
    for mixture in ("uniform", "chameleon-finetune", "chameleon-pretrain"):
        assert_trained(run / f"5-base/{mixture}-seed1", 12, (1, 1, 2))
        exported = read_model_config(run / f"huggingface/{mixture}-seed1").config
        assert exported == dataclasses.replace(config, vocab_size=290)


@pytest.mark.slow
def test_transfer_computes_a_mixture_with_a_given_proxy(launchers, pile):
    launchers.run("transfer_pile", PROXY=str(pile))
    found = Mixture.load(launchers.folder("transfer_pile") / "4-mixture/chameleon-pretrain.json")
    assert (found.method, list(found.weights)) == ("chameleon-pretrain", list(DOMAINS))


@pytest.mark.parametrize(
    ("name", "output", "is_trained"),
    [
        ("unimax", "unimax", False),
        pytest.param("manual", "printed-doremi", False, marks=pytest.mark.slow),
        pytest.param("doremi", "doremi", True, marks=pytest.mark.slow),
        pytest.param("doge", "doge", True, marks=pytest.mark.slow),
        pytest.param("regmix", "regmix", True, marks=pytest.mark.slow),
        pytest.param("mixing_laws", "mixing-laws", True, marks=pytest.mark.slow),
        pytest.param("surrogate", "surrogate", True, marks=pytest.mark.slow),
    ],
)
def test_baseline_writes_its_mixture(launchers, name, output, is_trained):
    printed = launchers.run(f"baselines/{name}")
    folder, method = launchers.folder(f"baselines/{name}"), name.replace("_", "-")
    mixture = Mixture.load(folder / f"4-mixture/{output}.json")
    assert (mixture.method, list(mixture.weights)) == (method, list(DOMAINS))
    if is_trained:
        ledger = ledger_of(RunFolder.load(folder)).mixtures[method]
        assert ledger.missing == ()
        assert ledger.cost.flops == pytest.approx(mixture.parameters["total_cost"]["flops"])
        assert ledger.cost.flops > 0
    else:
        assert "warning: " not in printed
        assert mixture.epochs is not None


@pytest.mark.slow
def test_sweep_trains_each_proxy_once(launchers):
    launchers.run("sweep_stability")
    folder = launchers.folder("sweep_stability")
    sweep = Sweep.load(folder)
    assert sweep.axes == {
        "steps": [4, 12],
        "model": ["nano", "tiny"],
        "ridge": [1.0, 10.0, 100.0],
        "num_windows": [32, 64],
    }
    assert len(sweep.points) == 6
    for point in sweep.points:
        assert list(sweep.load_mixture(point).weights) == list(DOMAINS)
    runs = sorted(path.name for path in (folder / "2-proxy").iterdir())
    assert runs == ["nano-12steps-seed1", "tiny-12steps-seed1"]
    for name in runs:
        run = TrainingRun.load(folder / "2-proxy" / name)
        assert run.status == "finished"
        assert CheckpointRecord.load(find_checkpoint(run.root)).layout["data_parallel_size"] == 2
    assert (folder / "7-report/stability.png").is_file()


@pytest.mark.slow
def test_slurm_job_on_two_nodes_is_requeued_until_done(launchers):
    """The first job stops after its first step; --overwrite applies only to the first job.

    A finished job and a failed one, which ends after the time to stop, are not requeued.
    """
    name, margin = "pretrain_124m_proxy", 600
    folder = launchers.folder(name) / "2-proxy/tiny-seed1"
    flags = ("--", "--overwrite", "--exit-duration-in-mins")
    launchers.submit(name, margin + 6, *flags, "0.001", restarts=0)
    step = TrainingRun.load(folder).step
    assert 0 < step < 12
    (call,) = launchers.calls.read_text().splitlines()
    assert re.fullmatch(r"requeue \d+", call)
    second = launchers.submit(name, margin + 3600, *flags, "60", restarts=1)
    assert f"resuming at step {step}:" in second
    assert TrainingRun.load(folder).status == "finished"
    assert CheckpointRecord.load(find_checkpoint(folder)).layout["data_parallel_size"] == 2
    with pytest.raises(AssertionError, match="no-such-flag"):
        launchers.submit(name, margin + 1, "--", "--no-such-flag", restarts=1)
    assert launchers.calls.read_text().splitlines() == [call]
