"""The artifacts of a run folder, merged run folders, and labels of runs."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    EmbeddingStore,
    EvaluationResult,
    Mixture,
    Sweep,
    TrainingRun,
)
from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from megatron_chameleon.artifacts.record import kind_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.tables import unique_labels

CORPUS = "1-corpus"
PROXY = "2-proxy"
EMBEDDINGS = "3-embeddings"
MIXTURE = "4-mixture"
BASE = "5-base"
EVALUATION = "6-evaluation"
REPORT = "7-report"
STAGES = (CORPUS, PROXY, EMBEDDINGS, MIXTURE, BASE, EVALUATION)
# Suffix that examples/evaluate_downstream.sh appends to the name of the base run.
DOWNSTREAM_SUFFIX = "-downstream"
# Field of a run folder -> prefix of its names in the ledger.
_PREFIXES = {
    "proxies": f"{PROXY}/",
    "embeddings": "",
    "mixtures": f"{MIXTURE}/",
    "base_runs": f"{BASE}/",
    "evaluations": f"{EVALUATION}/",
    "downstream": f"{EVALUATION}/",
}
# Fields whose artifacts are renamed together.
_FAMILIES = (
    ("proxies",),
    ("embeddings",),
    ("mixtures",),
    ("base_runs", "evaluations", "downstream"),
)
# An error message lists this many domains.
MOST_LISTED = 3
BASELINE_METHOD = "uniform"
# Runs of other methods are labelled by their names.
METHOD_LABELS = {
    "uniform": "Uniform",
    "chameleon-pretrain": "Chameleon",
    "chameleon-finetune": "Chameleon (fine-tuning)",
}
# Weights of a run and of its mixture file differ by rounding at most.
SAME_WEIGHT = 1e-9


@dataclasses.dataclass(frozen=True)
class Merged:
    """Names and duplicates of merged run folders (see ``merge``).

    Attributes:
        roots: folder -> suffix of its names where they collide.
        mixture_files: name of a mixture -> its file.
        copies: resolved path of a duplicate artifact -> ledger entry that it duplicates.
        uncounted: ledger entries that duplicate others under names of their own.
    """

    roots: Mapping[Path, str]
    mixture_files: Mapping[str, Path]
    copies: Mapping[Path, str]
    uncounted: frozenset[str]


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The artifacts of a run folder; a stage that has not been run is None or empty.

    Each dictionary is sorted by name: the folder's name for training runs, the file's stem for
    mixtures and results. A base run and its evaluation have the same name. Embedding stores go by
    their path below ``root``: ``3-embeddings``, or a folder in it or in ``4-mixture``.
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
            UserError: if ``root`` is not a run folder, or an artifact in it is damaged.
        """
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; pass the one that holds {CORPUS} and so on")
        results = _json_files(root / EVALUATION)
        downstream = [path for path in results if kind_of(path) == DownstreamResult.KIND]
        perplexity = [path for path in results if path not in downstream]
        stores = (root / EMBEDDINGS, *_folders(root / EMBEDDINGS), *_folders(root / MIXTURE))
        has_corpus = (root / CORPUS / "corpus.json").is_file()
        folder = cls(
            root=root,
            corpus=Corpus.load(root / CORPUS) if has_corpus else None,
            proxies=_training_runs(root / PROXY),
            embeddings={
                path.relative_to(root).as_posix(): EmbeddingStore.load(path)
                for path in stores
                if EmbeddingStore.exists(path)
            },
            mixtures={path.stem: Mixture.load(path) for path in _json_files(root / MIXTURE)},
            base_runs=_training_runs(root / BASE),
            evaluations={path.stem: EvaluationResult.load(path) for path in perplexity},
            sweep=Sweep.load(root) if Sweep.exists(root) else None,
            downstream={path.stem: DownstreamResult.load(path) for path in downstream},
        )
        if not folder.costs():
            raise UserError(
                f"{root} holds no artifact of any stage; pass a folder with {', '.join(STAGES)}"
            )
        return folder

    def costs(self) -> dict[str, Cost]:
        """Cost of each artifact, in stage order, by keys like ``5-base/name``.

        An artifact with several names, by links or copies, is listed once.
        """
        found = {CORPUS: self.corpus.cost} if self.corpus is not None else {}
        for field, prefix in _PREFIXES.items():
            found |= {f"{prefix}{name}": a.cost for name, a in getattr(self, field).items()}
        return {entry: cost for entry, cost in found.items() if entry not in self.uncounted}

    @functools.cached_property
    def entries_by_place(self) -> Mapping[Path, str]:
        """Resolved path of an artifact -> its key in the costs; of a link, its target's key."""
        places = self._places
        own = [e for e in places if self.merged is None or e not in self.merged.uncounted]
        own.sort(key=lambda entry: places[entry].is_symlink())  # stable: targets before links
        found: dict[Path, str] = {}
        for entry in own:
            found.setdefault(places[entry].resolve(), entry)
        for place, entry in self.merged.copies.items() if self.merged else ():
            found[place] = found[places[entry].resolve()] if entry in places else entry
        return found

    @functools.cached_property
    def uncounted(self) -> frozenset[str]:
        """Keys of links to and copies of other artifacts, which cost nothing."""
        copied = self.merged.uncounted if self.merged else frozenset()
        known = self.entries_by_place
        return copied | {e for e, place in self._places.items() if known[place.resolve()] != e}

    @functools.cached_property
    def _places(self) -> Mapping[str, Path]:
        """Key in the costs -> path; without the results of merged folders, which have no links."""
        fields = list(_PREFIXES) if self.merged is None else list(_PREFIXES)[:4]
        return {
            f"{_PREFIXES[field]}{name}": self.place(field, name)
            for field in fields
            for name in getattr(self, field)
        }

    def place(self, field: str, name: str) -> Path:
        """Path of the artifact ``name`` of ``field``."""
        if field == "mixtures":
            file = self.root / MIXTURE / f"{name}.json"
            return file if self.merged is None else self.merged.mixture_files[name]
        root: Path | None = getattr(getattr(self, field)[name], "root", None)
        return self.root / EVALUATION / f"{name}.json" if root is None else root

    def split_name(self, name: str) -> tuple[str, Path | None]:
        """A name without the suffix that ``merge`` appended, and the folder of that suffix."""
        for root, appended in self.merged.roots.items() if self.merged else ():
            if name.endswith(f" ({appended})"):
                return name.removesuffix(f" ({appended})"), root
        return name, None


def require_one_corpus(folders: Sequence[RunFolder]) -> None:
    """Check that all artifacts of ``folders`` are of one corpus, that in 1-corpus if it exists.

    A base run on ``--data-path`` has no corpus to compare. A mixture may leave out domains of the
    corpus in 1-corpus, but not have others.

    Raises:
        UserError: naming the first artifact of another corpus.
    """
    first: tuple[Path, str] | None = None
    for folder in folders:
        for place, corpus_hash in _corpus_hashes(folder):
            first = first or (place, corpus_hash)
            if corpus_hash != first[1]:
                raise UserError(
                    f"{place} is of another corpus (hash {corpus_hash[:12]}) than {first[0]} "
                    f"(hash {first[1][:12]}), and figures of different corpora cannot be "
                    "compared; move it to a run folder of its corpus, or report it separately"
                )
        known = folder.corpus.domains if folder.corpus else {}
        for name, mixture in folder.mixtures.items():
            others = [domain for domain in mixture.weights if domain not in known]
            if others and folder.corpus:
                more = f" and {len(others) - MOST_LISTED} more" if len(others) > MOST_LISTED else ""
                raise UserError(
                    f"{folder.place('mixtures', name)} has weights for domains that the corpus in "
                    f"{folder.root / CORPUS} does not have: {', '.join(others[:MOST_LISTED])}"
                    f"{more}; compute it with --corpus {folder.root / CORPUS}, or move the file to "
                    "a run folder of its corpus"
                )


def _corpus_hashes(folder: RunFolder) -> Iterator[tuple[Path, str]]:
    """Path and corpus hash of every artifact that records one, the corpus first."""
    if folder.corpus is not None:
        yield folder.root / CORPUS, folder.corpus.hash
    for name, result in folder.evaluations.items():
        yield folder.root / EVALUATION / f"{name}.json", result.corpus_hash
    for run in folder.base_runs.values():
        data = run.provenance.options.get("data")
        by_path = isinstance(data, dict) and data.get("data_path") is not None
        if not by_path and "corpus" in run.provenance.inputs:
            yield run.root, run.provenance.inputs["corpus"]
    if folder.sweep is not None and "corpus" in folder.sweep.provenance.inputs:
        yield folder.sweep.root / folder.sweep.FILE_NAME, folder.sweep.provenance.inputs["corpus"]


def merge(folders: Sequence[RunFolder]) -> RunFolder:
    """Merge ``folders`` into one run folder; a single folder is returned as it is.

    Different artifacts of the same name get their folder's name appended, as in ``uniform-seed0
    (run-b)``; a base run and its results alike. Identical artifacts, linked or copied, are listed
    and counted once. ``root`` is that of the first folder.

    Args:
        folders: at least one.

    Raises:
        UserError: if they are not on one corpus, or hold different sweeps.
    """
    by_place: dict[Path, RunFolder] = {}
    for folder in folders:
        by_place.setdefault(folder.root.resolve(), folder)
    distinct = list(by_place.values())
    if len(distinct) == 1:
        return distinct[0]
    require_one_corpus(distinct)
    appended = _distinct_endings([folder.root for folder in distinct])
    found: dict[str, dict[str, Any]] = {field: {} for field in _PREFIXES}
    mixture_files: dict[str, Path] = {}
    copies: dict[Path, str] = {}
    uncounted: set[str] = set()
    for family in _FAMILIES:
        colliding = _colliding(distinct, family)
        sources = [
            (field, folder, ending)
            for field in family
            for folder, ending in zip(distinct, appended, strict=True)
        ]
        for field, folder, ending in sources:
            for name, artifact in getattr(folder, field).items():
                stem, new, known = _stem(folder, field, name), name, found[field]
                if stem in colliding:
                    separator = "/" if stem == EMBEDDINGS else " "
                    new = f"{stem}{separator}({ending}){name.removeprefix(stem)}"
                same = next((n for n, other in known.items() if _is_same(artifact, other)), None)
                if same is not None:
                    place = folder.place(field, name).resolve()
                    copies.setdefault(place, f"{_PREFIXES[field]}{same}")
                if same == new:
                    continue
                if same is not None:
                    uncounted.add(f"{_PREFIXES[field]}{new}")
                known[new] = artifact
                if field == "mixtures":
                    mixture_files[new] = folder.place(field, name)
    return RunFolder(
        root=distinct[0].root,
        corpus=next((folder.corpus for folder in distinct if folder.corpus is not None), None),
        sweep=_only_sweep(distinct),
        merged=Merged(
            dict(zip((folder.root for folder in distinct), appended, strict=True)),
            mixture_files,
            copies,
            frozenset(uncounted),
        ),
        **{field: dict(sorted(artifacts.items())) for field, artifacts in found.items()},
    )


def _colliding(folders: Sequence[RunFolder], family: Sequence[str]) -> set[str]:
    """Names under which two folders have different artifacts of one of these fields."""
    first: dict[tuple[str, str], Any] = {}
    return {
        _stem(folder, field, name)
        for folder in folders
        for field in family
        for name, artifact in getattr(folder, field).items()
        if not _is_same(first.setdefault((field, name), artifact), artifact)
    }


def _stem(folder: RunFolder, field: str, name: str) -> str:
    """Name of the base run that a downstream result is named after; otherwise ``name``."""
    run = name.removesuffix(DOWNSTREAM_SUFFIX)
    is_of_run = run in folder.base_runs or run in folder.evaluations
    return run if field == "downstream" and is_of_run else name


def _is_same(one: Any, other: Any) -> bool:
    """Whether two records are equal apart from their paths."""

    def without_root(record: Any) -> Any:
        return dataclasses.replace(record, root=Path()) if hasattr(record, "root") else record

    return bool(without_root(one) == without_root(other))


def _distinct_endings(roots: Sequence[Path]) -> list[str]:
    """The shortest endings of the paths, in whole names, that are distinct."""
    parts = [root.resolve().parts for root in roots]
    for depth in range(1, max(map(len, parts))):
        ends = ["/".join(names[-depth:]) for names in parts]
        if max(Counter(ends).values()) == 1:
            return ends
    return [str(root.resolve()) for root in roots]


def _only_sweep(folders: Sequence[RunFolder]) -> Sweep | None:
    swept = [folder for folder in folders if folder.sweep is not None]
    for folder in swept[1:]:
        if not _is_same(folder.sweep, swept[0].sweep):
            raise UserError(
                f"{swept[0].root} and {folder.root} hold different sweeps, and a report shows one; "
                "leave out one of the folders, or report them separately"
            )
    return swept[0].sweep if swept else None


def _training_runs(stage: Path) -> dict[str, TrainingRun]:
    return {p.name: TrainingRun.load(p) for p in _folders(stage) if TrainingRun.exists(p)}


def _folders(stage: Path) -> list[Path]:
    return sorted(path for path in stage.iterdir() if path.is_dir()) if stage.is_dir() else []


def _json_files(stage: Path) -> list[Path]:
    return sorted(path for path in stage.glob("*.json") if path.is_file())


def same_weights(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Whether weights are equal up to rounding; a missing domain has weight 0."""
    names = {*first, *second}
    return all(abs(first.get(n, 0.0) - second.get(n, 0.0)) <= SAME_WEIGHT for n in names)


def first_uniform(folder: RunFolder, names: Iterable[str]) -> str | None:
    """The first of ``names`` that is a base run with uniform weights."""
    runs = folder.base_runs
    uniform = (n for n in names if n in runs and runs[n].mixture_method == BASELINE_METHOD)
    return next(uniform, None)


def uniform_first(runs: Mapping[str, TrainingRun]) -> list[str]:
    """Names of ``runs``, uniform ones first, so that a run keeps its colour throughout."""
    return sorted(runs, key=lambda name: runs[name].mixture_method != BASELINE_METHOD)


def run_labels(runs: Mapping[str, TrainingRun], names: Iterable[str]) -> dict[str, str]:
    """Name -> label in tables and legends: the method if no other shown run has it, or the name.

    Labels are unique, and none is the name of another run.
    """
    names = list(names)
    methods = {name: runs[name].mixture_method for name in names if name in runs}
    count, known = Counter(methods.values()), dict(METHOD_LABELS)
    if count["chameleon-finetune"]:  # "Chameleon" alone would be ambiguous
        known["chameleon-pretrain"] = "Chameleon (pretraining)"
    labels = {
        name: known[method]
        for name, method in methods.items()
        if method in known and count[method] == 1 and known[method] not in runs
    }
    return unique_labels({name: labels.get(name, name) for name in names})
