"""Join finished shards into a corpus, dropping duplicates and text held out of training.

A text belongs to one split across all domains, so that no test text is trained on. The hash of a
text decides its split, unless the source defines the split. If the splits of a text conflict,
splits set by a source take precedence over splits by hash; then test takes precedence over valid,
and valid over train. Documents with this text in other splits are dropped as held out. Among the
remaining documents of a domain, a repeated text is a duplicate.

:func:`regroup` moves documents of a corpus to other domains; it copies tokens and keeps splits.

Memory use is bounded: the digests of all shards are compared one range of values at a time, the
results are written to a file, and tokens are copied in blocks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    Domain,
    DomainSplit,
    NotWritten,
    Repeats,
    Split,
)
from megatron_chameleon.artifacts.corpus import file_name_of, hash_range
from megatron_chameleon.artifacts.files import link_or_copy, writing
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.indexed import IndexedWriter, TokenFile, TokenType
from megatron_chameleon.corpus.readers import MalformedLines
from megatron_chameleon.corpus.shards import (
    COPIES_NAME,
    COPY,
    DIGEST,
    DIGESTS_NAME,
    DOCUMENT,
    DOCUMENTS_NAME,
    Shard,
    assign_splits,
    domain_number,
)
from megatron_chameleon.corpus.shards import TOKENS_NAME as SHARD_TOKENS_NAME
from megatron_chameleon.corpus.staging import TOKENS_NAME
from megatron_chameleon.corpus.tokenizer import Tokenizer

Labels = Mapping[tuple[str, Split], NDArray[np.integer]]

# Why documents are left out. BEYOND: after the document that reaches its domain's token budget.
REASONS = KEPT, DUPLICATE, HELD_OUT, EMPTY, BEYOND = range(5)
# A TEXT record holds a document's text digest, number in the corpus, domain number and split.
TEXT = np.dtype(
    [
        ("high", "u8"),
        ("low", "u8"),
        ("order", "i8"),
        ("domain", "i8"),
        ("split", "u1"),
        ("by_source", "u1"),
    ]
)
# Number of texts compared at a time; each text takes about 80 bytes, temporary arrays included.
_RANGE_TEXTS = 1 << 19
_COPIES = 1 << 17
_BLOCK_DOCUMENTS = 1 << 16
_BLOCK_BYTES = 1 << 20
# Limit on the total size of the write buffers of all domains.
_WAITING_BYTES = 1 << 26
_BLOCK_TOKENS = 1 << 22
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class CorpusWriter:
    """Write the token files of all domains and splits of a corpus, in bounded memory.

    File ``d * len(SPLITS) + s`` holds split s of domain d.

    Args:
        folder: existing, empty folder.
        domains: names of the domains.
        dtype: integer type of a token on disk.
        on_bytes: called with the number of bytes of tokens just copied or skipped.
    """

    def __init__(
        self,
        folder: Path,
        domains: Sequence[str],
        dtype: TokenType,
        on_bytes: Callable[[int], object],
    ) -> None:
        self._domains, self._on_bytes = domains, on_bytes
        self._token_bytes = np.dtype(dtype).itemsize
        self._prefixes = [_prefix(domain, split) for domain in domains for split in SPLITS]
        self._writers = [IndexedWriter(folder / prefix, dtype) for prefix in self._prefixes]
        self._text_bytes = [0] * len(self._writers)
        self._waiting = 0

    def copy(
        self,
        files: NDArray[np.int64],
        lengths: NDArray[np.int32],
        text_bytes: NDArray[np.int64],
        read: Callable[[int, int], bytes],
        start: int,
    ) -> None:
        """Append documents to their files; consecutive documents of a file are copied together.

        Args:
            files: [num_documents] number of each document's file, -1 to leave it out.
            lengths: [num_documents] tokens.
            text_bytes: [num_documents] bytes of text.
            read: returns the bytes [start, stop) of all tokens.
            start: byte at which the documents' tokens begin.
        """
        if not files.size:
            return
        begins = np.append(0, np.flatnonzero(np.diff(files)) + 1)
        ends = np.append(begins[1:], files.size)
        stops = start + np.cumsum(lengths, dtype=np.int64)[ends - 1] * self._token_bytes
        for begin, end, stop in zip(begins.tolist(), ends.tolist(), stops.tolist(), strict=True):
            file = int(files[begin])
            if file >= 0:
                self._writers[file].add_lengths(lengths[begin:end])
                self._text_bytes[file] += int(text_bytes[begin:end].sum())
                self._waiting += lengths[begin:end].nbytes
                for at in range(start, stop, _BLOCK_BYTES):
                    block = read(at, min(at + _BLOCK_BYTES, stop))
                    self._writers[file].add_tokens(block)
                    self._waiting += len(block)
                if self._waiting > _WAITING_BYTES:
                    for writer in self._writers:
                        writer.flush()
                    self._waiting = 0
            self._on_bytes(stop - start)
            start = stop

    def train_tokens(self, domain: str) -> int:
        """Number of train tokens of ``domain`` that were appended so far."""
        return self._writers[len(SPLITS) * self._domains.index(domain)].tokens

    def finish(self) -> dict[str, Domain]:
        """Complete all files; return their records for corpus.json."""
        parts = (
            _finished_split(prefix, writer, text_bytes)
            for prefix, writer, text_bytes in zip(
                self._prefixes, self._writers, self._text_bytes, strict=True
            )
        )
        return {name: Domain(*itertools.islice(parts, len(SPLITS))) for name in self._domains}


@dataclasses.dataclass(frozen=True)
class Joined:
    """Written documents and counts of dropped documents, by domain; counts of malformed lines.

    ``unfilled`` has, for each shard and for the end, the domains whose budgets were not reached
    before, those without a budget included.
    """

    domains: dict[str, Domain]
    not_written: dict[str, NotWritten]
    malformed: MalformedLines
    repeats: dict[str, Repeats]
    unfilled: list[set[str]]


def join_shards(
    shards: Sequence[Shard],
    first_domains: Sequence[str],
    folder: Path,
    drop_duplicates: bool,
    on_bytes: Callable[[int], object],
    budgets: Mapping[str, int] | None = None,
    subset_shares: tuple[float, float, float] | None = None,
) -> Joined:
    """Write the .bin/.idx files of every domain and split.

    Documents of a domain and split are ordered by shard, and within a shard as they were read, so
    the files do not depend on the division into shards.

    Args:
        shards: all shards, in the order of the corpus.
        first_domains: domains listed before the domains of the shards; they may have no
            documents.
        folder: an existing, empty folder.
        drop_duplicates: whether repeated texts in a domain are left out.
        on_bytes: called with the number of bytes of tokens just copied.
        budgets: as in :func:`examine`; other domains are written only if they are among
            ``first_domains``. Their text is removed from the train splits all the same.
        subset_shares: as in :func:`examine`.

    Raises:
        UserError: if there are too many domains, or the disk is full.
    """
    numbers: dict[str, int] = {}
    names = [*first_domains, *(name for shard in shards for name in shard.domains)]
    of_corpus = {*first_domains, *(names if budgets is None else budgets)}
    for name in sorted(names, key=lambda name: name not in of_corpus):
        domain_number(numbers, name)
    written = [name for name in numbers if name in of_corpus]
    with writing(folder):
        (folder / TOKENS_NAME).mkdir()
    writer = CorpusWriter(folder, written, shards[0].dtype, on_bytes)
    malformed, by_domain = MalformedLines(), Counter[str]()
    counts, tokens_of = np.zeros((2, len(REASONS), len(numbers)), np.int64)
    budgets = budgets or {}
    unfilled = [set(numbers)]
    blocks = examine(shards, numbers, folder / "left-out", drop_duplicates, budgets, subset_shares)
    for shard, of_shard in zip(shards, blocks, strict=True):
        start = 0
        with (shard.root / SHARD_TOKENS_NAME).open("rb") as tokens:
            read = functools.partial(_read_file, tokens)
            for documents, domains, reasons in of_shard:
                files = domains * len(SPLITS) + documents["split"]
                files[~is_written(reasons, drop_duplicates)] = -1
                files[domains >= len(written)] = -1
                lengths = documents["tokens"]
                writer.copy(files, lengths, documents["text_bytes"], read, start)
                np.add.at(counts, (reasons, domains), 1)
                np.add.at(tokens_of, (reasons, domains), lengths)
                start += int(lengths.sum(dtype=np.int64)) * np.dtype(shard.dtype).itemsize
        malformed.add(shard.malformed)
        by_domain.update({n: shard.malformed.by_domain.get(n, 0) for n in unfilled[-1]})
        unfilled.append(
            {n for n in numbers if n not in budgets or writer.train_tokens(n) < budgets[n]}
        )
    numbers = {name: numbers[name] for name in written}
    not_written = {
        name: NotWritten(
            duplicates=int(counts[DUPLICATE, number]),
            held_out=int(counts[HELD_OUT, number]),
            empty=int(counts[EMPTY, number]),
            malformed=by_domain[name],
        )
        for name, number in numbers.items()
    }
    both = [KEPT, DUPLICATE]
    repeats = {
        name: Repeats(
            documents=int(counts[both, number].sum()),
            tokens=int(tokens_of[both, number].sum()),
            exact_documents=int(counts[DUPLICATE, number]),
            exact_tokens=int(tokens_of[DUPLICATE, number]),
        )
        for name, number in numbers.items()
    }
    return Joined(writer.finish(), not_written, malformed, repeats, unfilled)


class Block(NamedTuple):
    """Consecutive documents of a shard.

    ``documents`` are DOCUMENT records [n], ``domains`` [n] int64 the corpus's numbers of their
    domains, and ``reasons`` [n] uint8 are numbers of ``REASONS``.
    """

    documents: NDArray[np.void]
    domains: NDArray[np.int64]
    reasons: NDArray[np.uint8]


def is_written(reasons: NDArray[np.uint8], drop_duplicates: bool) -> NDArray[np.bool_]:
    """Whether documents with these ``reasons`` are written to the corpus."""
    return (reasons == KEPT) | ((reasons == DUPLICATE) & (not drop_duplicates))


def examine(
    shards: Sequence[Shard],
    numbers: Mapping[str, int],
    path: Path,
    drop_duplicates: bool,
    budgets: Mapping[str, int] | None,
    subset_shares: tuple[float, float, float] | None = None,
) -> Iterator[Iterator[Block]]:
    """Yield the blocks of each shard, with the reason to leave out each document.

    Args:
        shards: shards in the order of the corpus.
        numbers: domain -> its number in the corpus.
        path: temporary file with one byte per document.
        drop_duplicates: whether repeated texts in a domain are left out.
        budgets: domain -> train tokens after which the domain ends. The document that reaches them
            is the last one. Validation and test text that a source defines is not limited, nor are
            domains without a budget.
        subset_shares: as in :func:`reasons_to_leave_out`.

    Raises:
        UserError: if the disk is full.
    """
    of_shards = [np.array([numbers[n] for n in s.domains], dtype=np.int64) for s in shards]
    find_left_out(shards, of_shards, path, subset_shares)
    left = np.full(len(numbers), -1)
    for name in numbers.keys() & (budgets or {}).keys():
        left[numbers[name]] = (budgets or {})[name]
    is_limited, first = left >= 0, 0

    def blocks(shard: Shard, own_numbers: NDArray[np.int64]) -> Iterator[Block]:
        nonlocal first
        for documents in shard.blocks(DOCUMENTS_NAME, DOCUMENT, _BLOCK_DOCUMENTS):
            domains = own_numbers[documents["domain"]]
            reasons = read_reasons(path, first, documents.size)
            first += documents.size
            reasons[documents["tokens"] == 0] = EMPTY
            by_source = (documents["by_source"] > 0) & (documents["split"] > 0)
            counted = is_written(reasons, drop_duplicates) & (documents["split"] == 0)
            tokens = np.where(counted, documents["tokens"], 0).astype(np.int64)
            for domain in np.unique(domains[is_limited[domains]]).tolist():
                own = np.flatnonzero((domains == domain) & ~by_source)
                ends = np.cumsum(tokens[own])
                reasons[own[ends - tokens[own] >= left[domain]]] = BEYOND
                left[domain] = max(0, left[domain] - int(tokens[own].sum()))
            yield Block(documents, domains, reasons)

    yield from map(blocks, shards, of_shards)
    path.unlink()


def find_left_out(
    shards: Sequence[Shard],
    domain_numbers: Sequence[NDArray[np.int64]],
    path: Path,
    subset_shares: tuple[float, float, float] | None = None,
) -> None:
    """Find duplicates and held-out documents by the digests of all texts.

    Args:
        shards: all shards, in the order of the corpus.
        domain_numbers: for each shard, the corpus's number of each of the shard's domains.
        path: file to write, with one byte per document: KEPT, DUPLICATE or HELD_OUT. An empty
            document is KEPT.
        subset_shares: as in :func:`reasons_to_leave_out`.

    Raises:
        UserError: if the disk is full.
    """
    bases = np.cumsum([0, *(shard.documents for shard in shards)])
    with writing(path), path.open("xb") as stream:
        # Allocating the file detects a full disk; later, a write through the memory map would kill
        # the process.
        os.posix_fallocate(stream.fileno(), 0, max(1, int(bases[-1])))
    for texts in _ranges(shards, domain_numbers, bases):
        reasons = reasons_to_leave_out(texts, subset_shares)
        left = np.flatnonzero(reasons)
        if left.size:
            np.memmap(path, np.uint8, "r+")[texts["order"][left]] = reasons[left]
    # TEXT records hold each text of a sorted run once; add the documents that repeat such a text.
    for number, shard in enumerate(shards):
        for copies in shard.blocks(COPIES_NAME, COPY, _COPIES):
            found = np.memmap(path, np.uint8, "r+")
            of_first = found[bases[number] + copies["first"]]
            reasons = np.where(of_first == HELD_OUT, HELD_OUT, DUPLICATE).astype(np.uint8)
            found[bases[number] + copies["document"]] = reasons


def read_reasons(path: Path, first: int, count: int) -> NDArray[np.uint8]:
    """Read the reasons of ``count`` documents from the file of :func:`find_left_out`."""
    return _read_records(path, np.dtype(np.uint8), first, count).copy()


def reasons_to_leave_out(
    texts: NDArray[np.void], subset_shares: tuple[float, float, float] | None = None
) -> NDArray[np.uint8]:
    """Return KEPT, DUPLICATE or HELD_OUT for each TEXT record in ``texts``, [num_texts] uint8.

    Args:
        texts: TEXT records of all documents of some texts.
        subset_shares: shares of train, valid and test; None if all text was read, or if no text
            that may be unread is split by hash. With them, the result does not depend on unread
            text: train text set by a source is held out if its hash assigns it to another split,
            as unread copies may be; and valid or test text set by a source is never a duplicate of
            text that is split by hash.
    """
    reasons = np.full(texts.size, KEPT, dtype=np.uint8)
    is_set = (texts["by_source"] > 0) & (subset_shares is not None)
    if is_set.any() and subset_shares is not None:
        is_train = is_set & (texts["split"] == 0)
        is_train[is_train] = assign_splits(texts["high"][is_train], subset_shares) > 0
        reasons[is_train] = HELD_OUT
    by_digest = np.argsort(texts["high"], kind="stable")
    same = np.diff(texts["high"][by_digest]) == 0
    # Most texts occur once: process only repeated texts.
    several = by_digest[np.append(same, False) | np.append(False, same)] if same.any() else []
    if not len(several):
        return reasons
    several = several[np.lexsort((texts["low"][several], texts["high"][several]))]
    some = texts[several]
    changes = (np.diff(some["high"]) != 0) | (np.diff(some["low"]) != 0)
    text = np.append(0, np.cumsum(changes))
    # A text that occurs in several splits stays in the split of the highest rank. From lowest to
    # highest: train, valid by hash, test by hash, the source's own valid, the source's own test.
    ranks = np.where(some["split"] > 0, some["split"] + 2 * some["by_source"], 0)
    highest = np.maximum.reduceat(ranks, np.append(0, np.flatnonzero(changes) + 1))
    held_out = some["split"] != np.array([0, 1, 2, 1, 2])[highest[text]]
    held_out |= reasons[several] == HELD_OUT
    reasons[several[held_out]] = HELD_OUT

    several, some, text = several[~held_out], some[~held_out], text[~held_out]
    is_later = ~is_set[several] | (some["split"] == 0)
    by_domain = np.lexsort((some["order"], is_later, some["domain"], text))
    repeats = (np.diff(text[by_domain]) == 0) & (np.diff(some["domain"][by_domain]) == 0)
    reasons[several[by_domain[1:][repeats]]] = DUPLICATE
    return reasons


def _ranges(
    shards: Sequence[Shard], domain_numbers: Sequence[NDArray[np.int64]], bases: NDArray[np.int64]
) -> Iterator[NDArray[np.void]]:
    """Yield the TEXT records of all texts, one range of digests at a time."""
    count = max(1, -(-sum(sum(shard.runs) for shard in shards) // _RANGE_TEXTS))
    edges = np.array([(i << 64) // count for i in range(1, count)], dtype=np.uint64)
    # Each entry describes a sorted run: its shard, its first record, and the positions in it of the
    # edges of the ranges.
    runs = []
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
            texts = np.empty(records.size, TEXT)
            for name in ("high", "low", "split", "by_source"):
                texts[name] = records[name]
            texts["order"] = records["document"] + bases[number]
            texts["domain"] = domain_numbers[number][records["domain"]]
            parts.append(texts)
        yield np.concatenate(parts)


def _read_digests(shard: Shard, first: int, count: int) -> NDArray[np.void]:
    return _read_records(shard.root / DIGESTS_NAME, DIGEST, first, count)


def _read_records(path: Path, dtype: np.dtype[Any], first: int, count: int) -> NDArray[Any]:
    # np.fromfile is not used, since it silently returns fewer records if the disk fails.
    with path.open("rb", buffering=0) as stream:
        stream.seek(first * dtype.itemsize)
        return np.frombuffer(stream.read(count * dtype.itemsize), dtype)


def _read_file(stream: BinaryIO, start: int, stop: int) -> bytes:
    return os.pread(stream.fileno(), stop - start, start)


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

    The documents of a new domain are sorted by old domain, and then by position in the old domain.

    Args:
        corpus: corpus to read.
        labels: (old domain, split) -> [num_documents], the position in ``names`` of each document's
            new domain. Domains without labels are unchanged.
        names: names of the new domains.
        tokenizer: tokenizer of ``corpus``.
        folder: existing, empty folder to write into.
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
        name: link_domain(corpus, name, folder) for name in corpus.names if name not in divided
    }
    sizes, opened = token_bytes(tokenizer), open_domains(corpus)
    writer = CorpusWriter(folder, names, corpus.dtype, on_bytes)
    for (name, split), targets in labels.items():
        tokens = opened.open(name, split)
        text_bytes = document_bytes(tokens, sizes, corpus.domains[name].split(split).text_bytes)
        files = targets.astype(np.int64) * len(SPLITS) + SPLITS.index(split)
        for begin in range(0, len(files), _BLOCK_DOCUMENTS):
            some = slice(begin, begin + _BLOCK_DOCUMENTS)
            lengths = np.array(tokens.lengths[some], np.int32)
            start = int(tokens.starts[begin]) * corpus.token_bytes
            read = functools.partial(_read_tokens, tokens, corpus.dtype)
            writer.copy(files[some], lengths, text_bytes[some], read, start)
    return {**unchanged, **writer.finish()}


def _read_tokens(file: TokenFile, dtype: TokenType, start: int, stop: int) -> bytes:
    """Return the bytes ``start`` to ``stop`` of the tokens in type ``dtype``."""
    size = np.dtype(dtype).itemsize
    return file.tokens[start // size : stop // size].astype(dtype, copy=False).tobytes()


def link_domains(
    corpus: Corpus, folder: Path, train: Iterable[str], held_out: Iterable[str]
) -> Corpus:
    """Link the files of some domains, and the tokenizer, into ``folder``; return the new record.

    Domains that become held out keep their valid and test splits, and the other domains all splits.
    A corpus of preprocess_data has removed the text of every valid and test split from the train
    splits of all domains, so the new corpus does not train on held-out text either. The record is
    not written.
    """
    with writing(folder):
        (folder / TOKENS_NAME).mkdir(parents=True, exist_ok=True)
    if (tokenizer := corpus.root / corpus.tokenizer.file).is_file():
        link_or_copy(tokenizer, folder / corpus.tokenizer.file)
    domains = {name: link_domain(corpus, name, folder) for name in train}
    held = {
        name: (link_domain if name in corpus.held_out else hold_out_domain)(corpus, name, folder)
        for name in held_out
    }
    kept = {name: n for name, n in corpus.not_written.items() if name in domains | held}
    budgets = {name: n for name, n in corpus.max_tokens.items() if name in domains}
    # A domain that becomes held out loses its train text, and so its counts.
    counted = {*domains, *(held.keys() & corpus.held_out.keys())}
    repeats = {name: n for name, n in corpus.repeats.items() if name in counted}
    return dataclasses.replace(
        corpus,
        root=folder,
        domains=domains,
        held_out=held,
        not_written=kept,
        max_tokens=budgets,
        repeats=repeats,
    )


def link_domain(corpus: Corpus, name: str, folder: Path) -> Domain:
    """Link the files of a domain into ``folder``; return the domain's record.

    Imported files stay where they are.
    """
    domain = corpus.all_domains[name]
    if domain.imported is not None:
        return domain
    return Domain(*(_link_split(corpus, name, split, folder) for split in SPLITS))


def hold_out_domain(corpus: Corpus, name: str, folder: Path) -> Domain:
    """Link a domain as :func:`link_domain` does, but with an empty train split."""
    domain = corpus.all_domains[name]
    if (file := domain.imported) is not None:
        sha256 = hash_range(file.sha256, 0, 0)
        none = dataclasses.replace(
            domain.train, documents=0, tokens=0, sha256=sha256, sequences=(0, 0)
        )
        return dataclasses.replace(domain, train=none)
    none = write_split(name, "train", folder, corpus.dtype)
    valid, test = (_link_split(corpus, name, split, folder) for split in SPLITS[1:])
    return Domain(none, valid, test)


def write_split(
    name: str, split: Split, folder: Path, dtype: TokenType, text: TokenFile | None = None
) -> DomainSplit:
    """Write the documents of ``text``, one per sequence, as a split of a domain; None writes none.

    Raises:
        UserError: if the disk is full.
    """
    prefix = _prefix(name, split)
    writer = IndexedWriter(folder / prefix, dtype)
    text_bytes = 0 if text is None else None
    if text is not None:
        for number in range(len(text)):
            writer.add(text.get(number))
    return _finished_split(prefix, writer, text_bytes)


def _finished_split(prefix: str, writer: IndexedWriter, text_bytes: int | None) -> DomainSplit:
    """Complete the files of a split; return its record."""
    return DomainSplit(
        prefix=prefix,
        documents=writer.documents,
        tokens=writer.tokens,
        text_bytes=text_bytes,
        sha256=writer.finish(),
        block_checksums=writer.block_checksums,
    )


def _prefix(domain: str, split: Split) -> str:
    """Path of the files of a split, relative to the corpus folder, without suffix."""
    return f"{TOKENS_NAME}/{file_name_of(domain)}-{split}"


def _link_split(corpus: Corpus, name: str, split: Split, folder: Path) -> DomainSplit:
    prefix = _prefix(name, split)
    part = corpus.all_domains[name].split(split)
    for suffix in (".bin", ".idx", *([".xxh3"] if part.block_checksums else [])):
        source = Path(f"{corpus.prefix(name, split)}{suffix}")
        link_or_copy(source, folder / f"{prefix}{suffix}")
    return dataclasses.replace(part, prefix=prefix)


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Return the number of UTF-8 bytes that each token adds to a text, [vocab_size] int32.

    It is 0 for the end-of-document token. The bytes of a byte-level tokenizer are in its
    vocabulary. The bytes of other tokens are measured as the growth of the decoded text when the
    token is repeated, since some libraries strip the space before the first token; a token that is
    an incomplete character decodes to a replacement character and counts as one byte.
    """
    known = tokenizer.encoder.byte_counts()

    def size(ids: list[int]) -> int:
        text = tokenizer.decode(ids)
        return len(text.encode("utf-8", "surrogatepass")) - 2 * text.count(_REPLACEMENT)

    sizes = np.array(
        [
            known[token] if token in known else max(0, size([token] * 2) - size([token]))
            for token in range(tokenizer.vocab_size)
        ],
        dtype=np.int32,
    )
    sizes[tokenizer.eod_id] = 0
    return sizes


def document_bytes(
    tokens: TokenFile, sizes: NDArray[np.int32], text_bytes: int | None
) -> NDArray[np.int64]:
    """Estimate the text bytes of each document, [num_documents] int64; they sum to ``text_bytes``.

    A corpus records only the bytes of a whole split. These bytes are divided among the documents in
    proportion to the bytes of each document's tokens. If they are unknown, each document gets the
    bytes of its tokens.

    Args:
        tokens: tokens of a split, one sequence per document.
        sizes: [vocab_size] bytes of each token.
        text_bytes: bytes of the whole split's text; None if unknown.
    """
    # Cumulative bytes at each document's end, computed one block of tokens at a time.
    stops = np.cumsum(tokens.lengths, dtype=np.int64)
    ends, total = np.zeros(len(stops), np.int64), 0
    for first in range(0, tokens.tokens.size, _BLOCK_TOKENS):
        running = total + np.cumsum(
            sizes[tokens.tokens[first : first + _BLOCK_TOKENS]], dtype=np.int64
        )
        inside = slice(*np.searchsorted(stops, (first, first + running.size), side="right"))
        ends[inside] = running[stops[inside] - first - 1]
        total = int(running[-1])
    if text_bytes is None:
        return np.diff(ends, prepend=0)
    if total == 0:
        ends, total = stops, int(tokens.tokens.size)
    if total == 0:
        return ends
    # Round the ends rather than their differences, so that the sum is exact.
    ends = np.rint(ends * (text_bytes / total)).astype(np.int64)
    ends[-1] = text_bytes
    return np.diff(ends, prepend=0)
