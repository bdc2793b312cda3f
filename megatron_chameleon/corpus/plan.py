"""The plan of a preprocessing run: everything that determines the contents of its shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.provenance import package_versions, plain_options
from megatron_chameleon.artifacts.record import FolderRecord
from megatron_chameleon.corpus.options import PreprocessOptions
from megatron_chameleon.corpus.readers import row_group_bytes
from megatron_chameleon.corpus.sources import Piece, Source
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError

# Other releases of these may tokenize differently.
_PACKAGES = ("megatron-chameleon", "tokenizers", "sentencepiece", "tiktoken")
# Compared are the sources that inputs lead to; malformed lines are judged at the end.
_NOT_COMPARED = ("input", "valid_input", "test_input", "max_malformed_share")
# Each has its own folder.
_MAX_SHARDS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Plan(FolderRecord):
    """Sources, their division into shards, and how they are tokenized.

    Attributes:
        options: those that affect the tokens, by name.
        tokenizer: its hash.
        versions: of the packages that make the tokens.
        sources: all sources, with size and modification time.
        shards: the pieces of each shard.
    """

    KIND = "preprocessing plan"
    FILE_NAME = "plan.json"
    FORMAT_VERSION = 1
    MADE_BY = "remove the folder to start from scratch"

    options: dict[str, Any]
    tokenizer: str
    versions: dict[str, str]
    sources: list[Source]
    shards: list[list[Piece]]

    @property
    def hash(self) -> str:
        """Hex SHA-256 of all fields but ``root``."""
        body = dataclasses.asdict(self)
        del body["root"]
        return sha256_of_json(body)

    def shard_bytes(self, number: int) -> int:
        """Bytes on disk that shard ``number`` reads, as far as they are known."""
        return sum(piece.bytes for piece in self.shards[number])

    def difference(self, begun: Plan) -> str | None:
        """One line on how this plan differs from the one in ``begun.root``; None if it does not.

        Modification times are not compared: a file that was copied or touched is still the same.
        """
        problem = next(self._differences(begun), None)
        return problem and f"{problem}, or remove {begun.root} to start from scratch"

    def _differences(self, begun: Plan) -> Iterator[str]:
        when = f"when the work in {begun.root} was started"
        for name in sorted({*self.options, *begun.options}):
            now, then = self.options.get(name), begun.options.get(name)
            if now != then:
                flag = f"--{name.replace('_', '-')}"
                yield f"{flag} is {_shown(now)} and was {_shown(then)} {when}; use the same value"
        if self.tokenizer != begun.tokenizer:
            yield f"--tokenizer-model has changed {when[5:]} (its hash differs); use the same one"
        for package, now in self.versions.items():
            then = begun.versions.get(package)
            if now != then:
                yield f"{package} is {now} and was {then} {when}; use that release"
        before = {source.name: source for source in begun.sources}
        for source in self.sources:
            old = before.pop(source.name, None)
            if old is None:
                yield f"{source.name} was not among the sources {when}; leave it out"
            elif old.bytes != source.bytes:
                yield (
                    f"{source.name} has changed: it holds {source.bytes} bytes and held "
                    f"{old.bytes} {when}; restore it"
                )
            elif dataclasses.replace(old, modified_ns=source.modified_ns) != source:
                yield (
                    f"{source.name} belonged to another domain or split {when}; use the same "
                    "--input"
                )
        for name in before:
            yield f"{name} was among the sources {when} and is not now; restore it"
        if [source.name for source in self.sources] != [source.name for source in begun.sources]:
            yield f"the sources came in another order {when}; restore it"
        if self.shards != begun.shards:  # of the same sources: a parquet file was rewritten
            yield f"row groups of the sources have changed {when[5:]}; restore the files"


def make_plan(options: PreprocessOptions, tokenizer: Tokenizer, sources: Sequence[Source]) -> Plan:
    """The plan for ``options``.

    Raises:
        UserError: if it has too many shards, or a source that has to be divided cannot be read.
    """
    shards_at_least = sum(source.bytes for source in sources) // options.shard_bytes
    if shards_at_least > _MAX_SHARDS:
        raise UserError(
            f"--shard-bytes {options.shard_bytes} makes {shards_at_least} shards; use a larger one"
        )
    compared = {
        **plain_options(options.source),
        **plain_options(options.domains),
        "eod_token": options.eod_token,
        "split": options.split,
        "shard_bytes": options.shard_bytes,
    }
    return Plan(
        root=options.output,
        options={name: value for name, value in compared.items() if name not in _NOT_COMPARED},
        tokenizer=tokenizer.sha256,
        versions=package_versions(_PACKAGES),
        sources=list(sources),
        shards=divide(sources, options.shard_bytes),
    )


def divide(sources: Sequence[Source], target_bytes: int) -> list[list[Piece]]:
    """Divide ``sources`` into shards of at most ``target_bytes`` on disk, where that is possible.

    Large sources are divided where their format allows it, small ones share a shard. The pieces of
    all shards, one after another, are the sources in their order.

    Raises:
        UserError: if a parquet file that has to be divided cannot be read.
    """
    shards: list[list[Piece]] = []
    room = 0
    for number, source in enumerate(sources):
        is_size_unknown = source.kind == "dataset" and source.bytes == 0
        for piece in _pieces(number, source, target_bytes):
            if not shards or piece.bytes > room or is_size_unknown:
                shards.append([])
                room = target_bytes
            shards[-1].append(piece)
            room = -1 if is_size_unknown else room - piece.bytes
    return shards


def _pieces(number: int, source: Source, target_bytes: int) -> Iterator[Piece]:
    if not source.cuttable or source.bytes <= target_bytes:
        yield Piece(number, bytes=source.bytes)
        return
    edges = [(0, 0)]  # start of each piece as in Piece.start, and its byte
    if source.kind == "parquet":
        size = total = 0
        for group, group_bytes in enumerate(row_group_bytes(source.path)):
            if size and size + group_bytes > target_bytes:
                edges.append((group, total))
                size = 0
            size += group_bytes
            total += group_bytes
    else:
        count = -(-source.bytes // target_bytes)
        edges = [(at, at) for at in (source.bytes * i // count for i in range(count))]
    ends = [*edges[1:], (None, source.bytes)]
    for (start, start_byte), (stop, stop_byte) in zip(edges, ends, strict=True):
        yield Piece(number, start, stop, stop_byte - start_byte)


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)
