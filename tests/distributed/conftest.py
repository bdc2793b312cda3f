"""One start of four ranks for the whole session, and what came out of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_chameleon.artifacts import EmbeddingStore, EvaluationResult, Mixture
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.training_run import METRICS_NAME, read_metrics
from tests.distributed.launch import finish, start, torchrun
from tests.distributed.layout_cases import MOST_RANKS, Places
from tests.small_corpus import DOMAINS, word_tokenizer, write_small_corpus

SECONDS_FOR_ALL_LAYOUTS = 1200.0
CLOCK_FIELDS = (
    "seconds",
    "tokens_per_second",
    "tflops_per_second_per_device",
    "memory_bytes",
    "phase_seconds",
)


@dataclasses.dataclass(frozen=True)
class Results:
    """What the ranks wrote. Asking for what they did not get to shows the end of their log."""

    places: Places

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics.jsonl, without what depends on the clock."""
        self.require(run)
        records = list(read_metrics(self.places.run(run) / METRICS_NAME))
        return [{k: v for k, v in line.items() if k not in CLOCK_FIELDS} for line in records]

    def checkpoint(self, run: str, step: int) -> CheckpointRecord:
        self.require(run)
        return CheckpointRecord.load(step_folder(self.places.run(run), step))

    def vectors(self, reading: str, layer: int) -> dict[str, NDArray[np.float32]]:
        """Domain -> window vectors [n, h]."""
        self.require(f"embed-{reading}-{layer}")
        store = EmbeddingStore.load(self.places.store(reading, layer))
        return {name: store.vectors(name) for name in store.domains}

    def mixture(self, reading: str, layer: int) -> Mixture:
        self.require(f"embed-{reading}-{layer}")
        return Mixture.load(self.places.mixture(reading, layer))

    def evaluation(self, reading: str) -> EvaluationResult:
        self.require(f"evaluate-{reading}")
        return EvaluationResult.load(self.places.evaluation(reading))

    def evaluation_by_document(self, reading: str) -> EvaluationResult:
        self.require(f"evaluate-{reading}")
        return EvaluationResult.load(self.places.evaluation_by_document(reading))

    def reference(self) -> dict[str, NDArray[np.floating]]:
        """The plain read-outs, by the names that plain_readout.py gives them."""
        self.require("reference")
        with np.load(self.places.reference) as arrays:
            return dict(arrays)

    def require(self, section: str) -> None:
        if not self.places.done(section).exists():
            end = "\n".join(self.places.log.read_text(errors="replace").splitlines()[-80:])
            pytest.fail(f"the ranks did not finish '{section}'; their last words:\n{end}")


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """A folder with a corpus in it, and a mixture of its domains."""
    places = Places(tmp_path_factory.mktemp("layouts"))
    places.corpus.mkdir()
    tokenizer = word_tokenizer(places.corpus / "tokenizer.json")
    write_small_corpus(places.corpus, tokenizer_hash=sha256_of_files(tokenizer))
    Mixture(dict(zip(DOMAINS, [0.0, 0.3, 0.7], strict=True))).save(places.uneven_mixture)
    return places


@pytest.fixture(scope="session")
def results(places: Places) -> Results:
    """Everything that layout_ranks.py does, done."""
    script = Path(__file__).with_name("layout_ranks.py")
    process = start(torchrun(MOST_RANKS, script, str(places.root)), places.log)
    finish(process, SECONDS_FOR_ALL_LAYOUTS)
    return Results(places)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for results waits for all of them."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(2 * SECONDS_FOR_ALL_LAYOUTS))
