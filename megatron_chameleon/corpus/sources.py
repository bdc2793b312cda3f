"""The sources behind ``--input``: files and shards of data sets, with their domains and splits."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

from megatron_chameleon.artifacts import Split
from megatron_chameleon.corpus.hub_datasets import DatasetName, find_parts, is_dataset
from megatron_chameleon.corpus.input_files import (
    find_files,
    is_compressed,
    is_remote,
    kind_of_file,
    size_and_time,
)
from megatron_chameleon.corpus.options import (
    MAX_DOMAIN_BYTES,
    DomainOptions,
    SourceOptions,
    is_domain_name,
)
from megatron_chameleon.corpus.records import DomainNames, describe_left_out, describe_unused
from megatron_chameleon.errors import UserError

SourceKind = Literal["lines", "parquet", "dataset"]


@dataclasses.dataclass(frozen=True)
class Source:
    """One file, or one shard of a data set, that documents are read from.

    Attributes:
        name: its name in messages, unique in a list of sources.
        kind: its format: "lines" of JSON, "parquet", or a "dataset" that only the library of that
            name reads.
        path: of the file on this machine, its address on the hub, or the name of the data set.
        domain: of all its documents; None if each names its own, or domains are not requested.
        split: of all its documents; None if their texts decide.
        bytes: on disk; 0 if unknown.
        modified_ns: modification time, in nanoseconds since 1970; 0 if unknown.
        cuttable: whether a part of it can be read: bytes of plain lines, row groups of parquet.
        dataset: the data set it belongs to, with revision, config and split; None if there is none.
        shard: of a "dataset", number of the shard among ``num_shards``.
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


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a source, or all of it.

    Attributes:
        source: position in the list of sources.
        start: a byte of plain JSON lines, a row group of parquet, otherwise 0.
        stop: start of the next piece, None for the end of the source. A line belongs to the piece
            in which it begins.
        bytes: on disk; 0 if unknown.
    """

    source: int
    start: int = 0
    stop: int | None = None
    bytes: int = 0


def find_sources(options: SourceOptions, domains: DomainOptions | None = None) -> list[Source]:
    """The sources behind ``options.input`` and, with ``domains``, the held-out inputs, in order.

    Folders are searched at any depth for .jsonl, .jsonl.gz, .jsonl.zst and .parquet. A source that
    is named twice for the same domain is listed once.

    Args:
        options: what to read.
        domains: how domains and splits are assigned; None if they are not requested: of data sets
            by name only the training split is listed then.

    Raises:
        UserError: for an input without readable files, a source without a domain, and an option
            without effect.
    """
    if not options.inputs:
        raise UserError("--input is empty; pass files, folders or globs")
    if domains is None:
        found = _unassigned("--input", options.inputs, None)
        given = [dataclasses.replace(source, domain=named) for named, source in found]
        return _named([source for source in given if source.split in (None, "train")])
    sources = [
        *_assigned(domains, "--input", options.inputs, None),
        *_assigned(domains, "--valid-input", domains.valid_inputs, "valid"),
        *_assigned(domains, "--test-input", domains.test_inputs, "test"),
    ]
    if domains.domain_flag is not None and not any(named is None for named, _ in sources):
        raise UserError(
            f"{domains.domain_flag} has no effect: every --input names its domain; leave out one "
            "or the other"
        )
    names, left_out = DomainNames(domains), Counter[str]()
    found_sources = []
    for named, source in sources:
        # source.domain is here what its path or config says, before renaming
        if named is not None:
            found_sources.append(dataclasses.replace(source, domain=named))
        elif source.domain is None:
            found_sources.append(source)
        elif (domain := names.final(source.domain)) is not None:
            found_sources.append(dataclasses.replace(source, domain=domain))
        else:
            left_out[source.domain] += 1
    if left_out:
        warnings.warn(describe_left_out(left_out, "files"), stacklevel=2)
    unused = describe_unused(domains, names.renamed)
    if unused and domains.domain_key is None:  # with a key it is known when all was read
        warnings.warn(unused, stacklevel=2)
    if not found_sources:
        raise UserError("--rename-domain leaves out all of --input; correct it")
    return _named(_with_own_splits(found_sources))


def check_unchanged(source: Source) -> None:
    """Check by size and modification time that ``source`` has not changed since it was found.

    Files on the hub cannot change: their addresses hold the revision.

    Raises:
        UserError: if it has changed, or is gone.
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
            "that is finished"
        )


def _assigned(
    domains: DomainOptions, flag: str, inputs: Iterable[str], split: Split | None
) -> Iterator[tuple[str | None, Source]]:
    """NAME of NAME=PATH or None, and the source with the domain of its path or config."""
    for named, source in _unassigned(flag, inputs, split):
        domain = None
        if named is None:
            domain = _own_domain(domains, source)
            if domain is None and domains.domain_key is None:
                raise UserError(
                    f"{flag} {source.path}: of which domain? Pass NAME={source.path}, or "
                    "--domain-key for a key in its lines"
                )
        yield named, dataclasses.replace(source, domain=domain)


def _own_domain(domains: DomainOptions, source: Source) -> str | None:
    if domains.domain_from_config:
        return None if source.dataset is None else DatasetName.parse(source.dataset).config
    if domains.path_pattern is None:
        return None
    found = domains.path_pattern.search(source.path)
    if not found or not is_domain_name(found[1] or ""):
        raise UserError(
            f"{source.path}: --domain-from-path {domains.domain_from_path} finds no domain; "
            "correct it, or pass this input as NAME=PATH"
        )
    return found[1]


def _unassigned(
    flag: str, inputs: Iterable[str], split: Split | None
) -> Iterator[tuple[str | None, Source]]:
    """NAME of NAME=PATH or None, and each source; all for ``split`` if it is not None."""
    for given in inputs:
        # A path may hold '=' itself, after its first '/'.
        name, equals, pattern = given.partition("=")
        is_named = equals and "/" not in name and not is_dataset(name)
        if is_named and not (is_domain_name(name) and pattern):
            raise UserError(
                f"{flag} {given}: a domain is given as NAME=PATH, NAME of at most "
                f"{MAX_DOMAIN_BYTES} bytes"
            )
        for source in _sources_at(pattern if is_named else given, flag, split):
            yield name if is_named else None, source


def _sources_at(pattern: str, flag: str, split: Split | None) -> Iterator[Source]:
    """The sources of a path, glob or data set; of a data set only ``split``, if it is not None."""
    if not is_dataset(pattern):
        for path in find_files(pattern, flag):
            yield _file_source(str(path), split)
        return
    parts = [part for part in find_parts(pattern) if split is None or part.split in (None, split)]
    if not parts:
        raise UserError(f"{flag} {pattern}: no such split; name one as {pattern}#SPLIT")
    for part in parts:
        name = str(part.dataset)
        if part.file is not None:
            source = _file_source(part.file, split or part.split)
            yield dataclasses.replace(source, dataset=name)
        else:
            yield Source(
                name=f"{name} ({part.shard + 1} of {part.num_shards})",
                kind="dataset",
                path=name,
                split=split or part.split,
                dataset=name,
                shard=part.shard,
                num_shards=part.num_shards,
            )


def _file_source(path: str, split: Split | None) -> Source:
    kind = kind_of_file(path)
    assert kind is not None, f"{path} has an unsupported format; it should not have been found"
    size, modified_ns = size_and_time(path)
    cuttable = kind == "parquet" or not is_compressed(path)
    return Source(path, kind, path, None, split, size, modified_ns, cuttable)


def _with_own_splits(sources: list[Source]) -> list[Source]:
    """Assign all of ``--input`` to train for domains with valid and test sources of their own.

    With a domain key, this is assumed of all domains.
    """
    own: defaultdict[str | None, set[Split]] = defaultdict(set)
    for source in sources:
        if source.split is not None:
            own[source.domain].add(source.split)

    def split_of(source: Source) -> Split | None:
        if source.split not in (None, "train"):
            return source.split
        return "train" if {"valid", "test"} <= own[source.domain] else None

    return [dataclasses.replace(source, split=split_of(source)) for source in sources]


def _named(sources: list[Source]) -> list[Source]:
    """The sources without repetitions, with unique names.

    Raises:
        UserError: for a source of two splits.
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
