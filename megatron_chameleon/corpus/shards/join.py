"""From finished shards to the files of a corpus: tokens are copied, not made again.

Of a corpus of one shard they are not even copied, where nothing is left out.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Domain, DomainSplit, NotWritten, Split
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import link_or_copy, writing
from megatron_chameleon.corpus.indexed import IndexedWriter, TokenType
from megatron_chameleon.corpus.reading.malformed import MalformedLines
from megatron_chameleon.corpus.shards.folder import TOKENS_NAME
from megatron_chameleon.corpus.shards.left_out import DUPLICATE, KEPT, LeftOut, find_left_out
from megatron_chameleon.corpus.shards.parts import ShardPart, sources_of
from megatron_chameleon.corpus.shards.shard import Shard, domain_number
from megatron_chameleon.corpus.shards.token_source import TokenSource, token_source

_BLOCK_DOCUMENTS = 1 << 16
# What all domains together may hold before it is written; a few domains never come near.
_WAITING_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Joined:
    """What is in the files that were written and what is not, by domain, and malformed lines."""

    domains: dict[str, Domain]
    not_written: dict[str, NotWritten]
    malformed: MalformedLines


def join_shards(
    shards: Sequence[Shard],
    first_domains: Iterable[str],
    folder: Path,
    drop_duplicates: bool,
    on_bytes: Callable[[int], object],
) -> Joined:
    """Write the .bin/.idx files of every domain and split.

    The order of documents within a domain and split is that of the shards, and within a shard that
    of reading; so the files do not depend on how the sources were cut.

    Args:
        shards: all of them, in order.
        first_domains: domains that come before those of the shards, and may stay empty.
        folder: where to write; it is there and empty.
        drop_duplicates: whether documents whose text came before in their domain are left out.
        on_bytes: is told how many bytes of tokens were just copied.

    Raises:
        UserError: if there are too many domains, or the disk is full.
    """
    numbers: dict[str, int] = {}
    for name in [*first_domains, *(name for shard in shards for name in shard.domains)]:
        domain_number(numbers, name)
    domain_numbers = [
        np.array([numbers[name] for name in shard.domains], dtype=np.int64) for shard in shards
    ]
    left_out_folder = folder / "left-out"
    with writing(folder):
        left_out_folder.mkdir()
        (folder / TOKENS_NAME).mkdir()
    left_out = find_left_out(shards, domain_numbers, left_out_folder)
    writers = _Writers(folder, list(numbers), shards[0].dtype)
    if len(shards) == 1:
        writers.take_parts(shards[0], domain_numbers[0], left_out.reasons(0), drop_duplicates)
    for number, shard in enumerate(shards):
        reasons = left_out.reasons(number)
        writers.copy(shard, domain_numbers[number], reasons, drop_duplicates, on_bytes)
    shutil.rmtree(left_out_folder)
    return _joined(shards, numbers, domain_numbers, left_out, writers)


class _SplitFiles:
    """The files of one split of a domain, and what is counted while they are written."""

    def __init__(self, folder: Path, domain: str, split: Split, dtype: TokenType) -> None:
        self._prefix = f"{TOKENS_NAME}/{file_name_of(domain)}-{split}"
        self._folder = folder
        self._writer = IndexedWriter(folder / self._prefix, dtype)
        self._text_bytes = 0
        self._taken: DomainSplit | None = None

    def copy(self, blocks: Iterable[bytes], documents: NDArray[np.void]) -> None:
        """Append ``documents``, whose tokens are in ``blocks``."""
        self._writer.add_lengths(documents["tokens"])
        self._text_bytes += int(documents["text_bytes"].sum())
        for block in blocks:
            self._writer.add_tokens(block)

    def flush(self) -> None:
        """Write what is in memory."""
        self._writer.flush()

    def finish(self) -> DomainSplit:
        """Close the files and say what is in them."""
        if self._taken is not None:
            return self._taken
        return DomainSplit(
            prefix=self._prefix,
            documents=self._writer.documents,
            tokens=self._writer.tokens,
            text_bytes=self._text_bytes,
            sha256=self._writer.finish(),
            block_checksums=self._writer.block_checksums,
        )

    def take(self, shard: Shard, part: ShardPart) -> None:
        """Be the files of ``part``, by a second name; nothing was written before."""
        for path in part.paths(shard.root):
            target = self._folder / f"{self._prefix}{path.suffix}"
            target.unlink(missing_ok=True)
            link_or_copy(path, target)
        counts = (part.documents, part.tokens, part.text_bytes)
        self._taken = DomainSplit(self._prefix, *counts, part.sha256, part.block_checksums)


class _Writers:
    """The files of all domains and splits."""

    def __init__(self, folder: Path, domains: Sequence[str], dtype: TokenType) -> None:
        self._files = [
            _SplitFiles(folder, domain, split, dtype) for domain in domains for split in SPLITS
        ]
        self._waiting = 0
        self._taken: set[int] = set()

    def copy(
        self,
        shard: Shard,
        domain_numbers: NDArray[np.int64],
        reasons: NDArray[np.uint8] | None,
        drop_duplicates: bool,
        on_bytes: Callable[[int], object],
    ) -> None:
        """Append the documents of ``shard``, but for those there are ``reasons`` to leave out."""
        first = 0
        with token_source(shard) as tokens:
            for documents in shard.document_blocks(_BLOCK_DOCUMENTS):
                target = domain_numbers[documents["domain"]] * len(SPLITS) + documents["split"]
                target = np.where(np.isin(target, list(self._taken)), -1, target)
                if reasons is not None:
                    here = reasons[first : first + documents.size]
                    target = np.where(_is_kept(here, drop_duplicates), target, -1)
                self._copy_block(tokens, documents, target, shard.dtype, on_bytes)
                first += documents.size

    def take_parts(
        self,
        shard: Shard,
        domain_numbers: NDArray[np.int64],
        reasons: NDArray[np.uint8] | None,
        drop_duplicates: bool,
    ) -> None:
        """Take over the files of the only ``shard`` of which nothing is left out."""
        incomplete: set[int] = set()
        if reasons is not None:
            first = 0
            for documents in shard.document_blocks(_BLOCK_DOCUMENTS):
                kept = _is_kept(reasons[first : first + documents.size], drop_duplicates)
                incomplete.update(np.unique(sources_of(documents)[~kept]).tolist())
                first += documents.size
        for part in shard.parts or ():
            if part.source not in incomplete:
                target = int(domain_numbers[part.domain]) * len(SPLITS) + part.split
                self._files[target].take(shard, part)
                self._taken.add(target)

    def _copy_block(
        self,
        tokens: TokenSource,
        documents: NDArray[np.void],
        target: NDArray[np.int64],
        dtype: TokenType,
        on_bytes: Callable[[int], object],
    ) -> None:
        """Copy documents to ``target`` [num_documents], a position in the files or -1 for none.

        Documents with one target lie side by side, by batches: they are copied at once.
        """
        sources = sources_of(documents)
        begins = np.append(0, np.flatnonzero((np.diff(target) != 0) | (np.diff(sources) != 0)) + 1)
        sizes = np.add.reduceat(documents["tokens"], begins, dtype=np.int64)
        sizes *= np.dtype(dtype).itemsize
        ends = np.append(begins[1:], target.size)
        columns = (begins, ends, sizes, sources[begins], target[begins])
        for begin, end, size, source, to in zip(*(each.tolist() for each in columns), strict=True):
            if to < 0:
                tokens.skip(source, size)
            else:
                self._files[to].copy(tokens.read(source, size), documents[begin:end])
                self._make_room(size)
            on_bytes(size)

    def _make_room(self, size: int) -> None:
        self._waiting += size
        if self._waiting > _WAITING_BYTES:
            for files in self._files:
                files.flush()
            self._waiting = 0

    def finish(self, domain: int) -> dict[Split, DomainSplit]:
        """Close the files of the domain with this number."""
        first = domain * len(SPLITS)
        return {name: self._files[first + i].finish() for i, name in enumerate(SPLITS)}


def _is_kept(reasons: NDArray[np.uint8], drop_duplicates: bool) -> NDArray[np.bool_]:
    return reasons == KEPT if drop_duplicates else (reasons == KEPT) | (reasons == DUPLICATE)


def _joined(
    shards: Sequence[Shard],
    numbers: dict[str, int],
    domain_numbers: Sequence[NDArray[np.int64]],
    left_out: LeftOut,
    writers: _Writers,
) -> Joined:
    malformed = MalformedLines()
    empty: Counter[int] = Counter()
    for shard, shard_numbers in zip(shards, domain_numbers, strict=True):
        malformed.add_record(shard.malformed)
        for number, count in zip(shard_numbers.tolist(), shard.empty, strict=True):
            empty[number] += count
    domains = {name: Domain(**writers.finish(number)) for name, number in numbers.items()}
    not_written = {
        name: NotWritten(
            duplicates=left_out.duplicates[number],
            held_out=left_out.held_out[number],
            empty=empty[number],
            malformed=malformed.by_domain[name],
        )
        for name, number in numbers.items()
    }
    return Joined(domains, not_written, malformed)
