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
from megatron_chameleon.artifacts.mixture import BRIDGE_SUFFIX
from megatron_chameleon.artifacts.record import kind_of
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.report.tables import METHOD_LABELS, unique_labels

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
# Field of RunFolder -> prefix of the names of its artifacts in the cost ledger.
_PREFIXES = {
    "proxies": f"{PROXY}/",
    "embeddings": "",
    "mixtures": f"{MIXTURE}/",
    "base_runs": f"{BASE}/",
    "evaluations": f"{EVALUATION}/",
    "downstream": f"{EVALUATION}/",
}
BASELINE_METHOD = "uniform"
# The weights of a run and those of its mixture file may differ by rounding.
SAME_WEIGHT = 1e-9


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The artifacts of a run folder; a stage that has not been run is None or empty.

    Each dictionary is sorted by name: the folder's name for training runs, the file's stem for
    mixtures and results. A base run and its evaluation have the same name. The key of an embedding
    store is its path below ``root``: ``3-embeddings``, or a folder in it or in ``4-mixture``.

    Attributes:
        paths: key in the ledger, like ``5-base/name`` -> path of the artifact.
        copies: path of an unlisted artifact -> key of the identical artifact that is listed.
        roots: merged folder -> suffix that is appended to its artifacts' names where they collide.
    """

    root: Path
    corpus: Corpus | None
    proxies: dict[str, TrainingRun]
    embeddings: dict[str, EmbeddingStore]
    mixtures: dict[str, Mixture]
    base_runs: dict[str, TrainingRun]
    evaluations: dict[str, EvaluationResult]
    downstream: dict[str, DownstreamResult]
    sweep: Sweep | None
    paths: Mapping[str, Path]
    roots: Mapping[Path, str]
    copies: Mapping[Path, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, root: Path) -> RunFolder:
        """Read every artifact below ``root``.

        Raises:
            UserError: if ``root`` is not a run folder, or an artifact in it is damaged.
        """
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; pass a folder with {CORPUS} to {EVALUATION}")

        def inside(stage: str, suffix: str = "") -> list[Path]:
            """The folders of a stage, or its files with ``suffix``."""
            found = sorted((root / stage).iterdir()) if (root / stage).is_dir() else []
            if suffix:
                return [path for path in found if path.suffix == suffix and path.is_file()]
            return [path for path in found if path.is_dir()]

        results = inside(EVALUATION, ".json")
        downstream = [path for path in results if kind_of(path) == DownstreamResult.KIND]
        folders = (root / EMBEDDINGS, *inside(EMBEDDINGS), *inside(MIXTURE))
        mixtures = inside(MIXTURE, ".json")
        mixtures = [path for path in mixtures if not path.name.endswith(BRIDGE_SUFFIX)]
        stores = [path for path in folders if EmbeddingStore.exists(path)]
        # Field -> kind of its artifacts, and their paths by name.
        stages: dict[str, tuple[Any, dict[str, Path]]] = {
            "proxies": (TrainingRun, {p.name: p for p in inside(PROXY) if TrainingRun.exists(p)}),
            "embeddings": (EmbeddingStore, {p.relative_to(root).as_posix(): p for p in stores}),
            "mixtures": (Mixture, {p.stem: p for p in mixtures}),
            "base_runs": (TrainingRun, {p.name: p for p in inside(BASE) if TrainingRun.exists(p)}),
            "evaluations": (EvaluationResult, {p.stem: p for p in results if p not in downstream}),
            "downstream": (DownstreamResult, {p.stem: p for p in downstream}),
        }
        artifacts, paths = dict[str, Any](), dict[str, Path]()
        for field, (kind, found) in stages.items():
            given = {"may_change": True} if kind is Mixture else {}
            artifacts[field] = {name: kind.load(path, **given) for name, path in found.items()}
            paths |= {f"{_PREFIXES[field]}{name}": path for name, path in found.items()}
        has_corpus = (root / CORPUS / "corpus.json").is_file()
        folder = cls(
            root,
            corpus=Corpus.load(root / CORPUS) if has_corpus else None,
            sweep=Sweep.load(root) if Sweep.exists(root) else None,
            paths=paths,
            roots={root: ""},
            **artifacts,
        )
        if not folder.artifacts:
            raise UserError(
                f"{root} holds no artifact of any stage; pass a folder with {', '.join(STAGES)}"
            )
        return folder

    @functools.cached_property
    def artifacts(self) -> dict[str, Any]:
        """Key in the ledger, like ``5-base/name`` -> artifact, in stage order."""
        found: dict[str, Any] = {} if self.corpus is None else {CORPUS: self.corpus}
        for field, prefix in _PREFIXES.items():
            found |= {f"{prefix}{name}": a for name, a in getattr(self, field).items()}
        return found

    def costs(self) -> dict[str, Cost]:
        """Key -> cost of each artifact; an artifact with links or copies is listed once."""
        return {key: a.cost for key, a in self.artifacts.items() if key not in self.uncounted}

    @functools.cached_property
    def entries(self) -> Mapping[Path, str]:
        """Resolved path of an artifact -> its key; links and copies have the original's key."""
        found: dict[Path, str] = {}
        # Sort link targets before links, so that a link gets the key of its target.
        for key in sorted(self.paths, key=lambda key: self.paths[key].is_symlink()):
            copied = (
                other
                for other in found.values()
                if self.paths[other].name == self.paths[key].name
                and _is_same(self.artifacts[other], self.artifacts[key])
            )
            found.setdefault(self.paths[key].resolve(), next(copied, key))
        return found | {p: found[self.paths[key].resolve()] for p, key in self.copies.items()}

    @functools.cached_property
    def uncounted(self) -> frozenset[str]:
        """Keys of artifacts that link to or copy other artifacts; their costs are not counted."""
        return frozenset(k for k, path in self.paths.items() if self.entries[path.resolve()] != k)


def require_one_corpus(folders: Sequence[RunFolder]) -> None:
    """Check that all artifacts of ``folders`` use the same corpus: 1-corpus, if it exists.

    A base run on ``--data-path`` has no corpus to compare. A mixture may leave out domains of
    1-corpus, but must not have additional domains.

    Raises:
        UserError: if they do not; the message names the first artifact of another corpus.
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
                raise UserError(
                    f"{folder.paths[f'{MIXTURE}/{name}']} has weights for domains that the corpus "
                    f"in {folder.root / CORPUS} does not have: {format_names(others)}; "
                    f"compute it with --corpus {folder.root / CORPUS}, or move the file to a run "
                    "folder of its corpus"
                )


def _corpus_hashes(folder: RunFolder) -> Iterator[tuple[Path, str]]:
    """Path and corpus hash of every artifact that records a corpus hash, the corpus first."""
    if folder.corpus is not None:
        yield folder.root / CORPUS, folder.corpus.hash
    for name, result in folder.evaluations.items():
        yield folder.paths[f"{EVALUATION}/{name}"], result.corpus_hash
    for run in folder.base_runs.values():
        data = run.provenance.options.get("data")
        by_path = isinstance(data, dict) and any(
            data.get(name) is not None for name in ("data_path", "data_args_path")
        )
        if not by_path and "corpus" in run.provenance.inputs:
            yield run.root, run.provenance.inputs["corpus"]
    if folder.sweep is not None and "corpus" in folder.sweep.provenance.inputs:
        yield folder.sweep.root / folder.sweep.FILE_NAME, folder.sweep.provenance.inputs["corpus"]


def merge(folders: Sequence[RunFolder]) -> RunFolder:
    """Merge ``folders`` into one run folder; a single folder is returned unchanged.

    If different artifacts have the same name, each gets its folder's name appended, as in
    ``uniform-seed0 (run-b)``; a base run and its results are renamed together. Artifacts that are
    identical and not renamed are listed once. ``root`` is the first folder's.

    Args:
        folders: at least one, with distinct roots.

    Raises:
        UserError: if they use different corpora, or have different sweeps.
    """
    first, *others = folders
    if not others:
        return first
    require_one_corpus(folders)
    swept = [folder for folder in folders if folder.sweep is not None]
    for folder in swept[1:]:
        if not _is_same(folder.sweep, swept[0].sweep):
            raise UserError(
                f"{swept[0].root} and {folder.root} hold different sweeps, and a report shows one; "
                "leave out one of the folders, or report them separately"
            )
    roots = dict(zip((f.root for f in folders), _distinct_endings(folders), strict=True))
    found: dict[str, dict[str, Any]] = {field: {} for field in _PREFIXES}
    paths: dict[str, Path] = {}
    copies: dict[Path, str] = {}
    sources = [
        (field, folder, name, artifact)
        for field in _PREFIXES
        for folder in folders
        for name, artifact in getattr(folder, field).items()
    ]
    by_name: dict[tuple[str, str], Any] = {}
    # Rename a run and its results together, but not a mixture with the same name.
    family = dict.fromkeys(("base_runs", "evaluations", "downstream"), "runs")
    colliding = {
        (family.get(field, field), _stem(folder, field, name))
        for field, folder, name, artifact in sources
        if not _is_same(by_name.setdefault((field, name), artifact), artifact)
    }
    for field, folder, name, artifact in sources:
        stem, new, path = _stem(folder, field, name), name, folder.paths[_PREFIXES[field] + name]
        if (family.get(field, field), stem) in colliding:
            separator = "/" if stem == EMBEDDINGS else " "
            new = f"{stem}{separator}({roots[folder.root]}){name.removeprefix(stem)}"
        if new in found[field]:
            copies.setdefault(path.resolve(), f"{_PREFIXES[field]}{new}")
        else:
            found[field][new], paths[f"{_PREFIXES[field]}{new}"] = artifact, path
    return RunFolder(
        first.root,
        corpus=next((folder.corpus for folder in folders if folder.corpus is not None), None),
        sweep=swept[0].sweep if swept else None,
        paths=paths,
        roots=roots,
        copies=copies,
        **{field: dict(sorted(artifacts.items())) for field, artifacts in found.items()},
    )


def _stem(folder: RunFolder, field: str, name: str) -> str:
    """Name of the base run that a downstream result is named after; otherwise ``name``."""
    run = name.removesuffix(DOWNSTREAM_SUFFIX)
    is_of_run = run in folder.base_runs or run in folder.evaluations
    return run if field == "downstream" and is_of_run else name


def _is_same(one: Any, other: Any) -> bool:
    """Whether two records are equal apart from their paths."""
    if hasattr(one, "root") and hasattr(other, "root"):
        one = dataclasses.replace(one, root=other.root)
    return bool(one == other)


def _distinct_endings(folders: Sequence[RunFolder]) -> list[str]:
    """Shortest distinct endings of the folders' paths, in whole path components."""
    parts = [folder.root.resolve().parts for folder in folders]
    depth = 1
    while len({names[-depth:] for names in parts}) < len(parts):
        depth += 1
    return ["/".join(names[-depth:]) for names in parts]


def same_weights(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    """Whether weights are equal up to rounding; a missing domain has weight 0."""
    names = {*first, *second}
    return all(abs(first.get(n, 0.0) - second.get(n, 0.0)) <= SAME_WEIGHT for n in names)


def first_uniform(folder: RunFolder, names: Iterable[str]) -> str | None:
    """The first of ``names`` that is a base run with uniform weights; None if none is."""
    runs = folder.base_runs
    uniform = (n for n in names if n in runs and runs[n].mixture_method == BASELINE_METHOD)
    return next(uniform, None)


def distinct_runs(folder: RunFolder, runs: Mapping[str, TrainingRun]) -> list[str]:
    """Names of ``runs`` in ``folder`` without links and copies; uniform runs come first."""
    originals_first = sorted(runs, key=lambda name: (runs[name].root.is_symlink(), name))
    names = {folder.entries[runs[n].root.resolve()]: n for n in reversed(originals_first)}
    return sorted(names.values(), key=lambda n: (runs[n].mixture_method != BASELINE_METHOD, n))


def run_labels(runs: Mapping[str, TrainingRun], names: Iterable[str]) -> dict[str, str]:
    """Label each run in tables and legends by its method; by its name if the method is not unique.

    Labels are unique, and none is the name of another run.
    """
    names = list(names)
    methods = {name: runs[name].mixture_method for name in names if name in runs}
    count, known = Counter(methods.values()), dict(METHOD_LABELS)
    if not count["chameleon-finetune"]:  # otherwise the label "Chameleon" would be ambiguous
        known["chameleon-pretrain"] = "Chameleon"
    labels = {
        name: known[method]
        for name, method in methods.items()
        if method in known and count[method] == 1 and known[method] not in runs
    }
    return unique_labels({name: labels.get(name, name) for name in names})
