"""From what ``--input`` was given to the list of sources to read."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

from megatron_chameleon.artifacts import Split
from megatron_chameleon.corpus.reading.domain_names import (
    MAX_DOMAIN_BYTES,
    DomainNames,
    describe_left_out,
    is_domain_name,
)
from megatron_chameleon.corpus.reading.hub_datasets import (
    DatasetName,
    DatasetPart,
    find_parts,
    is_dataset,
)
from megatron_chameleon.corpus.reading.input_files import files_behind, kind_of_file
from megatron_chameleon.corpus.reading.lines import is_compressed
from megatron_chameleon.corpus.reading.opening import is_remote, size_and_time
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.source import DomainOptions, SourceOptions

SourceKind = Literal["lines", "parquet", "dataset"]


@dataclasses.dataclass(frozen=True)
class Source:
    """One file, or one shard of a data set, that documents are read from.

    Attributes:
        name: what messages call it; no two of a list have the same.
        kind: how it is read: "lines" of JSON, "parquet", or a "dataset" that only the library of
            that name reads.
        path: of the file on this machine, its address on the hub, or the name of the data set.
        domain: of all its documents, or None where each tells its own, or none is asked for.
        split: to which all of it belongs, or None where the text decides.
        bytes: on disk; 0 where nobody knows.
        modified_ns: when it was last changed, in nanoseconds since 1970; 0 where nobody knows.
        cuttable: whether pieces of it can be read: bytes of plain lines, row groups of parquet.
        dataset: of which data set it is a part, with revision, config and split; None of none.
        shard: of a "dataset", which of ``num_shards``.
        num_shards: of a "dataset".
    """

    name: str
    kind: SourceKind
    path: str
    domain: str | None = None
    split: Split | None = None
    bytes: int = 0
    modified_ns: int = 0
    cuttable: bool = False
    dataset: str | None = None
    shard: int = 0
    num_shards: int = 1


def find_sources(options: SourceOptions, domains: DomainOptions | None = None) -> list[Source]:
    """The sources behind ``options.input`` and, with ``domains``, the held-out inputs, in order.

    Folders are searched at any depth, for .jsonl, .jsonl.gz, .jsonl.zst and .parquet. What is
    named twice for the same domain is listed once.

    Args:
        options: what to read.
        domains: how domains and splits are told; None where none are asked for: of data sets by
            name only what is for training is listed then.

    Raises:
        UserError: for an input that leads to nothing that can be read, for domains that nobody
            tells, and for options that contradict each other or have no use.
    """
    if not options.inputs:
        raise UserError("--input names nothing to read; give files, folders or globs")
    finder = _Finder(None if domains is None else DomainNames(domains))
    finder.add("--input", options.inputs, None)
    if domains is None:
        return _named([source for source in finder.found if source.split in (None, "train")])
    finder.add("--valid-input", domains.valid_inputs, "valid")
    finder.add("--test-input", domains.test_inputs, "test")
    finder.check()
    return _named(_with_own_splits(finder.found))


def check_unchanged(source: Source) -> None:
    """Tell by size and time of change whether ``source`` is what it was when it was found.

    Files on the hub are: their addresses hold the revision.

    Raises:
        UserError: if it is not, or is gone.
    """
    if source.kind == "dataset" or is_remote(source.path):
        return
    size, modified_ns = size_and_time(source.path)
    if size != source.bytes:
        raise UserError(
            f"{source.name} has changed while it was read: it had {source.bytes} bytes and has "
            f"{size} now; restore it and run the same command again"
        )
    if modified_ns != source.modified_ns:
        raise UserError(
            f"{source.name} was written to while it was read; run the same command again when "
            "that is over"
        )


class _Finder:
    """Gathers the sources of all inputs; without ``names`` no domains are asked for.

    Attributes:
        found: so far.
    """

    def __init__(self, names: DomainNames | None) -> None:
        self.found: list[Source] = []
        self._names = names
        self._any_tells_its_own = False
        self._left_out: Counter[str] = Counter()

    def add(self, flag: str, inputs: Iterable[str], split: Split | None) -> None:
        """Find the sources of ``inputs``, all for ``split`` if it is given."""
        for given in inputs:
            domain, pattern = _split_input(given, flag)
            sources = list(_sources_at(pattern, flag, split))
            if domain is None and self._names is not None:
                self._any_tells_its_own = True
                self.found += self._with_domains(sources, self._names, flag)
            else:
                self.found += [dataclasses.replace(source, domain=domain) for source in sources]

    def check(self) -> None:
        """Refuse a way to tell domains that nothing uses, and say what was left out."""
        assert self._names is not None, "only where domains are asked for"
        if self._names.way is not None and not self._any_tells_its_own:
            raise UserError(
                f"{self._names.way} has no use here: every --input names its domain; leave out "
                "one or the other"
            )
        if self._left_out:
            warnings.warn(describe_left_out(self._left_out, "files"), stacklevel=4)
        unused = self._names.describe_unused(self._names.renamed)
        if unused and self._names.key is None:  # of a key it is known when all was read
            warnings.warn(unused, stacklevel=4)
        if not self.found:
            raise UserError("--rename-domain leaves out all that --input names; correct it")

    def _with_domains(
        self, sources: Iterable[Source], names: DomainNames, flag: str
    ) -> Iterator[Source]:
        for source in sources:
            name = _config(source) if names.from_config else names.in_path(source.path)
            if name is None and names.key is None:
                raise UserError(
                    f"{flag} {source.path}: of which domain? Give it as NAME={source.path}, or "
                    "--domain-key for a key in its lines"
                )
            domain = None if name is None else names.final(name)
            if name is not None and domain is None:
                self._left_out[name] += 1
            else:
                yield dataclasses.replace(source, domain=domain)


def _split_input(given: str, flag: str) -> tuple[str | None, str]:
    """NAME=PATH in two; a path may hold '=' itself, after its first '/'."""
    name, equals, pattern = given.partition("=")
    if not equals or "/" in name or is_dataset(name):
        return None, given
    if not is_domain_name(name) or not pattern:
        raise UserError(
            f"{flag} {given}: a domain is given as NAME=PATH, NAME of at most "
            f"{MAX_DOMAIN_BYTES} bytes"
        )
    return name, pattern


def _sources_at(pattern: str, flag: str, split: Split | None) -> Iterator[Source]:
    """What lies there, without domain; a data set gives only its own ``split`` if one is given."""
    if not is_dataset(pattern):
        for path in files_behind(pattern, flag):
            yield _file_source(str(path), split)
        return
    parts = [part for part in find_parts(pattern) if split is None or part.split in (None, split)]
    if not parts:
        raise UserError(f"{flag} {pattern}: it has no split for that; name one as {pattern}#SPLIT")
    for part in parts:
        yield _part_source(part, split or part.split)


def _part_source(part: DatasetPart, split: Split | None) -> Source:
    name = str(part.dataset)
    if part.file is not None:
        return dataclasses.replace(_file_source(part.file, split), dataset=name)
    return Source(
        name=f"{name} ({part.shard + 1} of {part.num_shards})",
        kind="dataset",
        path=name,
        split=split,
        dataset=name,
        shard=part.shard,
        num_shards=part.num_shards,
    )


def _file_source(path: str, split: Split | None) -> Source:
    kind = kind_of_file(path)
    assert kind is not None, f"{path} is of no known format; it should not have been found"
    size, modified_ns = size_and_time(path)
    cuttable = kind == "parquet" or not is_compressed(path)
    return Source(path, kind, path, None, split, size, modified_ns, cuttable)


def _config(source: Source) -> str | None:
    return None if source.dataset is None else DatasetName.parse(source.dataset).config


def _with_own_splits(sources: list[Source]) -> list[Source]:
    """What is given for training goes there whole where its domain has valid and test of its own.

    Where domains are told by a key, that they have is assumed of all.
    """
    own: defaultdict[str | None, set[Split]] = defaultdict(set)
    for source in sources:
        if source.split is not None:
            own[source.domain].add(source.split)
    return [
        dataclasses.replace(source, split=_split_of(source, own[source.domain]))
        for source in sources
    ]


def _split_of(source: Source, own: set[Split]) -> Split | None:
    if source.split not in (None, "train"):
        return source.split
    return "train" if {"valid", "test"} <= own else None


def _named(sources: list[Source]) -> list[Source]:
    """The sources without repetitions, each under a name of its own.

    Raises:
        UserError: for a source that is given for two splits.
    """
    splits: dict[tuple[str, int, str | None], Split | None] = {}
    found = []
    for source in sources:
        place = (source.path, source.shard, source.domain)
        if place not in splits:
            splits[place] = source.split
            found.append(source)
        elif splits[place] != source.split:
            raise UserError(
                f"{source.path} is given for {splits[place] or 'no split'} and for "
                f"{source.split or 'no split'}; leave one of them out"
            )
    times = Counter(source.name for source in found)
    return [
        dataclasses.replace(source, name=f"{source.domain or ''}={source.name}")
        if times[source.name] > 1
        else source
        for source in found
    ]
