"""Run the real tools on the CPU and on the simulated device; pretraining runs are cached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts.files import sha256_of_files
from tests.distributed.conftest import metrics_in
from tests.families import FAMILIES, write_config
from tests.simulated_cuda.cases import PRETRAINING_FLAGS
from tests.simulated_cuda.driver import Driver, Kind, Request
from tests.simulated_cuda.synchronizations import Synchronizations
from tests.simulated_cuda.torch_internals import unsupported_reason
from tests.small_corpus import word_tokenizer, write_small_corpus

HERE = Path(__file__).parent
PRETRAIN = ("tools/pretrain_gpt.py", "--corpus", "{corpus}", "--run-dir", "{folder}")
SECONDS = 600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests on platforms that the simulated device does not support."""
    reason = unsupported_reason()
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(SECONDS))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclasses.dataclass(frozen=True)
class Finished:
    """Exit status, log and output folder of a run."""

    status: int
    log: str
    folder: Path

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without fields that depend on the clock."""
        return metrics_in(self.folder)

    def values(self, name: str) -> list[float]:
        """Values of a field in the lines of metrics.jsonl that contain this field."""
        return [line[name] for line in self.metrics() if name in line]

    def synchronizations(self) -> list[Synchronizations]:
        """Host synchronizations of each rank."""
        first = self.folder.with_suffix(".waits")
        others = sorted(first.parent.glob(f"{first.name}.*"))
        return [Synchronizations.load(path) for path in (first, *others)]


class Tools:
    """Run the unmodified tools, each in its own processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # Start both processes now, so that they import torch concurrently.
        self._drivers: dict[Kind, Driver] = {kind: Driver(kind) for kind in ("cuda", "cpu")}
        self._pretrained: dict[tuple[Any, ...], Finished] = {}

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    def run(self, kind: Kind, name: str, command: Sequence[str | Path], **options: Any) -> Finished:
        """Run ``command`` once; its files are named after ``name`` and ``kind``.

        ``{folder}`` in the command is the run's own folder, ``{corpus}`` the corpus, and
        ``{models}`` a folder with the config.json of each family.
        ``options`` are further fields of :class:`Request`.
        """
        folder = self.root / f"{name}-{kind}"
        places = {"folder": folder, "corpus": self.corpus, "models": self.root / "models"}
        words = [str(word).format_map(places) for word in command]
        log, waits = folder.with_suffix(".log"), folder.with_suffix(".waits")
        status = self._drivers[kind].run(Request(words, log, waits, **options))
        return Finished(status, log.read_text(errors="replace"), folder)

    def pretrain(
        self,
        kind: Kind,
        name: str,
        flags: Sequence[str] = (),
        ranks: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> Finished:
        """Pretrain, or return the cached run of this name; it must succeed."""
        key = (kind, name)
        if key not in self._pretrained:
            done = self.run(
                kind,
                name,
                [*PRETRAIN, *PRETRAINING_FLAGS, *flags],
                ranks=ranks,
                environment=environment or {},
            )
            assert done.status == 0, done.log
            self._pretrained[key] = done
        return self._pretrained[key]

    def reference(self, flags: Sequence[str] = ()) -> Finished:
        """The one-rank run on the CPU with these flags."""
        name = "reference" + "".join(flags).replace("/", "-").replace("{models}", "")
        return self.pretrain("cpu", name, flags)

    def concurrently(
        self, on_device: Callable[[], Finished], on_cpu: Callable[[], Finished]
    ) -> tuple[Finished, Finished]:
        """Run on the device and on the CPU concurrently."""
        with ThreadPoolExecutor(1) as pool:
            expected = pool.submit(on_cpu)
            return on_device(), expected.result()

    def close(self) -> None:
        """End the processes of the drivers."""
        for driver in self._drivers.values():
            driver.close()


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    """Return a runner of tools, with a small corpus."""
    tools = Tools(tmp_path_factory.mktemp("simulated-cuda"))
    for name, config in FAMILIES.items():
        write_config(tools.root / "models" / name, config)
    tools.corpus.mkdir()
    tokenizer = word_tokenizer(tools.corpus / "tokenizer.json")
    write_small_corpus(tools.corpus, tokenizer_hash=sha256_of_files(tokenizer))
    yield tools
    tools.close()
