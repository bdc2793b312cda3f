"""One launch of four ranks for the whole session, and its results."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_chameleon.artifacts import EmbeddingStore, EvaluationResult, Mixture, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from tests.distributed.cases import TRAIN_ITERS, Places
from tests.distributed.launch import finish, start
from tests.families import FAMILIES, write_config
from tests.small_corpus import DOMAINS, word_tokenizer, write_small_corpus

SECONDS = 1500.0  # limit for all launches on a loaded machine
CLOCK_FIELDS = {
    *("seconds", "tokens_per_second", "tflops_per_second_per_device", "mfu"),
    *("memory_bytes", "phase_seconds"),
}


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of the ranks.

    If a section is unfinished, reading its results fails and shows the end of the log.
    """

    places: Places

    def require(self, section: str) -> None:
        self.require_file(self.places.done(section))

    def require_file(self, path: Path) -> None:
        if not path.exists():
            end = self.places.log.read_text(errors="replace")[-8000:]
            pytest.fail(f"the ranks did not write {path}; the end of their log:\n{end}")

    def fault(self, name: str) -> dict[str, Any]:
        """The record of a launch of faults.py, and its log."""
        path = self.places.root / f"{name}.json"
        self.require_file(path)
        return {**json.loads(path.read_text()), "log": path.with_suffix(".log").read_text()}

    def run(self, name: str) -> TrainingRun:
        """Return the run ``name``.

        The name SECTION/proxy means the proxy run of a method's section.
        """
        self.require(name.partition("/")[0])
        return TrainingRun.load(self.places.run(name))

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics.jsonl, without CLOCK_FIELDS."""
        self.require(run)
        return metrics_in(self.places.run(run))

    def checkpoint(self, run: str, step: int = TRAIN_ITERS) -> CheckpointRecord:
        self.require(run)
        return CheckpointRecord.load(step_folder(self.places.run(run), step))

    def vectors(self, reading: str, layer: int) -> dict[str, NDArray[np.float32]]:
        """Domain -> window vectors [n, h]."""
        self.require(f"read-{reading}")
        store = EmbeddingStore.load(self.places.mixture(reading, layer).with_name("embeddings"))
        return {name: store.vectors(name) for name in store.domains}

    def mixture(self, reading: str, layer: int) -> Mixture:
        self.require(f"read-{reading}")
        return Mixture.load(self.places.mixture(reading, layer))

    def evaluation(self, reading: str, packing: str = "packed") -> EvaluationResult:
        self.require(f"read-{reading}")
        return EvaluationResult.load(self.places.evaluation(reading, packing))

    def reference(self) -> dict[str, NDArray[np.floating]]:
        """Name -> array that readings.write_reference has written."""
        self.require("reference")
        with np.load(self.places.reference) as arrays:
            return dict(arrays)


def metrics_in(run_dir: Path) -> list[dict[str, Any]]:
    """Read the lines of a run's metrics.jsonl, without CLOCK_FIELDS."""
    lines = read_metrics(run_dir / METRICS_NAME)
    return [{k: v for k, v in line.items() if k not in CLOCK_FIELDS} for line in lines]


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """A folder with a corpus, a mixture of its domains, and the config.json of each family."""
    places = Places(tmp_path_factory.mktemp("layouts"))
    for name, config in FAMILIES.items():
        write_config(places.root / "models" / name, config)
    places.corpus.mkdir()
    tokenizer = word_tokenizer(places.corpus / "tokenizer.json")
    write_small_corpus(places.corpus, tokenizer_hash=sha256_of_files(tokenizer))
    Mixture(dict(zip(DOMAINS, [0.0, 0.3, 0.7], strict=True))).save(places.uneven_mixture)
    return places


@pytest.fixture(scope="session")
def results(places: Places) -> Results:
    """The results of all launches."""
    command = [sys.executable, "-m", "tests.distributed", str(places.root)]
    finish(start(command, places.log), SECONDS)
    return Results(places)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Extend the time limit: the first test that uses the results waits for all sections."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(2 * SECONDS))
