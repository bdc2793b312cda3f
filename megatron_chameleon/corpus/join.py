"""Join finished shards into a corpus, dropping duplicates and text held out of training.

A text belongs to one split across all domains, so that no test text is trained on. The hash of a
text decides its split, unless a source defines its own. If they conflict, splits set by a source
take precedence, and test precedes valid precedes train. Documents of the text in other splits are
dropped as held out. Of the rest, a repeated text in a domain is a duplicate.

Documents can also be moved to other domains (:func:`regroup`): tokens are copied, splits stay.

Memory use is bounded: digests are read from disk for one range of their values at a time, from all
shards, and the results are written to a file per shard; tokens are copied in blocks.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Corpus, Domain, DomainSplit, NotWritten, Split
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import link_or_copy, writing
from megatron_chameleon.corpus.indexed import IndexedWriter, TokenFile, TokenType, open_tokens
from megatron_chameleon.corpus.records import MalformedLines
from megatron_chameleon.corpus.shards import (
    DIGEST,
    DIGESTS_NAME,
    Shard,
    domain_number,
)
from megatron_chameleon.corpus.shards import TOKENS_NAME as SHARD_TOKENS_NAME
from megatron_chameleon.corpus.staging import TOKENS_NAME
from megatron_chameleon.corpus.tokenizer import Tokenizer

Labels = Mapping[tuple[str, Split], NDArray[np.integer]]

KEPT, DUPLICATE, HELD_OUT = 0, 1, 2
_SPLIT_OF_RANK = np.array([0, 1, 2, 1, 2])
# Texts compared at a time: about 80 bytes each, temporary arrays included.
_RANGE_TEXTS = 1 << 19
_COPIES = 1 << 17
_BLOCK_DOCUMENTS = 1 << 16
_BLOCK_BYTES = 1 << 20
# Limit of the write buffers of all domains together.
_WAITING_BYTES = 1 << 26
_BLOCK_TOKENS = 1 << 22
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        """Append documents of ``lengths`` tokens and ``text_bytes`` of text in total."""
        self._writers[file].add_lengths(lengths)
        self._text_bytes[file] += text_bytes
        self._make_room(lengths.nbytes)

    def add_tokens(self, file: int, tokens: bytes) -> None:
        """Append tokens of the documents of a file, in their on-disk type."""
        self._writers[file].add_tokens(tokens)
        self._make_room(len(tokens))

    def finish(self) -> dict[str, Domain]:
        """Complete all files; return their records for corpus.json."""
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
    """Written and dropped documents by domain, and the malformed lines."""

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
    of reading; so the files do not depend on the sharding.

    Args:
        shards: all of them, in order.
        first_domains: domains listed before those of the shards; may stay empty.
        folder: an existing, empty folder.
        drop_duplicates: whether repeated texts in a domain are left out.
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
    ``by_source`` (uint8) 1 where the source set the split.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    order: NDArray[np.int64]
    domain: NDArray[np.int64]
    split: NDArray[np.uint8]
    by_source: NDArray[np.uint8]

    @property
    def ranks(self) -> NDArray[np.uint8]:
        """[num_texts] precedence of each for the split of its text.

        0 is train, 1 and 2 are valid and test by hash, 3 and 4 the same set by the source.
        """
        return np.where(self.split > 0, self.split + 2 * self.by_source, 0).astype(np.uint8)

    def take(self, where: NDArray[np.integer]) -> Texts:
        """The texts at positions ``where``."""
        return Texts(*(column[where] for column in self))


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Dropped documents.

    Attributes:
        folder: holds a file per shard, of one byte a document: KEPT, DUPLICATE or HELD_OUT; none
            where all are kept.
        duplicates: number by domain; counted even if they are kept.
        held_out: number by domain of documents with a text of another split.
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
    # Documents that repeat a text of the same sorted run.
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
    # Most texts occur once: process only the others.
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
                    records["by_source"],
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


# Other domains


def regroup(
    corpus: Corpus,
    labels: Labels,
    names: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    on_bytes: Callable[[int], object],
) -> dict[str, Domain]:
    """Write the token files of a corpus with its documents moved to other domains.

    Documents of a new domain are in the order of the old domains, and of the documents in them.

    Args:
        corpus: to read.
        labels: (old domain, split) -> [num_documents], the position in ``names`` of each document's
            new domain. Other domains are unchanged.
        names: new domains.
        tokenizer: of the corpus.
        folder: an existing, empty folder.
        on_bytes: called with the number of bytes of tokens just copied.

    Returns:
        The unchanged domains, followed by the new ones.

    Raises:
        UserError: if the corpus is damaged, or the disk is full.
    """
    with writing(folder):
        (folder / TOKENS_NAME).mkdir()
    divided = {name for name, _ in labels}
    assert not (set(corpus.names) - divided) & set(names), "a name is taken"
    unchanged = {
        name: _linked(corpus, name, folder) for name in corpus.names if name not in divided
    }
    sizes = token_bytes(tokenizer)
    writer = CorpusWriter(folder, names, corpus.dtype)
    for (name, split), targets in labels.items():
        if not len(targets):
            continue
        tokens = open_tokens(corpus, name, split)
        text_bytes = document_bytes(tokens, sizes, corpus.domains[name].split(split).text_bytes)
        files = targets.astype(np.int64) * len(SPLITS) + SPLITS.index(split)
        # Consecutive documents of one file are copied at once, up to a limit.
        begins = np.flatnonzero(np.diff(files, prepend=-1))
        begins = np.union1d(begins, np.arange(0, len(files), _BLOCK_DOCUMENTS))
        ends = np.append(begins[1:], len(files))
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            file, lengths = int(files[begin]), np.array(tokens.lengths[begin:end])
            writer.add_documents(file, lengths, int(text_bytes[begin:end].sum()))
            first = int(tokens.starts[begin])
            stop = first + int(lengths.sum(dtype=np.int64))
            for start in range(first, stop, _BLOCK_TOKENS):
                block = tokens.tokens[start : min(start + _BLOCK_TOKENS, stop)]
                writer.add_tokens(file, block.tobytes())
                on_bytes(block.nbytes)
    return {**unchanged, **writer.finish()}


def _linked(corpus: Corpus, name: str, folder: Path) -> Domain:
    """An unchanged domain: its files are linked into ``folder``."""
    parts = []
    for split in SPLITS:
        prefix = f"{TOKENS_NAME}/{file_name_of(name)}-{split}"
        part = corpus.domains[name].split(split)
        for suffix in (".bin", ".idx", *([".xxh3"] if part.block_checksums else [])):
            source = Path(f"{corpus.prefix(name, split)}{suffix}")
            link_or_copy(source, folder / f"{prefix}{suffix}")
        parts.append(dataclasses.replace(part, prefix=prefix))
    return Domain(*parts)


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """[vocab_size] int32: the UTF-8 bytes that a token adds to a text, 0 for end-of-document.

    Measured by a second occurrence of the token: some libraries strip the space of the first token
    of a text. Part of a character decodes to a replacement character and counts as one byte, which
    is exact but for tokens of several bytes of one character.
    """
    sizes = np.zeros(tokenizer.vocab_size, dtype=np.int32)
    for token in range(tokenizer.vocab_size):
        sizes[token] = max(0, _size(tokenizer, [token] * 2) - _size(tokenizer, [token]))
    sizes[tokenizer.identity.eod_id] = 0
    return sizes


def document_bytes(
    tokens: TokenFile, sizes: NDArray[np.int32], text_bytes: int
) -> NDArray[np.int64]:
    """[num_documents] int64 bytes of text, which sum to ``text_bytes``.

    A corpus records the sum of a split, which was counted when the text was read. It is divided in
    proportion to the bytes of the documents' tokens.

    Args:
        tokens: of a split, one document a sequence.
        sizes: bytes of each token of the vocabulary.
        text_bytes: of all documents together.
    """
    counted = np.concatenate([np.zeros(0, np.int64), *_counted(tokens, sizes)])
    total = int(counted.sum())
    if total == 0:
        counted, total = tokens.lengths.astype(np.int64), int(tokens.tokens.size)
    if total == 0:
        return counted
    # The ends are rounded rather than the differences: the last end is exact.
    ends = np.rint(np.cumsum(counted) * (text_bytes / total)).astype(np.int64)
    ends[-1] = text_bytes
    return np.diff(ends, prepend=0)


def _counted(tokens: TokenFile, sizes: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """Bytes of the documents' tokens, a block of documents at a time."""
    ends = np.cumsum(tokens.lengths, dtype=np.int64)
    first = 0
    while first < len(ends):
        begin = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, begin + _BLOCK_TOKENS, side="right")))
        running = np.cumsum(sizes[tokens.tokens[begin : ends[stop - 1]]], dtype=np.int64)
        running = np.concatenate([[0], running])
        yield np.diff(running[ends[first:stop] - begin], prepend=0)
        first = stop


def _size(tokenizer: Tokenizer, ids: list[int]) -> int:
    text = tokenizer.decode(ids)
    return len(text.encode("utf-8", "surrogatepass")) - 2 * text.count(_REPLACEMENT)
