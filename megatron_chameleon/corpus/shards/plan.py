"""The plan: everything that decides over a shard's content, so that all who work agree on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.provenance import package_versions, plain_options
from megatron_chameleon.artifacts.record import FolderRecord
from megatron_chameleon.corpus.reading.pieces import Piece, cut
from megatron_chameleon.corpus.reading.sources import Source
from megatron_chameleon.corpus.tokenization.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.preprocess import PreprocessOptions

# Another release of these may tokenize otherwise.
_PACKAGES = ("megatron-chameleon", "tokenizers", "sentencepiece", "tiktoken")
# What inputs lead to is compared, not how it is written; the share is looked at in the end.
_NOT_COMPARED = ("input", "valid_input", "test_input", "max_malformed_share")
# Each has a folder of its own.
_MAX_SHARDS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Plan(FolderRecord):
    """What is read, how it is cut, and what tokens are made of it.

    Attributes:
        options: those that decide over the tokens, by name.
        tokenizer: its hash.
        versions: of the packages that make the tokens.
        sources: all of them, with size and time of change.
        shards: the pieces of each.
    """

    KIND = "preprocessing plan"
    FILE_NAME = "plan.json"
    FORMAT_VERSION = 1
    MADE_BY = "remove the folder to begin anew"

    options: dict[str, Any]
    tokenizer: str
    versions: dict[str, str]
    sources: list[Source]
    shards: list[list[Piece]]

    @property
    def hash(self) -> str:
        """Hex SHA-256 of all that it says."""
        body = dataclasses.asdict(self)
        del body["root"]
        return sha256_of_json(body)

    def shard_bytes(self, number: int) -> int:
        """Bytes on disk that shard ``number`` reads, as far as they are known."""
        return sum(piece.bytes for piece in self.shards[number])

    def difference(self, begun: Plan) -> str | None:
        """How this plan differs from the one in ``begun.root``, on one line; None if it does not.

        Times of change are not compared: a file that was copied or touched is still the same.
        """
        return next(self._differences(begun), None)

    def _differences(self, begun: Plan) -> Iterator[str]:
        anew = f"or remove {begun.root} to begin anew"
        for name in sorted({*self.options, *begun.options}):
            now, then = self.options.get(name), begun.options.get(name)
            if now != then:
                flag = "--" + name.replace("_", "-")
                yield (
                    f"{flag} is {_shown(now)} and was {_shown(then)} when the work in {begun.root} "
                    f"was begun; give it as it was, {anew}"
                )
        if self.tokenizer != begun.tokenizer:
            yield (
                "--tokenizer-model is another one than when the work in "
                f"{begun.root} was begun (its hash differs); give that one, {anew}"
            )
        for package, now in self.versions.items():
            then = begun.versions.get(package)
            if now != then:
                yield (
                    f"{package} is {now} and was {then} when the work in {begun.root} was begun; "
                    f"use that release, {anew}"
                )
        yield from _source_differences(self.sources, begun.sources, f"{begun.root}", anew)
        if self.shards != begun.shards:  # of the same sources: a parquet file was written anew
            yield f"the sources have changed since the work in {begun.root} was begun; {anew[3:]}"


def make_plan(options: PreprocessOptions, tokenizer: Tokenizer, sources: Sequence[Source]) -> Plan:
    """The plan that ``options`` lead to.

    Raises:
        UserError: if it has too many shards, or a source that has to be cut cannot be read.
    """
    shards_at_least = sum(source.bytes for source in sources) // options.shard_bytes
    if shards_at_least > _MAX_SHARDS:
        raise UserError(
            f"--shard-bytes {options.shard_bytes} makes {shards_at_least} shards; give a larger one"
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
        shards=cut(sources, options.shard_bytes),
    )


def _source_differences(
    now: Sequence[Source], then: Sequence[Source], where: str, anew: str
) -> Iterator[str]:
    now_by_name = {source.name: source for source in now}
    then_by_name = {source.name: source for source in then}
    for name, source in now_by_name.items():
        before = then_by_name.get(name)
        if before is None:
            yield f"{name} was not among the sources of the work in {where}; leave it out, {anew}"
        elif before.bytes != source.bytes:
            yield (
                f"{name} has changed since the work in {where} was begun: it holds {source.bytes} "
                f"bytes and held {before.bytes}; restore it, {anew}"
            )
        elif dataclasses.replace(before, modified_ns=source.modified_ns) != source:
            yield (
                f"{name} belonged to another domain or split when the work in {where} was begun; "
                f"give --input as it was, {anew}"
            )
    for name in then_by_name:
        if name not in now_by_name:
            yield f"{name} is a source of the work in {where} and is gone; bring it back, {anew}"
    if list(now_by_name) != list(then_by_name):
        yield f"the sources came in another order in the work in {where}; restore it, {anew}"


def _shown(value: Any) -> str:
    return "not given" if value is None else repr(value)
