"""Documents that do not go into the corpus: duplicates, and what another split holds out.

A text belongs to one split over all domains, so that none that is tested on is trained on. The
hash of the text puts all of its documents in one; a source that tells its splits itself may have
put some elsewhere. Then what such a source has in test or valid stays there, test before valid;
otherwise test goes before valid before train. Documents of the text in another split are left out.
Of what remains, a document whose text came before in the same domain is a duplicate.

Memory stays flat: digests are read from disk for one range of their values at a time, from all
shards, and what is found is written to a file per shard.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.corpus.shards.shard import DIGEST, DIGESTS_NAME, Shard

KEPT, DUPLICATE, HELD_OUT = 0, 1, 2
_SPLIT_OF_RANK = np.array([0, 1, 2, 1, 2])

# Texts that are compared at a time: some 80 bytes each, with what sorting takes.
_RANGE_TEXTS = 1 << 19
_BLOCK = 1 << 17


class Texts(NamedTuple):
    """A column for each thing that is known of some texts, all [num_texts].

    ``high`` and ``low`` (uint64) are the halves of the digest, ``order`` (int64) counts documents
    through the corpus, ``domain`` (int64) is a number, ``split`` (uint8) a position in SPLITS, and
    ``given`` (uint8) 1 where the source told the split.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    order: NDArray[np.int64]
    domain: NDArray[np.int64]
    split: NDArray[np.uint8]
    given: NDArray[np.uint8]

    @property
    def ranks(self) -> NDArray[np.uint8]:
        """[num_texts] how much each has to say about the split of its text, and which one.

        0 is train, 1 and 2 are valid and test, 3 and 4 are the same where the source told it.
        """
        return np.where(self.split > 0, self.split + 2 * self.given, 0).astype(np.uint8)

    def take(self, where: NDArray[np.integer]) -> Texts:
        """The texts at positions ``where``."""
        return Texts(*(column[where] for column in self))


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """What was found.

    Attributes:
        folder: holds a file per shard, of one byte a document: KEPT, DUPLICATE or HELD_OUT; none
            where all are kept.
        duplicates: by number of the domain; they are counted also where they are not left out.
        held_out: the same, of documents that are left out for what another split holds.
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
        folder: where to write what is found; it is there and empty.

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
        _write(texts.order[left], reasons[left], shards, bases, folder)
    for number, shard in enumerate(shards):
        _add_copies(number, shard, domain_numbers[number], found)
    return found


def reasons_to_leave_out(texts: Texts) -> NDArray[np.uint8]:
    """[num_texts] KEPT, DUPLICATE or HELD_OUT, as :func:`reasons_reference` gives them."""
    reasons = np.full(texts.order.size, KEPT, dtype=np.uint8)
    if not reasons.size:
        return reasons
    by_digest = np.argsort(texts.high, kind="stable")
    high = texts.high[by_digest]
    same = high[1:] == high[:-1]
    # Most texts occur once: what comes now is done with the others alone.
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


def reasons_reference(texts: Texts) -> list[int]:
    """The same in plain words, one text after another."""
    of_each_text: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for high, low, split, given in zip(
        texts.high, texts.low, texts.split, texts.given, strict=True
    ):
        of_each_text.setdefault((high, low), []).append((split, given))
    reasons = [KEPT] * texts.order.size
    seen = set()
    for i in np.argsort(texts.order):
        text = (texts.high[i], texts.low[i])
        given_splits = [split for split, given in of_each_text[text] if given and split > 0]
        if texts.split[i] != max(given_splits or [split for split, _ in of_each_text[text]]):
            reasons[i] = HELD_OUT
        elif (text, texts.domain[i]) in seen:
            reasons[i] = DUPLICATE
        else:
            seen.add((text, texts.domain[i]))
    return reasons


def _ranges(
    shards: Sequence[Shard],
    domain_numbers: Sequence[NDArray[np.int64]],
    bases: NDArray[np.int64],
) -> Iterator[Texts]:
    """All texts, those of a range of digests at a time."""
    count = max(1, -(-sum(sum(shard.runs) for shard in shards) // _RANGE_TEXTS))
    edges = np.array([(i << 64) // count for i in range(1, count)], dtype=np.uint64)
    runs = [run for number, shard in enumerate(shards) for run in _runs(number, shard, edges)]
    for i in range(count if runs else 0):
        parts = []
        for shard, begin, cuts in runs:
            records = _read_digests(shards[shard], begin + int(cuts[i]), int(cuts[i + 1] - cuts[i]))
            parts.append(
                Texts(
                    records["high"],
                    records["low"],
                    records["document"] + bases[shard],
                    domain_numbers[shard][records["domain"]],
                    records["split"],
                    records["given"],
                )
            )
        yield Texts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _runs(
    number: int, shard: Shard, edges: NDArray[np.uint64]
) -> Iterator[tuple[int, int, NDArray[np.uint32]]]:
    """For each sorted run of a shard: the shard, the run's first record, and where to cut it."""
    begin = 0
    for size in shard.runs:
        high = _read_digests(shard, begin, size)["high"] if edges.size else np.empty(0, np.uint64)
        cuts = np.searchsorted(high, edges)
        yield number, begin, np.array([0, *cuts, size], dtype=np.uint32)
        begin += size


def _read_digests(shard: Shard, first: int, count: int) -> NDArray[np.void]:
    with (shard.root / DIGESTS_NAME).open("rb", buffering=0) as stream:
        stream.seek(first * DIGEST.itemsize)
        return np.frombuffer(stream.read(count * DIGEST.itemsize), DIGEST)


def _write(
    order: NDArray[np.int64],
    reasons: NDArray[np.uint8],
    shards: Sequence[Shard],
    bases: NDArray[np.int64],
    folder: Path,
) -> None:
    """Note ``reasons`` for the documents at ``order``, each in the file of its shard."""
    ascending = np.argsort(order)
    order, reasons = order[ascending], reasons[ascending]
    cuts = np.searchsorted(order, bases)
    for number in np.flatnonzero(np.diff(cuts)).tolist():
        here = slice(cuts[number], cuts[number + 1])
        noted = _noted(folder, number, shards[number].documents)
        noted[order[here] - bases[number]] = reasons[here]


def _noted(folder: Path, shard: int, documents: int) -> NDArray[np.uint8]:
    """The reasons of one shard, on disk, to be changed."""
    path = folder / f"{shard:06d}"
    if not path.exists():
        with writing(path), path.open("xb") as stream:
            # A full disk is told here: a write through memory could not tell it.
            os.posix_fallocate(stream.fileno(), 0, documents)
    return np.memmap(path, np.uint8, "r+")


def _add_copies(
    number: int, shard: Shard, domain_numbers: NDArray[np.int64], found: LeftOut
) -> None:
    """Leave out the further documents of the texts that the shard has one record for."""
    for copies in shard.copy_blocks(_BLOCK):
        noted = _noted(found.folder, number, shard.documents)
        held_out = noted[copies["first"]] == HELD_OUT
        noted[copies["document"]] = np.where(held_out, HELD_OUT, DUPLICATE)
        domains = domain_numbers[copies["domain"]]
        found.held_out.update(domains[held_out].tolist())
        found.duplicates.update(domains[~held_out].tolist())
