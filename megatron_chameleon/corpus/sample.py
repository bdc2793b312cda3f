"""Sample documents of one domain from raw text, at a cost that does not depend on its size.

A domain is read at evenly spaced *places* (systematic sampling with one random start), so that the
sample covers all of its files:

- Plain JSON lines on this machine: 1024 places of 64 KiB. The documents whose lines begin in these
  bytes are read, so every document of the domain is sampled with the same probability.
- Parquet: 2 Mi characters from the beginning of the row groups at 64 places. Larger row groups are
  not read further, since pyarrow decodes their pages in order.
- Compressed files and data sets that ``datasets`` reads: 2 Mi characters a place from the beginning
  of the files at 64 places. A compressed stream cannot be read from the middle.
- Plain JSON lines in object storage: 64 places of 2 MiB, since a request takes long.

Sizes decide how many places a file, or row group, has. Each place contributes documents chosen
uniformly among those that are read there, as many as it needs for its share of the documents and of
the characters. There are more places if files are small or many windows are needed. A domain that
is no larger than its places is read completely.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader, row_group_bytes
from megatron_chameleon.corpus.sources import Chunk, Source
from megatron_chameleon.errors import UserError
from megatron_chameleon.storage import is_remote

# Least number of places and bytes per place, if a place can start at any byte of a local file.
_FINE = (1024, 1 << 16)
# The same for all other sources, where starting to read is expensive. For files that are read from
# the start, the limit counts characters of text.
_COARSE = (64, 1 << 21)
_SMALLEST_PLACE = 1 << 10


@dataclasses.dataclass(frozen=True)
class Sample:
    """Sampled documents of one domain.

    Attributes:
        texts: texts of the documents, none empty, in the order of the sources.
        documents_read: number of documents that were read.
        bytes_read: bytes on disk that were read.
        bytes_total: bytes on disk of the domain; 0 if unknown.
        text_bytes: bytes of the domain's text in UTF-8: exact if all of it was read, and otherwise
            an estimate; None if unknown.
    """

    texts: list[str]
    documents_read: int
    bytes_read: int
    bytes_total: int
    text_bytes: float | None


def sample_documents(
    options: SourceOptions,
    sources: Sequence[Source],
    name: str,
    num_documents: int,
    characters: int,
    seed: int,
) -> Sample:
    """Sample documents of the domain ``name``: as few as have the requested number and length.

    The sample depends on the arguments only.

    Args:
        options: keys and limits of the text.
        sources: sources of the domain.
        name: the domain.
        num_documents: minimum number of documents, if the domain has as many.
        characters: minimum number of characters, if the domain has as many.
        seed: seed of the sample.

    Raises:
        UserError: if a source cannot be read, too many of its lines are malformed, or no text is
            found.
    """
    digest = hashlib.sha256(f"{seed}/{name}/documents".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    on_disk, in_text, here = Counter[int](), Counter[int](), 0

    def on_bytes(count: int) -> None:
        on_disk[here] += count

    reader = DocumentReader(options, sources, on_bytes=on_bytes)

    def read(chunk: Chunk) -> Iterator[str]:
        nonlocal here
        here = chunk.source
        for block in reader.read_blocks(chunk):
            in_text[here] += sum(len(document.text.encode()) for _, document in block)
            for _, document in block:
                yield document.text

    texts: list[str] = []
    for place in _places(sources, num_documents, characters, float(generator.random())):
        found = _up_to(place.stop_after, map(read, place.chunks))
        texts += _sample(generator, found, place.num_documents, place.characters)
    malformed, bytes_read = reader.malformed, on_disk.total()
    malformed.check(options.max_malformed_share)
    if not texts:
        raise UserError(
            f"--input: domain '{name}' has no text in the {bytes_read:,} bytes that were read; "
            "correct its path, or leave it out"
        )
    total = sum(source.bytes for source in sources)
    whole = {chunk.source for chunk in reader.hashes if chunk == Chunk(chunk.source)}
    text_bytes = _text_bytes(sources, on_disk, in_text, whole)
    return Sample(texts, malformed.lines - malformed.count, bytes_read, total, text_bytes)


def read_documents(options: SourceOptions, sources: Sequence[Source], name: str) -> list[str]:
    """Return the texts of all documents of ``name`` that have text, in the order of the sources.

    Raises:
        UserError: if a source cannot be read, too many of its lines are malformed, or no document
            has text.
    """
    reader = DocumentReader(options, sources)
    documents = itertools.chain.from_iterable(map(reader.read, map(Chunk, range(len(sources)))))
    texts = [document.text for document in documents if document.text]
    reader.malformed.check(options.max_malformed_share)
    if not texts:
        raise UserError(f"--input: '{name}' has no text; correct its path, or leave it out")
    return texts


def require_text(options: SourceOptions, sources: Sequence[Source], name: str) -> None:
    """Read the domain ``name`` up to its first document with text.

    Raises:
        UserError: if a source cannot be read or has none of the keys, or no document has text.
    """
    reader = DocumentReader(options, sources)
    documents = map(reader.read, map(Chunk, range(len(sources))))
    if not any(document.text for document in itertools.chain.from_iterable(documents)):
        reader.malformed.check(options.max_malformed_share)
        raise UserError(f"--input: domain '{name}' has no text; correct its path, or leave it out")


def _text_bytes(
    sources: Sequence[Source], on_disk: Counter[int], in_text: Counter[int], whole: Collection[int]
) -> float | None:
    """Estimate the bytes of text; None if a source of unknown size was not read completely.

    The estimate is that of a ratio: bytes of text per byte that was read of files of the same
    format, such as ``.jsonl.gz``, times their bytes on disk.

    Args:
        sources: sources of the domain.
        on_disk: source -> bytes that were read.
        in_text: source -> bytes of text in them.
        whole: sources that were read completely, whose text was counted.
    """

    def format_of(number: int) -> tuple[str, str]:
        return sources[number].kind, PurePosixPath(sources[number].path.lower()).suffix

    read, text = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for number, count in on_disk.items():
        read[format_of(number)] += count
        text[format_of(number)] += in_text[number]
    total = 0.0
    for number, source in enumerate(sources):
        if number in whole:
            total += in_text[number]
            continue
        if not source.bytes and (source.kind == "dataset" or is_remote(source.path)):
            return None
        form = format_of(number)
        # Files of a format of which none was read count like the others.
        among = (text[form], read[form]) if read[form] else (text.total(), read.total())
        total += source.bytes * among[0] / max(among[1], 1)
    return total


def _sample(
    generator: np.random.Generator, texts: Iterable[str], num_documents: int, characters: int
) -> list[str]:
    """Sample texts, as few as have ``num_documents`` texts and ``characters`` characters.

    The texts with the smallest random keys are a uniform sample. They keep their order.
    """
    chosen: list[tuple[float, int, str]] = []  # the largest key first
    total = 0
    for number, text in enumerate(texts):
        heapq.heappush(chosen, (-generator.random(), number, text))
        total += len(text)
        while len(chosen) > num_documents and total - len(chosen[0][2]) >= characters:
            total -= len(heapq.heappop(chosen)[2])
    return [text for _key, _number, text in sorted(chosen, key=lambda each: each[1])]


class _Place(NamedTuple):
    """Chunks to read, what to choose from them, and the characters after which to stop reading."""

    chunks: list[Chunk]
    num_documents: int
    characters: int
    stop_after: int | None = None


def _places(
    sources: Sequence[Source], num_documents: int, characters: int, start: float
) -> list[_Place]:
    """Divide documents and characters among places; ``start`` in [0, 1) is the random start."""
    is_fine = all(_starts_anywhere(source) and not is_remote(source.path) for source in sources)
    count, size = _FINE if is_fine else _COARSE
    known = [source.bytes for source in sources if source.kind != "dataset"]
    total = sum(known)
    if len(known) == len(sources) and total <= max(count * size, characters):
        chunks = [Chunk(number) for number in range(len(sources))]
        return [_Place(chunks, num_documents, characters)]
    # The shards of a data set whose sizes are unknown count like files of average size, or like
    # large files if no size is known.
    average = max(1, total // len(known)) if known else size
    # With small files, there are more places, of at least one document, and fewer bytes are read at
    # each.
    reach = min(size, max(average, _SMALLEST_PLACE))
    count = max(count, min(num_documents, math.ceil(characters / reach)))
    sizes = [average if source.kind == "dataset" else source.bytes for source in sources]
    # A line is read if a position is one of the ``reach`` bytes from its first byte on. So that the
    # last lines of a file have the same probability, positions may be after its end.
    padding = [reach if _starts_anywhere(source) else 0 for source in sources]
    ends = np.cumsum(np.add(sizes, padding))
    positions = ((np.arange(count) + start) * (int(ends[-1]) / count)).astype(np.int64)
    row_groups = functools.cache(lambda number: np.cumsum(row_group_bytes(sources[number].path)))
    # (source, start) -> number of places, in ascending order.
    found: Counter[tuple[int, int]] = Counter()
    for number, inside in _locate(ends, positions):
        if sources[number].kind == "parquet":
            groups = _locate(row_groups(number), np.array([inside]))
            found.update((number, group) for group, _ in groups)
        else:
            found[number, inside if _starts_anywhere(sources[number]) else 0] += 1
    places = []
    per_place, length = math.ceil(num_documents / count), math.ceil(characters / count)
    for here, then in itertools.zip_longest(found, itertools.islice(found, 1, None)):
        (number, begin), times = here, found[here]
        if _starts_anywhere(sources[number]):
            chunk = Chunk(number, max(0, begin - reach + 1), begin + 1)
            places.append(_Place([chunk], per_place, length))
            continue
        chunk = Chunk(number)
        if sources[number].kind == "parquet":
            stop = then[1] if then and then[0] == number else None
            chunk = Chunk(number, begin, stop)
        places.append(_Place([chunk], times * per_place, times * length, times * size))
    return places


def _starts_anywhere(source: Source) -> bool:
    return source.kind == "lines" and source.cuttable


def _locate(ends: NDArray[np.int64], positions: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the interval that holds each position, and the position inside the interval."""
    if not len(ends):
        return []
    positions = np.minimum(positions, ends[-1] - 1)
    numbers = np.searchsorted(ends, positions, side="right")
    inside = positions - np.append(0, ends)[numbers]
    return list(zip(numbers.tolist(), inside.tolist(), strict=True))


def _up_to(characters: int | None, chunks: Iterable[Iterator[str]]) -> Iterator[str]:
    """Yield the texts that are not empty, until they have ``characters`` in total."""
    left = math.inf if characters is None else characters
    for text in itertools.chain.from_iterable(chunks):
        if text:
            yield text
            left -= len(text)
        if left <= 0:
            return
