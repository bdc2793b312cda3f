"""A run is a folder: which artifacts of which stage lie in it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    EmbeddingStore,
    EvaluationResult,
    Mixture,
    Sweep,
    TrainingRun,
)
from megatron_chameleon.artifacts.downstream_result import KIND as DOWNSTREAM_KIND
from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from megatron_chameleon.artifacts.record import kind_of
from megatron_chameleon.errors import UserError

CORPUS = "1-corpus"
PROXY = "2-proxy"
EMBEDDINGS = "3-embeddings"
MIXTURE = "4-mixture"
BASE = "5-base"
EVALUATION = "6-evaluation"
REPORT = "7-report"
STAGES = (CORPUS, PROXY, EMBEDDINGS, MIXTURE, BASE, EVALUATION)


@dataclasses.dataclass(frozen=True)
class Merged:
    """How several run folders became one (``merged.merge``).

    Attributes:
        roots: folder -> what is appended to its names where they collide.
        mixture_files: name of a mixture -> its file.
        copies: resolved place of an artifact that is not counted -> the entry of the ledger that
            is, of which it is a copy.
        uncounted: entries of the ledger that are copies of others, under names of their own.
    """

    roots: Mapping[Path, str]
    mixture_files: Mapping[str, Path]
    copies: Mapping[Path, str]
    uncounted: frozenset[str]


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """What lies in a run folder; a stage that has not been run is None or empty.

    Each dictionary is sorted by name: the folder's for training runs, the file's without its suffix
    for mixtures and evaluations; a base run and its evaluation have the same name. Downstream
    accuracies may lie beside those, under names of their own. Embedding stores go by their path
    below ``root``: ``3-embeddings``, or a folder in it or in ``4-mixture``, where
    tools/compute_mixture.py puts one that it is given no place for.
    """

    root: Path
    corpus: Corpus | None
    proxies: dict[str, TrainingRun]
    embeddings: dict[str, EmbeddingStore]
    mixtures: dict[str, Mixture]
    base_runs: dict[str, TrainingRun]
    evaluations: dict[str, EvaluationResult]
    sweep: Sweep | None
    downstream: dict[str, DownstreamResult] = dataclasses.field(default_factory=dict)
    merged: Merged | None = None

    @classmethod
    def load(cls, root: Path) -> RunFolder:
        """Read every artifact below ``root``.

        Raises:
            UserError: if ``root`` is no run folder, or the error of the artifact that is damaged.
        """
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the one that holds {CORPUS} and so on")
        corpus = root / CORPUS
        evaluations = _json_files(root / EVALUATION)
        downstream = [path for path in evaluations if kind_of(path) == DOWNSTREAM_KIND]
        folder = cls(
            root=root,
            corpus=Corpus.load(corpus) if (corpus / "corpus.json").is_file() else None,
            proxies=_training_runs(root / PROXY),
            embeddings=_embedding_stores(root),
            mixtures={path.stem: Mixture.load(path) for path in _json_files(root / MIXTURE)},
            base_runs=_training_runs(root / BASE),
            evaluations={
                path.stem: EvaluationResult.load(path)
                for path in evaluations
                if path not in downstream
            },
            sweep=Sweep.load(root) if Sweep.exists(root) else None,
            downstream={path.stem: DownstreamResult.load(path) for path in downstream},
        )
        if not folder.costs():
            raise UserError(
                f"{root} holds no artifact of any stage; give a folder with {', '.join(STAGES)}"
            )
        return folder

    def costs(self) -> dict[str, Cost]:
        """What each artifact cost, in the order of the stages; keys read like ``5-base/name``.

        One that is there under several names, by links, is there once.
        """
        found = {CORPUS: self.corpus.cost} if self.corpus is not None else {}
        for stage, artifacts in (
            (f"{PROXY}/", self.proxies),
            ("", self.embeddings),
            (f"{MIXTURE}/", self.mixtures),
            (f"{BASE}/", self.base_runs),
            (f"{EVALUATION}/", self.evaluations),
            (f"{EVALUATION}/", self.downstream),
        ):
            found |= {f"{stage}{name}": artifact.cost for name, artifact in artifacts.items()}
        return {entry: cost for entry, cost in found.items() if entry not in self.uncounted}

    @functools.cached_property
    def entries_by_place(self) -> Mapping[Path, str]:
        """Resolved place of an artifact -> its key in the costs; of a link, that of its goal."""
        places = self._places
        copied = self.merged.uncounted if self.merged else frozenset()
        own = [entry for entry in places if entry not in copied]
        # A stable sort: what a link leads to comes before the link.
        own.sort(key=lambda entry: places[entry].is_symlink())
        found: dict[Path, str] = {}
        for entry in own:
            found.setdefault(places[entry].resolve(), entry)
        for place, entry in self.merged.copies.items() if self.merged else ():
            found[place] = found[places[entry].resolve()] if entry in places else entry
        return found

    @functools.cached_property
    def uncounted(self) -> frozenset[str]:
        """Keys of artifacts that cost nothing: each is another one, by a link or as a copy."""
        copied = self.merged.uncounted if self.merged else frozenset()
        known = self.entries_by_place
        linked = (e for e, place in self._places.items() if known[place.resolve()] != e)
        return copied | frozenset(linked)

    @functools.cached_property
    def _places(self) -> Mapping[str, Path]:
        """Key in the costs -> where the artifact lies; of results only where that is one folder."""
        found = {f"{PROXY}/{name}": run.root for name, run in self.proxies.items()}
        found |= {name: store.root for name, store in self.embeddings.items()}
        found |= {f"{MIXTURE}/{name}": self.mixture_file(name) for name in self.mixtures}
        found |= {f"{BASE}/{name}": run.root for name, run in self.base_runs.items()}
        if self.merged is None:
            stage = self.root / EVALUATION
            results = (*self.evaluations, *self.downstream)
            found |= {f"{EVALUATION}/{name}": stage / f"{name}.json" for name in results}
        return found

    def mixture_file(self, name: str) -> Path:
        """Where the mixture ``name`` lies."""
        if self.merged is not None:
            return self.merged.mixture_files[name]
        return self.root / MIXTURE / f"{name}.json"

    def parted(self, name: str) -> tuple[str, Path | None]:
        """A name without what ``merged.merge`` appended, and the folder that this stood for."""
        for root, appended in self.merged.roots.items() if self.merged else ():
            if name.endswith(f" ({appended})"):
                return name.removesuffix(f" ({appended})"), root
        return name, None


def _training_runs(stage: Path) -> dict[str, TrainingRun]:
    return {
        folder.name: TrainingRun.load(folder)
        for folder in _folders(stage)
        if TrainingRun.exists(folder)
    }


def _embedding_stores(root: Path) -> dict[str, EmbeddingStore]:
    stage = root / EMBEDDINGS
    return {
        folder.relative_to(root).as_posix(): EmbeddingStore.load(folder)
        for folder in (stage, *_folders(stage), *_folders(root / MIXTURE))
        if EmbeddingStore.exists(folder)
    }


def _folders(stage: Path) -> list[Path]:
    return sorted(path for path in stage.iterdir() if path.is_dir()) if stage.is_dir() else []


def _json_files(stage: Path) -> list[Path]:
    return sorted(path for path in stage.glob("*.json") if path.is_file())
