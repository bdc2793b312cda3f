"""Runs of the real tools on the GPUs of this machine and, for comparison, on its CPU.

SIMULATED_CUDA=1 runs the tools on the simulated device of tests/simulated_cuda instead, to check
the tests themselves on a machine without a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.process_tree import run_within
from megatron_chameleon.artifacts import Corpus, TrainingRun
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.parallel.layout import destroy_groups
from tests.small_corpus import word_tokenizer, write_small_corpus

ROOT = Path(__file__).resolve().parents[2]
IS_SIMULATED = os.environ.get("SIMULATED_CUDA") == "1"
STEPS = 12
# Adam's epsilon is much larger than the gradients' rounding errors, so updates differ as little as
# gradients.
TRAINING_FLAGS = (
    *("--model", "nano", "--seq-length", "32", "--train-iters", str(STEPS)),
    *("--global-batch-size", "8", "--micro-batch-size", "4"),
    *("--lr", "3e-3", "--lr-warmup-iters", "2", "--adam-eps", "1e-4"),
)
PRETRAINING_FLAGS = (*TRAINING_FLAGS, "--log-interval", "1", "--save-interval", "6")


class Tools:
    """Run tools like a user; pretraining runs on the CPU are cached by their flags."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.corpus = self._write_corpus()
        self._references: dict[tuple[str, ...], TrainingRun] = {}

    def _write_corpus(self) -> Corpus:
        folder = self.root / "corpus"
        folder.mkdir()
        tokenizer = word_tokenizer(folder / "tokenizer.json")
        return write_small_corpus(folder, tokenizer_hash=sha256_of_files(tokenizer))

    def run(self, tool: str, *flags: str | Path, ranks: int = 1, on_cpu: bool = False) -> None:
        """Run a tool, and check that it succeeds; ``on_cpu`` hides the devices.

        A test with more ranks than GPUs is skipped.
        """
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": "graph_code"}
        if on_cpu or IS_SIMULATED:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if not on_cpu:
            require_gpus(ranks)
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        if IS_SIMULATED and not on_cpu:
            command += ["-m", "tests.simulated_cuda.run_tool"]
        command += [str(ROOT / "tools" / tool), *map(str, flags)]
        log = self.root / "log"
        with log.open("wb") as output:
            status = run_within(command, 280, output, cwd=ROOT, environment=environment)
        assert status == 0, log.read_text()  # after 280 s, the status is None
        # The losses are those of the dense mask, so look for the kernel in the compiled graphs.
        if "flex" in flags and not IS_SIMULATED:
            assert "higher_order.flex_attention" in log.read_text()

    def pretrain(
        self, folder: Path, *flags: str | Path, ranks: int = 1, on_cpu: bool = False
    ) -> TrainingRun:
        """Pretrain a run in ``folder``, or resume the run that is there."""
        places = ("--corpus", self.corpus.root, "--run-dir", folder)
        self.run("pretrain_gpt.py", *places, *PRETRAINING_FLAGS, *flags, ranks=ranks, on_cpu=on_cpu)
        return TrainingRun.load(folder)

    def reference(self, *flags: str) -> TrainingRun:
        """Return a pretraining run with these flags on one CPU rank."""
        if flags not in self._references:
            folder = self.root / f"reference-{len(self._references)}"
            self._references[flags] = self.pretrain(folder, *flags, on_cpu=True)
        return self._references[flags]


def require_gpus(count: int) -> None:
    """Skip the test on a machine with fewer GPUs."""
    there = count if IS_SIMULATED else torch.cuda.device_count()
    if there < count:
        pytest.skip(f"needs {count} GPUs; this machine has {there}")


def losses(run: TrainingRun) -> list[float]:
    """Training loss of each recorded step of ``run``."""
    return [line["loss"] for line in run.metrics() if "loss" in line]


@pytest.fixture(autouse=True)
def clean_torch_state() -> Iterator[None]:
    """Disable TF32, which NVIDIA's containers enable; destroy a failed test's process groups.

    On CUDA, `distributed` destroys its process groups only if its block raises no exception.
    """
    torch.set_float32_matmul_precision("highest")
    yield
    if torch.distributed.is_initialized():
        destroy_groups()


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    """Return a runner of tools in a folder with a small corpus."""
    return Tools(tmp_path_factory.mktemp("gpu"))
