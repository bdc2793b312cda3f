"""From finished shards to the files of a corpus: tokens are copied, not made again."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Domain, DomainSplit, NotWritten, Split
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.indexed_writer import IndexedWriter, TokenType
from megatron_chameleon.corpus.reading.malformed import MalformedLines
from megatron_chameleon.corpus.shards.folder import TOKENS_NAME
from megatron_chameleon.corpus.shards.left_out import DUPLICATE, KEPT, LeftOut, find_left_out
from megatron_chameleon.corpus.shards.shard import TOKENS_NAME as SHARD_TOKENS_NAME
from megatron_chameleon.corpus.shards.shard import Shard, domain_number

_BLOCK_DOCUMENTS = 1 << 16
_COPY_BYTES = 1 << 20
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
    for number, shard in enumerate(shards):
        reasons = left_out.reasons(number)
        writers.copy(shard, domain_numbers[number], reasons, drop_duplicates, on_bytes)
    shutil.rmtree(left_out_folder)
    return _joined(shards, numbers, domain_numbers, left_out, writers)


class _SplitFiles:
    """The files of one split of a domain, and what is counted while they are written."""

    def __init__(self, folder: Path, domain: str, split: Split, dtype: TokenType) -> None:
        self._prefix = f"{TOKENS_NAME}/{file_name_of(domain)}-{split}"
        self.writer = IndexedWriter(folder / self._prefix, dtype)
        self.text_bytes = 0

    def copy(self, stream: BinaryIO, size: int, documents: NDArray[np.void]) -> None:
        """Append ``documents``, whose tokens are the next ``size`` bytes of ``stream``."""
        self.writer.add_lengths(documents["tokens"])
        self.text_bytes += int(documents["text_bytes"].sum())
        while size:
            block = stream.read(min(size, _COPY_BYTES))
            assert block, "the size of the file was checked"
            self.writer.add_tokens(block)
            size -= len(block)

    def finish(self) -> DomainSplit:
        """Close the files and say what is in them."""
        return DomainSplit(
            prefix=self._prefix,
            documents=self.writer.documents,
            tokens=self.writer.tokens,
            text_bytes=self.text_bytes,
            sha256=self.writer.finish(),
        )


class _Writers:
    """The files of all domains and splits."""

    def __init__(self, folder: Path, domains: Sequence[str], dtype: TokenType) -> None:
        self._files = [
            _SplitFiles(folder, domain, split, dtype) for domain in domains for split in SPLITS
        ]
        self._waiting = 0

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
        with (shard.root / SHARD_TOKENS_NAME).open("rb", buffering=_COPY_BYTES) as stream:
            for documents in shard.document_blocks(_BLOCK_DOCUMENTS):
                target = domain_numbers[documents["domain"]] * len(SPLITS) + documents["split"]
                if reasons is not None:
                    here = reasons[first : first + documents.size]
                    kept = here == KEPT if drop_duplicates else (here == KEPT) | (here == DUPLICATE)
                    target = np.where(kept, target, -1)
                self._copy_block(stream, documents, target, shard.dtype, on_bytes)
                first += documents.size

    def _copy_block(
        self,
        stream: BinaryIO,
        documents: NDArray[np.void],
        target: NDArray[np.int64],
        dtype: TokenType,
        on_bytes: Callable[[int], object],
    ) -> None:
        """Copy documents to ``target`` [num_documents], a position in the files or -1 for none.

        Documents with one target lie side by side, by batches: they are copied at once.
        """
        begins = np.append(0, np.flatnonzero(np.diff(target)) + 1)
        sizes = np.add.reduceat(documents["tokens"], begins, dtype=np.int64)
        sizes *= np.dtype(dtype).itemsize
        ends = np.append(begins[1:], target.size)
        columns = (begins, ends, sizes, target[begins])
        for begin, end, size, to in zip(*(column.tolist() for column in columns), strict=True):
            if to < 0:
                stream.seek(size, 1)
            else:
                self._files[to].copy(stream, size, documents[begin:end])
                self._make_room(size)
            on_bytes(size)

    def _make_room(self, size: int) -> None:
        self._waiting += size
        if self._waiting > _WAITING_BYTES:
            for files in self._files:
                files.writer.flush()
            self._waiting = 0

    def finish(self, domain: int) -> dict[Split, DomainSplit]:
        """Close the files of the domain with this number."""
        first = domain * len(SPLITS)
        return {name: self._files[first + i].finish() for i, name in enumerate(SPLITS)}


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
