"""Tokenize one shard: read, split, encode and write its documents, and the records for joining.

A shard is a folder that is moved into place by one rename, so an existing shard is complete.

- ``shard.json`` holds the counts and checksums that are needed to read the other files.
- ``tokens.bin`` holds the concatenated tokens of all documents, in the corpus's integer type.
- ``documents.bin`` holds a DOCUMENT record for each document, in the order of the tokens.
- ``digests.bin`` holds a DIGEST record for each distinct text of a domain and split. The records
  are written in several runs, each of which is sorted.
- ``copies.bin`` holds a COPY record for each document that repeats a text of the same run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Stopwatch
from megatron_chameleon.artifacts.files import flush_to_disk, writing
from megatron_chameleon.artifacts.record import FolderRecord, InnerPath
from megatron_chameleon.corpus.indexed import TokenType, append_to
from megatron_chameleon.corpus.readers import (
    Document,
    DocumentReader,
    MalformedLines,
    check_unchanged,
)
from megatron_chameleon.corpus.sources import Chunk, Source
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError

# tokens: with the end-of-document token; 0 for an empty document, without text or without tokens.
DOCUMENT = np.dtype(
    [
        ("tokens", "<i4"),
        ("domain", "<u2"),
        ("split", "u1"),
        ("by_source", "u1"),
        ("text_bytes", "<i8"),
    ]
)
# high and low: the halves of a text's digest. by_source: whether the source set the split.
DIGEST = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("document", "<u4"),
        ("domain", "<u2"),
        ("split", "u1"),
        ("by_source", "u1"),
    ]
)
COPY = np.dtype([("document", "<u4"), ("first", "<u4")])

TOKENS_NAME, DOCUMENTS_NAME = "tokens.bin", "documents.bin"
DIGESTS_NAME, COPIES_NAME = "digests.bin", "copies.bin"
_NAMES = (TOKENS_NAME, DOCUMENTS_NAME, DIGESTS_NAME, COPIES_NAME)

# Maximum number of domains: Megatron's blended index stores the number of a domain as int16.
MAX_DOMAINS = 32_767
# Number of digests sorted together in memory.
_RUN_DOCUMENTS = 1 << 18
# Batch size: large enough to keep an encoder busy; small enough to fit in memory with its
# encodings.
_BATCH_CHARACTERS = 2_000_000
_BATCH_DOCUMENTS = 1 << 14
_SWITCH_SECONDS = 5e-4
# Characters that are encoded at once per token that is left of a domain's budget.
_CHARACTERS_PER_TOKEN = 4


@dataclasses.dataclass(frozen=True)
class Shard(FolderRecord):
    """A finished shard, as recorded in its shard.json.

    Attributes:
        plan: hash of the plan it belongs to.
        domains: names of the domains, in order of first occurrence; records hold positions in this
            list.
        documents: number of DOCUMENT records.
        tokens: number of tokens written, end-of-document tokens included.
        runs: number of digests in each sorted run.
        copies: documents that repeat a text of the same run.
        hashes: SHA-256 of what was read, for each chunk; None if it was not read to its end.
        checksums: file name -> hex XXH3 (128 bits) of the file.
        malformed: counts of the lines read and skipped.
        seconds: wall time.
        budgets: domain -> train tokens after which reading stopped; None if everything was read.
        stopped: domains of which some text was not read, because their budget was reached.
        left_out: domain without a budget -> number of its documents that were skipped.
    """

    KIND = "preprocessed shard"
    FILE_NAME = "shard.json"
    # Since version 6, documents.bin also lists empty documents, and copies.bin has no domain.
    FORMAT_VERSION = 6
    MADE_BY = "remove the folder, and run megatron-chameleon preprocess_data again"

    plan: str
    dtype: TokenType
    domains: list[str]
    documents: int
    tokens: int
    runs: list[int]
    copies: int
    hashes: list[str | None]
    checksums: dict[InnerPath, str]
    malformed: MalformedLines
    seconds: float
    budgets: dict[str, int] | None = None
    stopped: list[str] = dataclasses.field(default_factory=list)
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def token_bytes(self) -> int:
        """Bytes of all tokens."""
        return self.tokens * np.dtype(self.dtype).itemsize

    def check_files(self) -> None:
        """Compare the files with their checksums.

        Raises:
            UserError: naming the first file that differs.
        """
        for name, checksum in self.checksums.items():
            path = self.root / name
            if not path.is_file() or _checksum(path) != checksum:
                raise UserError(
                    f"{path} does not match its checksum: remove {self.root} and run the same "
                    "command again"
                )

    def blocks(self, name: str, dtype: np.dtype[np.void], size: int) -> Iterator[NDArray[np.void]]:
        """Yield the records in the file ``name``, at most ``size`` at a time."""
        with (self.root / name).open("rb") as stream:
            while block := stream.read(size * dtype.itemsize):
                yield np.frombuffer(block, dtype)


class ShardWriter:
    """Write the files of one shard, in bounded memory.

    Attributes:
        documents: number of documents added.
        tokens: number of tokens added.
        runs: number of digests in each sorted run so far.
        copies: number of COPY records so far.

    Args:
        folder: existing, empty folder.
        dtype: integer type of a token on disk.
    """

    def __init__(self, folder: Path, dtype: TokenType) -> None:
        self._folder = folder
        self._dtype = np.dtype(dtype)
        self._waiting: list[NDArray[np.void]] = []
        self._waiting_digests = 0
        self.documents = 0
        self.tokens = 0
        self.runs: list[int] = []
        self.copies = 0
        for name in _NAMES:
            self._append(name, b"")

    def add(
        self,
        tokens: NDArray[np.integer],
        documents: NDArray[np.void],
        digests: NDArray[np.uint64],
    ) -> None:
        """Append documents.

        Args:
            tokens: [num_tokens] tokens of all documents that are not empty, end-of-document tokens
                included.
            documents: [num_documents] DOCUMENT records.
            digests: [num_documents, 2] the two halves of each text's digest.

        Raises:
            UserError: if the disk is full.
        """
        self._append(TOKENS_NAME, tokens.astype(self._dtype, copy=False).data)
        self._append(DOCUMENTS_NAME, documents.tobytes())
        records = np.zeros(documents.size, DIGEST)
        records["high"], records["low"] = digests[:, 0], digests[:, 1]
        records["document"] = np.arange(self.documents, self.documents + documents.size)
        for name in ("domain", "split", "by_source"):
            records[name] = documents[name]
        records = records[documents["tokens"] > 0]
        self.documents += documents.size
        self.tokens += tokens.size
        self._waiting.append(records)
        self._waiting_digests += records.size
        if self._waiting_digests >= _RUN_DOCUMENTS:
            self._write_run()

    def finish(self) -> dict[str, str]:
        """Write the remaining records and flush to disk; return the checksum of each file."""
        self._write_run()
        checksums = {}
        for path in (self._folder / name for name in _NAMES):
            checksums[path.name] = _checksum(path)
            with writing(path):
                flush_to_disk(path)
        return checksums

    def _write_run(self) -> None:
        if not self._waiting_digests:
            return
        unique, copies = sorted_digests(np.concatenate(self._waiting))
        self._append(DIGESTS_NAME, unique.tobytes())
        self._append(COPIES_NAME, copies.tobytes())
        self.runs.append(unique.size)
        self.copies += copies.size
        self._waiting, self._waiting_digests = [], 0

    def _append(self, name: str, block: bytes | memoryview) -> None:
        append_to(self._folder / name, block)


def sorted_digests(
    records: NDArray[np.void],
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Sort DIGEST records; of records that differ only in the document, keep the first.

    Each text gets one record per domain and split, however often it occurs; otherwise a frequent
    text would fill memory when digests are compared.

    Args:
        records: [num_documents] in the order of the documents.

    Returns:
        The kept records, sorted by digest, and a COPY record for each dropped record.
    """
    keys = ("by_source", "split", "domain", "low", "high")
    ordered = records[np.lexsort([records[name] for name in ("document", *keys)])]
    same = np.zeros(ordered.size, dtype=bool)
    same[1:] = True
    for name in keys:
        same[1:] &= ordered[name][1:] == ordered[name][:-1]
    firsts = np.maximum.accumulate(np.where(same, 0, np.arange(ordered.size)))
    copies = np.zeros(int(same.sum()), COPY)
    copies["document"] = ordered["document"][same]
    copies["first"] = ordered["document"][firsts[same]]
    return ordered[~same], copies


def domain_number(numbers: dict[str, int], name: str) -> int:
    """Return the number of domain ``name``; a new domain is added to ``numbers``.

    Raises:
        UserError: if there are too many domains.
    """
    number = numbers.setdefault(name, len(numbers))
    if number >= MAX_DOMAINS:
        raise UserError(
            f"there are more than {MAX_DOMAINS} domains, such as '{name}'; correct --domain-key"
        )
    return number


def make_shard(
    reader: DocumentReader,
    chunks: Sequence[Chunk],
    split_shares: tuple[float, float, float],
    tokenizer: Tokenizer,
    plan_hash: str,
    folder: Path,
    budgets: Mapping[str, int] | None = None,
) -> None:
    """Read, split, tokenize and write the documents of one shard.

    Three threads work concurrently: one reads and splits a batch, one encodes the previous batch,
    and one writes the batch before the previous one.

    Args:
        reader: reader that has read nothing yet.
        chunks: chunks of the shard.
        split_shares: shares of train, valid and test, summing to 1.
        tokenizer: tokenizer of the corpus.
        plan_hash: hash of the plan that all processes have agreed on.
        folder: existing, empty folder to write into.
        budgets: domain -> number of train tokens, repeated texts included, after which its text is
            not read any more; train text of other domains is not read. Validation and test text
            that a source defines is read completely. None reads everything.

    Raises:
        UserError: if a source cannot be read or has changed, or the disk is full.
    """
    stopwatch = Stopwatch()
    limits = None if budgets is None else _Limits(budgets)
    domains: dict[str, int] = {}
    unread = _batches(_documents(reader, chunks, limits), split_shares, domains, limits)
    writer = ShardWriter(folder, tokenizer.token_type)
    switch_interval = sys.getswitchinterval()
    # After each batch the encoder waits for the GIL while the reader parses. Python's default
    # switch interval, 5 ms, would add a tenth to the time of a batch.
    sys.setswitchinterval(_SWITCH_SECONDS)
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, switch_interval)
        writing_thread = stack.enter_context(ThreadPoolExecutor(1))
        ahead = _next_in_thread(unread)
        written = writing_thread.submit(lambda: None)
        while (batch := ahead.result()) is not None:
            if limits:
                limits.update()
            ahead = _next_in_thread(unread)
            tokens, lengths = tokenizer.encode_documents(batch.texts)
            # A document that has no token but the end-of-document token is empty.
            is_empty = lengths == 1
            if is_empty.any():
                tokens = tokens[np.repeat(~is_empty, lengths)]
            batch.documents["tokens"] = np.where(is_empty, 0, lengths)
            if limits:
                limits.add(batch.documents, list(domains))
            written.result()
            written = writing_thread.submit(writer.add, tokens, batch.documents, batch.digests)
        written.result()
    checksums = writer.finish()
    Shard(
        root=folder,
        plan=plan_hash,
        dtype=tokenizer.token_type,
        domains=list(domains),
        documents=writer.documents,
        tokens=writer.tokens,
        runs=writer.runs,
        copies=writer.copies,
        hashes=[reader.hashes.get(chunk) for chunk in chunks],
        checksums=checksums,
        malformed=reader.malformed,
        seconds=stopwatch.seconds(),
        budgets=None if budgets is None else dict(budgets),
        stopped=[] if limits is None else sorted(limits.stopped),
        left_out={} if limits is None else dict(limits.left_out),
    ).save()


class _Limits:
    """Train tokens that a shard still wants of each domain.

    What the reading thread sees changes only between two batches, so that it reads the same
    documents every time.

    Attributes:
        left: domain -> tokens, 0 or less if its budget is reached.
        unfilled: domains whose budget is not reached.
        stopped: domains of which some text was not read.
        left_out: domain without a budget -> number of its documents that were skipped.
    """

    def __init__(self, budgets: Mapping[str, int]) -> None:
        self.left, self.stopped = dict(budgets), set[str]()
        self.unfilled = {name for name, tokens in budgets.items() if tokens > 0}
        self.left_out, self._encoded = Counter[str](), Counter[str]()

    def add(self, documents: NDArray[np.void], names: Sequence[str]) -> None:
        """Count the train tokens of an encoded batch; :meth:`update` makes them visible."""
        train = documents[documents["split"] == 0]
        tokens = np.bincount(train["domain"], train["tokens"], minlength=len(names))
        self._encoded.update(dict(zip(names, tokens.astype(np.int64).tolist(), strict=True)))

    def update(self) -> None:
        """Subtract what was counted."""
        for name in self.left.keys() & self._encoded.keys():
            self.left[name] -= self._encoded[name]
            if self.left[name] <= 0:
                self.unfilled.discard(name)
        self._encoded.clear()

    def stop(self, domain: str | None) -> bool:
        """Whether no more text of a domain is read, None for all domains; record that it stops."""
        if self.unfilled if domain is None else domain in self.unfilled:
            return False
        self.stopped.update(self.left if domain is None else self.left.keys() & {domain})
        return True

    def skip(self, domain: str) -> None:
        """Count a skipped document, if it has no budget; a wrong key may name very many domains."""
        is_counted = domain in self.left_out or len(self.left_out) < MAX_DOMAINS
        if domain not in self.left and is_counted:
            self.left_out[domain] += 1


def is_limited(source: Source) -> bool:
    """Whether a budget limits the text of ``source``: it is no valid, test or held-out text."""
    return source.split in (None, "train")


def _documents(
    reader: DocumentReader, chunks: Sequence[Chunk], limits: _Limits | None
) -> Iterator[Document]:
    """Yield the documents of ``chunks``; stop each domain at its limit."""
    for chunk in chunks:
        source = reader.sources[chunk.source]
        if limits is None or not is_limited(source):
            yield from reader.read(chunk)
            continue
        if limits.stop(source.domain):
            continue
        for document in reader.read(chunk):
            if not limits.stop(document.domain):
                yield document
            elif limits.stop(source.domain):
                check_unchanged(source)
                break
            else:
                limits.skip(document.domain)


def _next_in_thread(batches: Iterator[_Batch]) -> Future[_Batch | None]:
    """Read the next batch in a daemon thread; the result is None after the last batch.

    An executor would wait for a read that hangs, as on a stalled disk, so the process could not
    exit.
    """
    future: Future[_Batch | None] = Future()

    def read() -> None:
        try:
            future.set_result(next(batches, None))
        except BaseException as error:  # raised again by result()
            future.set_exception(error)

    threading.Thread(target=read, name="read-ahead", daemon=True).start()
    return future


class _Batch(NamedTuple):
    """Documents to encode, sorted by domain, and by split unless their order is kept.

    ``documents`` are DOCUMENT records [num_documents] whose number of tokens is not yet set.
    ``digests`` [num_documents, 2] uint64 holds the two halves of each text's digest.
    """

    texts: list[str]
    documents: NDArray[np.void]
    digests: NDArray[np.uint64]


def _batches(
    documents: Iterable[Document],
    shares: tuple[float, float, float],
    domains: dict[str, int],
    limits: _Limits | None,
) -> Iterator[_Batch]:
    """Group documents into batches, and add their domains to ``domains``.

    With ``limits``, documents keep their order, and a batch ends when a domain has probably reached
    its limit.
    """
    waiting: list[Document] = []
    characters = 0
    # Characters of the batch, and of the batch before, which is not encoded yet.
    of_domain, not_encoded = Counter[str](), Counter[str]()
    for document in documents:
        waiting.append(document)
        characters += len(document.text)
        is_full = characters >= _BATCH_CHARACTERS or len(waiting) == _BATCH_DOCUMENTS
        if limits:
            of_domain[document.domain] += len(document.text)
            left = _CHARACTERS_PER_TOKEN * limits.left.get(document.domain, 0)
            is_full |= 0 < left < of_domain[document.domain] + not_encoded[document.domain]
        if is_full:
            del document
            yield _batch(waiting, shares, domains, in_order=limits is not None)
            waiting, characters = [], 0
            not_encoded, of_domain = of_domain, Counter()
    if waiting:
        yield _batch(waiting, shares, domains, in_order=limits is not None)


def _batch(
    waiting: list[Document],
    shares: tuple[float, float, float],
    domains: dict[str, int],
    *,
    in_order: bool,
) -> _Batch:
    names, texts, splits = zip(*waiting, strict=True)
    text_digests, sizes = [], []
    # Texts are converted to UTF-8 one at a time, since a single text may take most of the memory.
    for text in texts:
        encoded = text.encode()
        text_digests.append(text_digest(encoded))
        sizes.append(len(encoded))
    digests = np.frombuffer(b"".join(text_digests), ">u8").reshape(-1, 2).astype(np.uint64)
    documents = np.zeros(len(texts), DOCUMENT)
    documents["text_bytes"] = sizes
    documents["domain"] = [domain_number(domains, name) for name in names]
    documents["split"] = assign_splits(digests[:, 0], shares)
    if any(splits):
        held_out = np.array([split == "held_out" for split in splits])
        documents["split"][held_out] = assign_held_out_splits(digests[held_out, 0], shares)
        from_source = np.array([SPLITS.index(s) if s in SPLITS else -1 for s in splits])
        documents["by_source"] = from_source >= 0
        documents["split"] = np.where(from_source >= 0, from_source, documents["split"])
    by_split = np.zeros(len(texts)) if in_order else documents["split"]
    order = np.lexsort((by_split, documents["domain"]))
    ordered = [texts[position] for position in order.tolist()]
    return _Batch(ordered, documents[order], digests[order])


def text_digest(text: bytes) -> bytes:
    """Return 16 bytes that identify a text: BLAKE2b of its UTF-8."""
    return hashlib.blake2b(text, digest_size=16).digest()


def assign_splits(
    digest_prefixes: NDArray[np.uint64], shares: tuple[float, float, float]
) -> NDArray[np.uint8]:
    """Assign a split to each text by its digest.

    Args:
        digest_prefixes: [num_texts] first 8 bytes of each text's digest, as a big-endian number.
        shares: shares of train, valid and test, summing to 1.

    Returns:
        [num_texts] 0 for train, 1 for valid, 2 for test. The first 53 bits of a digest form a
        uniform number in [0, 1). The shares divide this interval into three parts.
    """
    train_end, valid_end, _ = accumulate(shares)
    places = _positions(digest_prefixes)
    return np.searchsorted([train_end, valid_end], places, side="right").astype(np.uint8)


def assign_held_out_splits(
    digest_prefixes: NDArray[np.uint64], shares: tuple[float, float, float]
) -> NDArray[np.uint8]:
    """Assign valid or test to each text of a held-out domain; see :func:`assign_splits`.

    The interval of train is divided in the proportions of valid and test. The other texts have the
    split that they have in every domain, so that no domain loses one of them.
    """
    train_end, valid_end, _ = accumulate(shares)
    edges = [train_end * shares[1] / (shares[1] + shares[2]), train_end, valid_end]
    parts = np.searchsorted(edges, _positions(digest_prefixes), side="right")
    return np.array([1, 2, 1, 2], np.uint8)[parts]


def _positions(digest_prefixes: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (digest_prefixes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
