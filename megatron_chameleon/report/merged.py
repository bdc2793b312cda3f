"""Several run folders on one corpus, as one for the report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Corpus, Sweep
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.downstream_comparison import SUFFIX
from megatron_chameleon.report.own_corpus import (
    corpus_of_run,
    corpus_of_sweep,
    require_own_corpus,
)
from megatron_chameleon.report.run_folder import (
    BASE,
    CORPUS,
    EMBEDDINGS,
    EVALUATION,
    MIXTURE,
    PROXY,
    Merged,
    RunFolder,
)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """One of the dictionaries of a run folder.

    Attributes:
        field: its name.
        stage: what the ledger puts before a name in it.
    """

    field: str
    stage: str

    def of(self, folder: RunFolder) -> dict[str, Any]:
        """Name -> artifact."""
        found: dict[str, Any] = getattr(folder, self.field)
        return found


_PROXIES = _Kind("proxies", f"{PROXY}/")
_EMBEDDINGS = _Kind("embeddings", "")
_MIXTURES = _Kind("mixtures", f"{MIXTURE}/")
_RUNS = _Kind("base_runs", f"{BASE}/")
_EVALUATIONS = _Kind("evaluations", f"{EVALUATION}/")
_DOWNSTREAM = _Kind("downstream", f"{EVALUATION}/")
# Kinds whose artifacts belong together by their names, and keep doing so when they are renamed.
_FAMILIES = ((_PROXIES,), (_EMBEDDINGS,), (_MIXTURES,), (_RUNS, _EVALUATIONS, _DOWNSTREAM))


def merge(folders: Sequence[RunFolder]) -> RunFolder:
    """All that lies in ``folders``, as one run folder; one alone is given back as it is.

    What has the same name in several folders, and is not the same, gets the name of its folder
    appended: ``uniform-seed0 (run-b)``; a base run and its evaluations alike. What is the same in
    several folders, whether linked or copied, is there once and costs once. ``root`` is that of the
    first folder.

    Args:
        folders: at least one; those that are the same folder count once.

    Raises:
        UserError: if they are not all on one corpus, or if several hold a sweep.
    """
    by_place = {folder.root.resolve(): folder for folder in reversed(folders)}
    distinct = list(reversed(by_place.values()))
    if len(distinct) == 1:
        return distinct[0]
    for folder in distinct:
        require_own_corpus(folder)
    _require_one_corpus(distinct)
    collected = _Collected(distinct, _appended([folder.root for folder in distinct]))
    for family in _FAMILIES:
        collected.add(family)
    return RunFolder(
        root=distinct[0].root,
        corpus=_first_corpus(distinct),
        sweep=_only_sweep(distinct),
        merged=collected.merged(),
        **{field: dict(sorted(found.items())) for field, found in collected.found.items()},
    )


class _Collected:
    """The artifacts of all folders under their new names, and which are copies of which.

    Args:
        folders: all of them.
        appended: what is appended to the names of each, where they collide.
    """

    def __init__(self, folders: Sequence[RunFolder], appended: Sequence[str]) -> None:
        self.folders, self.appended = folders, appended
        self.found: dict[str, dict[str, Any]] = {}
        self.mixture_files: dict[str, Path] = {}
        self.copies: dict[Path, str] = {}
        self.uncounted: set[str] = set()

    def add(self, family: Sequence[_Kind]) -> None:
        """Take in all artifacts of these kinds."""
        colliding = _colliding(self.folders, family)
        for kind in family:
            found = self.found.setdefault(kind.field, {})
            for folder, appended in zip(self.folders, self.appended, strict=True):
                for name, artifact in kind.of(folder).items():
                    stem = _stem(folder, kind, name)
                    new = _renamed(name, stem, appended) if stem in colliding else name
                    self._add(kind, found, new, artifact, _place(folder, kind, name))

    def merged(self) -> Merged:
        """How the folders became one."""
        roots = (folder.root for folder in self.folders)
        return Merged(
            roots=dict(zip(roots, self.appended, strict=True)),
            mixture_files=self.mixture_files,
            copies=self.copies,
            uncounted=frozenset(self.uncounted),
        )

    def _add(
        self, kind: _Kind, found: dict[str, Any], name: str, artifact: Any, place: Path
    ) -> None:
        same = next((other for other, there in found.items() if _is_same(artifact, there)), None)
        if same is not None:
            self.copies.setdefault(place.resolve(), f"{kind.stage}{same}")
        if same == name:
            return
        if same is not None:
            self.uncounted.add(f"{kind.stage}{name}")
        found[name] = artifact
        if kind is _MIXTURES:
            self.mixture_files[name] = place


def _colliding(folders: Sequence[RunFolder], family: Sequence[_Kind]) -> set[str]:
    """The names under which two folders have different artifacts of one of these kinds."""
    there: dict[tuple[str, str], Any] = {}
    colliding = set()
    for folder in folders:
        for kind in family:
            for name, artifact in kind.of(folder).items():
                first = there.setdefault((kind.field, name), artifact)
                if not _is_same(first, artifact):
                    colliding.add(_stem(folder, kind, name))
    return colliding


def _stem(folder: RunFolder, kind: _Kind, name: str) -> str:
    """The name of the base run that a downstream result is called after; otherwise its own."""
    if kind is not _DOWNSTREAM:
        return name
    run = name.removesuffix(SUFFIX)
    return run if run in folder.base_runs or run in folder.evaluations else name


def _renamed(name: str, stem: str, appended: str) -> str:
    """``stem`` with the folder's name behind it; a stage by itself gets it as a folder below."""
    between = "/" if stem == EMBEDDINGS else " "
    return f"{stem}{between}({appended}){name.removeprefix(stem)}"


def _is_same(one: Any, other: Any) -> bool:
    """Whether two records say the same, wherever they lie: they are one, linked or copied."""
    return bool(_without_root(one) == _without_root(other))


def _without_root(record: Any) -> Any:
    return dataclasses.replace(record, root=Path()) if hasattr(record, "root") else record


def _place(folder: RunFolder, kind: _Kind, name: str) -> Path:
    artifact = kind.of(folder)[name]
    if kind is _MIXTURES:
        return folder.mixture_file(name)
    root: Path | None = getattr(artifact, "root", None)
    return folder.root / EVALUATION / f"{name}.json" if root is None else root


def _appended(roots: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths, of whole names, that tell the folders apart."""
    parts = [root.resolve().parts for root in roots]
    for depth in range(1, max(map(len, parts))):
        ends = ["/".join(names[-depth:]) for names in parts]
        if max(Counter(ends).values()) == 1:
            return ends
    return [str(root.resolve()) for root in roots]


def _require_one_corpus(folders: Sequence[RunFolder]) -> None:
    """Refuse artifacts of different corpora, naming the first two.

    Raises:
        UserError: if there are any.
    """
    first: tuple[Path, str] | None = None
    for folder in folders:
        for place, corpus_hash in _corpus_hashes(folder):
            first = first or (place, corpus_hash)
            if corpus_hash != first[1]:
                raise UserError(
                    f"{place} is of another corpus (hash {corpus_hash[:12]}) than {first[0]} "
                    f"(hash {first[1][:12]}): figures of different corpora cannot be compared; "
                    "give run folders of one corpus together, and report the others by themselves"
                )


def _corpus_hashes(folder: RunFolder) -> Iterator[tuple[Path, str]]:
    """Whatever says which corpus it is of: its place, and the hash."""
    if folder.corpus is not None:
        yield folder.root / CORPUS, folder.corpus.hash
    for name, result in folder.evaluations.items():
        yield folder.root / EVALUATION / f"{name}.json", result.corpus_hash
    for run in folder.base_runs.values():
        corpus_hash = corpus_of_run(run)
        if corpus_hash is not None:
            yield run.root, corpus_hash
    swept = None if folder.sweep is None else corpus_of_sweep(folder.sweep)
    if folder.sweep is not None and swept is not None:
        yield folder.sweep.root / folder.sweep.FILE_NAME, swept


def _first_corpus(folders: Sequence[RunFolder]) -> Corpus | None:
    """All are the same; the cost of another preprocessing of the same text is not counted."""
    return next((folder.corpus for folder in folders if folder.corpus is not None), None)


def _only_sweep(folders: Sequence[RunFolder]) -> Sweep | None:
    """The sweep of the one folder that has one, or of those that have the same.

    Raises:
        UserError: if two have different ones.
    """
    swept = [folder for folder in folders if folder.sweep is not None]
    for folder in swept[1:]:
        if not _is_same(folder.sweep, swept[0].sweep):
            raise UserError(
                f"{swept[0].root} and {folder.root} both hold a sweep, and a report shows one; "
                "leave one of the folders out, or report them one by one"
            )
    return swept[0].sweep if swept else None
