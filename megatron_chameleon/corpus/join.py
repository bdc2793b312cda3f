"""Join finished shards to the token files of a corpus, without duplicates and held-out text.

A text belongs to one split over all domains, so that nothing that is tested on is trained on. The
hash of a text puts all of its documents in one split, but a source with splits of its own may have
put some elsewhere. Then what such a source has in test or valid stays there, test before valid;
otherwise test precedes valid precedes train. Documents of the text in other splits are left out as
held out. Of the rest, a document whose text came before in the same domain is a duplicate.

Memory use is bounded: digests are read from disk for one range of their values at a time, from all
shards, and the results are written to a file per shard; tokens are copied in blocks.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Domain, DomainSplit, NotWritten
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.indexed import IndexedWriter, TokenType
from megatron_chameleon.corpus.records import MalformedLines
from megatron_chameleon.corpus.shards import (
    DIGEST,
    DIGESTS_NAME,
    Shard,
    domain_number,
)
from megatron_chameleon.corpus.shards import TOKENS_NAME as SHARD_TOKENS_NAME
from megatron_chameleon.corpus.staging import TOKENS_NAME

KEPT, DUPLICATE, HELD_OUT = 0, 1, 2
_SPLIT_OF_RANK = np.array([0, 1, 2, 1, 2])
# Texts that are compared at a time: about 80 bytes each, temporary arrays included.
_RANGE_TEXTS = 1 << 19
_COPIES = 1 << 17
_BLOCK_DOCUMENTS = 1 << 16
_BLOCK_BYTES = 1 << 20
# What the files of all domains together may hold in memory; a few domains never come near.
_WAITING_BYTES = 1 << 26


class CorpusWriter:
    """Write the token files of all domains and splits of a corpus, in bounded memory.

    File ``d * len(SPLITS) + s`` holds split s of domain d.

    Args:
        folder: an existing, empty folder.
        domains: names.
        dtype: integer type of a token on disk.
    """

    def __init__(self, folder: Path, domains: Sequence[str], dtype: TokenType) -> None:
        self._domains = domains
        self._prefixes = [
            f"{TOKENS_NAME}/{file_name_of(domain)}-{split}"
            for domain in domains
            for split in SPLITS
        ]
        self._writers = [IndexedWriter(folder / prefix, dtype) for prefix in self._prefixes]
        self._text_bytes = [0] * len(self._writers)
        self._waiting = 0

    def add_documents(self, file: int, lengths: NDArray[np.int32], text_bytes: int) -> None:
        """Append documents of ``lengths`` tokens to a file, and ``text_bytes`` of text in all."""
        self._writers[file].add_lengths(lengths)
        self._text_bytes[file] += text_bytes
        self._make_room(lengths.nbytes)

    def add_tokens(self, file: int, tokens: bytes) -> None:
        """Append tokens of the documents of a file, in their on-disk type."""
        self._writers[file].add_tokens(tokens)
        self._make_room(len(tokens))

    def finish(self) -> dict[str, Domain]:
        """Complete all files; return what corpus.json records of them."""
        parts = [
            DomainSplit(
                prefix=prefix,
                documents=writer.documents,
                tokens=writer.tokens,
                text_bytes=text_bytes,
                sha256=writer.finish(),
                block_checksums=writer.block_checksums,
            )
            for prefix, writer, text_bytes in zip(
                self._prefixes, self._writers, self._text_bytes, strict=True
            )
        ]
        of_domain = zip(*[iter(parts)] * len(SPLITS), strict=True)
        return {
            name: Domain(*splits) for name, splits in zip(self._domains, of_domain, strict=True)
        }

    def _make_room(self, size: int) -> None:
        self._waiting += size
        if self._waiting > _WAITING_BYTES:
            for writer in self._writers:
                writer.flush()
            self._waiting = 0


@dataclasses.dataclass(frozen=True)
class Joined:
    """What was written and what was not, by domain, and the malformed lines."""

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

    Documents of a domain and split are in the order of the shards, and within a shard in the order
    of reading; so the files do not depend on how the sources were divided.

    Args:
        shards: all of them, in order.
        first_domains: domains that come before those of the shards, and may stay empty.
        folder: an existing, empty folder.
        drop_duplicates: whether documents whose text came before in their domain are left out.
        on_bytes: called with the number of bytes of tokens just copied.

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
    writer = CorpusWriter(folder, list(numbers), shards[0].dtype)
    malformed = MalformedLines()
    empty: Counter[int] = Counter()
    for number, (shard, own_numbers) in enumerate(zip(shards, domain_numbers, strict=True)):
        reasons = left_out.reasons(number)
        first = 0
        with (shard.root / SHARD_TOKENS_NAME).open("rb", buffering=_BLOCK_BYTES) as tokens:
            for documents in shard.document_blocks(_BLOCK_DOCUMENTS):
                file = own_numbers[documents["domain"]] * len(SPLITS) + documents["split"]
                if reasons is not None:
                    here = reasons[first : first + documents.size]
                    kept = here == KEPT if drop_duplicates else here != HELD_OUT
                    file = np.where(kept, file, -1)
                _copy(tokens, documents, file, shard.dtype, writer, on_bytes)
                first += documents.size
        malformed.add_record(shard.malformed)
        for domain, count in zip(own_numbers.tolist(), shard.empty, strict=True):
            empty[domain] += count
    shutil.rmtree(left_out_folder)
    not_written = {
        name: NotWritten(
            duplicates=left_out.duplicates[number],
            held_out=left_out.held_out[number],
            empty=empty[number],
            malformed=malformed.by_domain[name],
        )
        for name, number in numbers.items()
    }
    return Joined(writer.finish(), not_written, malformed)


def _copy(
    tokens: BinaryIO,
    documents: NDArray[np.void],
    file: NDArray[np.int64],
    dtype: TokenType,
    writer: CorpusWriter,
    on_bytes: Callable[[int], object],
) -> None:
    """Copy documents [num_documents] to their ``file`` [num_documents], or skip them if it is -1.

    Batches are sorted by domain and split: consecutive documents of one file are copied at once.
    """
    begins = np.append(0, np.flatnonzero(np.diff(file)) + 1)
    sizes = np.add.reduceat(documents["tokens"], begins, dtype=np.int64) * np.dtype(dtype).itemsize
    ends = np.append(begins[1:], file.size)
    columns = (begins, ends, sizes, file[begins])
    for begin, end, size, to in zip(*(each.tolist() for each in columns), strict=True):
        if to < 0:
            tokens.seek(size, os.SEEK_CUR)
        else:
            some = documents[begin:end]
            writer.add_documents(to, some["tokens"], int(some["text_bytes"].sum()))
            left = size
            while left:
                block = tokens.read(min(left, _BLOCK_BYTES))
                assert block, "the checksum of the file was verified"
                writer.add_tokens(to, block)
                left -= len(block)
        on_bytes(size)


class Texts(NamedTuple):
    """Columns of some texts, all [num_texts].

    ``high`` and ``low`` (uint64) are the halves of the digest, ``order`` (int64) counts documents
    through the corpus, ``domain`` (int64) is a number, ``split`` (uint8) a position in SPLITS, and
    ``given`` (uint8) 1 where the source set the split.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    order: NDArray[np.int64]
    domain: NDArray[np.int64]
    split: NDArray[np.uint8]
    given: NDArray[np.uint8]

    @property
    def ranks(self) -> NDArray[np.uint8]:
        """[num_texts] precedence of each for the split of its text.

        0 is train, 1 and 2 are valid and test by hash, 3 and 4 the same set by the source.
        """
        return np.where(self.split > 0, self.split + 2 * self.given, 0).astype(np.uint8)

    def take(self, where: NDArray[np.integer]) -> Texts:
        """The texts at positions ``where``."""
        return Texts(*(column[where] for column in self))


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Documents that are left out.

    Attributes:
        folder: holds a file per shard, of one byte a document: KEPT, DUPLICATE or HELD_OUT; none
            where all are kept.
        duplicates: number by domain; counted also where they are not left out.
        held_out: number by domain of documents whose text another split holds.
    """

    folder: Path
    duplicates: Counter[int]
    held_out: Counter[int]

    def reasons(self, shard: int) -> NDArray[np.uint8] | None:
        """[num_documents] of a shard, on disk; None where all of its documents are kept."""
        path = self.folder / f"{shard:06d}"
        return np.memmap(path, np.uint8, "r") if path.exists() else None


def find_left_out(
    shards: Sequence[Shard], domain_numbers: Sequence[NDArray[np.int64]], folder: Path
) -> LeftOut:
    """Compare the texts of all documents.

    Args:
        shards: in the order of the corpus.
        domain_numbers: for each shard, the corpus's number of each of the shard's domains.
        folder: an existing, empty folder for the results.

    Raises:
        UserError: if the disk is full.
    """
    found = LeftOut(folder, Counter(), Counter())
    bases = np.cumsum([0, *(shard.documents for shard in shards)])
    for texts in _ranges(shards, domain_numbers, bases):
        reasons = reasons_to_leave_out(texts)
        (left,) = np.nonzero(reasons)
        found.duplicates.update(texts.domain[reasons == DUPLICATE].tolist())
        found.held_out.update(texts.domain[reasons == HELD_OUT].tolist())
        ascending = left[np.argsort(texts.order[left])]
        order, reasons = texts.order[ascending], reasons[ascending]
        cuts = np.searchsorted(order, bases)
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            here = slice(cuts[number], cuts[number + 1])
            noted = _reasons_file(folder, number, shards[number].documents)
            noted[order[here] - bases[number]] = reasons[here]
    # The further documents of the texts for which a shard has one record.
    for number, shard in enumerate(shards):
        for copies in shard.copy_blocks(_COPIES):
            noted = _reasons_file(folder, number, shard.documents)
            held_out = noted[copies["first"]] == HELD_OUT
            noted[copies["document"]] = np.where(held_out, HELD_OUT, DUPLICATE)
            domains = domain_numbers[number][copies["domain"]]
            found.held_out.update(domains[held_out].tolist())
            found.duplicates.update(domains[~held_out].tolist())
    return found


def reasons_to_leave_out(texts: Texts) -> NDArray[np.uint8]:
    """[num_texts] KEPT, DUPLICATE or HELD_OUT, for all documents of some texts."""
    reasons = np.full(texts.order.size, KEPT, dtype=np.uint8)
    if not reasons.size:
        return reasons
    by_digest = np.argsort(texts.high, kind="stable")
    high = texts.high[by_digest]
    same = high[1:] == high[:-1]
    # Most texts occur once: the rest is done for the others alone.
    several = by_digest[np.append(same, False) | np.append(False, same)]
    if not several.size:
        return reasons
    some = texts.take(several)
    by_text = np.lexsort((some.low, some.high))
    several, some = several[by_text], some.take(by_text)
    begins = np.append(True, (some.high[1:] != some.high[:-1]) | (some.low[1:] != some.low[:-1]))
    text = np.cumsum(begins) - 1
    highest = np.maximum.reduceat(some.ranks, np.flatnonzero(begins))
    held_out = some.split != _SPLIT_OF_RANK[highest[text]]
    reasons[several[held_out]] = HELD_OUT

    several, some, text = several[~held_out], some.take(np.flatnonzero(~held_out)), text[~held_out]
    by_domain = np.lexsort((some.order, some.domain, text))
    text, domain = text[by_domain], some.domain[by_domain]
    again = (text[1:] == text[:-1]) & (domain[1:] == domain[:-1])
    reasons[several[by_domain[1:][again]]] = DUPLICATE
    return reasons


def _ranges(
    shards: Sequence[Shard],
    domain_numbers: Sequence[NDArray[np.int64]],
    bases: NDArray[np.int64],
) -> Iterator[Texts]:
    """All texts, one range of digests at a time."""
    count = max(1, -(-sum(sum(shard.runs) for shard in shards) // _RANGE_TEXTS))
    edges = np.array([(i << 64) // count for i in range(1, count)], dtype=np.uint64)
    runs = []  # shard, first record of a sorted run, and where the edges divide it
    for number, shard in enumerate(shards):
        begin = 0
        for size in shard.runs:
            high = _read_digests(shard, begin, size)["high"] if edges.size else edges
            cuts = np.array([0, *np.searchsorted(high, edges), size], dtype=np.uint32)
            runs.append((number, begin, cuts))
            begin += size
    for i in range(count if runs else 0):
        parts = []
        for number, begin, cuts in runs:
            first, last = int(cuts[i]), int(cuts[i + 1])
            records = _read_digests(shards[number], begin + first, last - first)
            parts.append(
                Texts(
                    records["high"],
                    records["low"],
                    records["document"] + bases[number],
                    domain_numbers[number][records["domain"]],
                    records["split"],
                    records["given"],
                )
            )
        yield Texts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _read_digests(shard: Shard, first: int, count: int) -> NDArray[np.void]:
    with (shard.root / DIGESTS_NAME).open("rb", buffering=0) as stream:
        stream.seek(first * DIGEST.itemsize)
        return np.frombuffer(stream.read(count * DIGEST.itemsize), DIGEST)


def _reasons_file(folder: Path, shard: int, documents: int) -> NDArray[np.uint8]:
    """The reasons of one shard, on disk, writeable."""
    path = folder / f"{shard:06d}"
    if not path.exists():
        with writing(path), path.open("xb") as stream:
            # A full disk is detected here: writing through memory would kill the process.
            os.posix_fallocate(stream.fileno(), 0, documents)
    return np.memmap(path, np.uint8, "r+")
