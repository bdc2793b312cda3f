"""Order of the samples within a domain, and the cache of Megatron's indices."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets import helpers
from numpy.typing import NDArray

from megatron_chameleon.artifacts.files import replacing, sha256_of_json
from megatron_chameleon.blend.gather import (
    View,
    document_ends,
    read_epoch,
    read_indexed,
)
from megatron_chameleon.corpus.domains import DomainTokens
from megatron_chameleon.corpus.indexed import TokenFile, map_file
from megatron_chameleon.corpus.permutation import permutation_key
from megatron_chameleon.errors import UserError

# Megatron shuffles the last epoch separately if less than this share of it is used, so that its
# repeated documents do not replace documents of the whole epochs.
SEPARATE_FINAL_EPOCH_BELOW = 0.80
# From this number of samples on, Megatron's shuffle index is int64 instead of uint32.
WIDE_SHUFFLE_FROM = np.iinfo(np.uint32).max - 1
# Version in the keys of cached indices. Raise it when megatron_indices returns different indices
# for the same arguments.
MEGATRON_INDICES_VERSION = 1

Arrays = dict[str, NDArray[Any]]

# Purposes of permutations. They are hashed into the keys, so that one seed gives independent keys.
_DOCUMENTS, _WINDOWS = 0, 1


@dataclasses.dataclass(frozen=True)
class EpochStream:
    """Infinite stream of a domain's samples, reshuffled every epoch.

    The epochs are concatenated to one stream of tokens, so that no token is lost between epochs.
    Window j begins at token ``j * seq_length`` of the stream, and belongs to the epoch in which it
    begins. The order depends only on seed, ``order_key`` and epoch, not on the number of samples.

    Attributes:
        domain: domain to read.
        file: sequences of the domain.
        seq_length: tokens of a sample.
        seed: seed of the order.
        shuffle_documents: whether the documents are reshuffled every epoch as well. Otherwise they
            stay in file order, or, if the domain is cut, in one shuffled order.
    """

    domain: DomainTokens
    file: TokenFile
    seq_length: int
    seed: int
    shuffle_documents: bool

    def view_of(self, number: int) -> View:
        """Return a view of the epoch that contains sample ``number``."""
        tokens, domain = self.domain.tokens, self.domain
        epoch = number * self.seq_length // tokens
        first, stop = (-(-e * tokens // self.seq_length) for e in (epoch, epoch + 1))
        # The last window of an epoch may end in the next epoch.
        orders = (epoch, epoch + 1) if self.shuffle_documents else (0, 0)
        keys = np.array(
            [self._key(epoch, _WINDOWS), *(self._key(each, _DOCUMENTS) for each in orders)],
            np.uint64,
        )
        ends = np.empty(0, np.int64)
        if self.shuffle_documents or domain.is_cut:
            ends = document_ends(self.file.lengths, keys[1])
        phase = first * self.seq_length - epoch * tokens
        order = (stop - first, tokens, phase, keys, ends)
        return View(self.file, first, stop - first, read_epoch, order)

    def _key(self, epoch: int, purpose: int) -> int:
        return permutation_key(self.seed, self.domain.order_number, epoch, purpose)


def megatron_view(
    domain: DomainTokens,
    file: TokenFile,
    num_samples: int,
    seq_length: int,
    seed: int,
    cache: Path | None = None,
) -> View:
    """Return a view of a domain's samples in the order of Megatron's GPTDataset.

    Args:
        domain: domain to read.
        file: sequences of the domain.
        num_samples: number of samples needed; the order depends on it. Epochs are whole, so the
            view may have more.
        seq_length: tokens of a sample.
        seed: seed of numpy's RandomState.
        cache: folder of cached indices; None keeps them in memory only.

    Raises:
        UserError: if the cache cannot be written.
    """
    # Copy the lengths, which are not aligned in the .idx.
    lengths = np.array(file.lengths, np.int32)

    def build() -> Arrays:
        return megatron_indices(domain, lengths, num_samples, seq_length, seed)

    key = {
        "order": "megatron",
        "version": MEGATRON_INDICES_VERSION,
        "lengths": hashlib.sha256(lengths.tobytes()).hexdigest(),
        "num_samples": num_samples,
        "seq_length": seq_length,
        "seed": seed,
    }
    arrays = cached_arrays(cache, key, build) if cache else build()
    documents, windows, shuffle = (arrays[name] for name in ("documents", "windows", "shuffle"))
    return View(file, 0, len(shuffle), read_indexed, (documents, windows, shuffle))


def megatron_indices(
    domain: DomainTokens, lengths: NDArray[np.int32], num_samples: int, seq_length: int, seed: int
) -> Arrays:
    """Build Megatron's document, sample and shuffle index of a domain.

    Args:
        domain: domain to read.
        lengths: [num_sequences] int32, length of each sequence in tokens.
        num_samples: number of samples needed.
        seq_length: tokens of a sample.
        seed: seed of numpy's RandomState.

    Returns:
        documents [epochs * sequences] int32; windows [samples + 1, 2] int32 or int64; shuffle
        [samples] uint32 or int64.
    """
    num_epochs = max(1, math.ceil((num_samples * seq_length + 1) / domain.tokens))
    samples_before_final = ((num_epochs - 1) * domain.tokens - 1) // seq_length
    samples_per_epoch = (domain.tokens - 1) // seq_length
    separate_final = num_epochs > 1 and num_samples - samples_before_final < int(
        SEPARATE_FINAL_EPOCH_BELOW * samples_per_epoch
    )
    # As in Megatron, one random state shuffles the documents first, and then the samples.
    random_state = np.random.RandomState(seed)
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), num_epochs)
    _shuffle_parts(documents, len(lengths) * (num_epochs - separate_final), random_state)
    windows = helpers.build_sample_idx(
        lengths, documents, seq_length, num_epochs, domain.tokens, True, True
    )
    total = len(windows) - 1
    shuffled = np.arange(total, dtype=np.int64 if total >= WIDE_SHUFFLE_FROM else np.uint32)
    _shuffle_parts(shuffled, samples_before_final if separate_final else total, random_state)
    return {"documents": documents, "windows": windows, "shuffle": shuffled}


def _shuffle_parts(
    array: NDArray[Any], first_part: int, random_state: np.random.RandomState
) -> None:
    random_state.shuffle(array[:first_part])
    if first_part < len(array):
        random_state.shuffle(array[first_part:])


def cached_arrays(folder: Path, key: dict[str, Any], build: Callable[[], Arrays]) -> Arrays:
    """Map the arrays of ``key`` from ``folder``; if they are missing, build and store them.

    An entry is one file: the arrays, their layout as JSON, the length of the layout, and the
    SHA-256 of all of these. Entries are written atomically, so that processes can share the folder,
    and verified when read; a damaged entry is rebuilt with a warning. Entries are memory-mapped, so
    that the ranks of a machine share one copy.

    Args:
        folder: folder of the cache.
        key: JSON values that determine the arrays.
        build: function that returns the arrays by name.

    Raises:
        UserError: if the folder cannot be written, or the new entry cannot be read back.
    """
    entry = folder / f"{sha256_of_json(key)}.arrays"
    try:
        return _read(entry)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as problem:
        warnings.warn(f"{entry} is damaged ({problem}) and is rebuilt", stacklevel=2)
    blocks: list[Any] = []
    layout: dict[str, Any] = {}
    offset = 0
    for name, array in build().items():
        layout[name] = (array.dtype.str, array.shape, offset)
        blocks += [array.reshape(-1).view(np.uint8), bytes(-array.nbytes % 64)]
        offset += array.nbytes + len(blocks[-1])
    text = json.dumps(layout).encode()
    digest = hashlib.sha256()
    try:
        with replacing(entry) as temporary, temporary.open("wb") as stream:
            for block in (*blocks, text, len(text).to_bytes(8)):
                stream.write(block)
                digest.update(block)
            stream.write(digest.digest())
        return _read(entry)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot write {entry}, or read it back: {error}; free space, or choose another folder"
        ) from error


def _read(entry: Path) -> Arrays:
    content = map_file(entry)
    if hashlib.sha256(content[:-32].data).digest() != content[-32:].tobytes():
        raise ValueError("its checksum differs")
    length = int.from_bytes(content[-40:-32].tobytes())
    layout = json.loads(content[-40 - length : -40].tobytes())
    return {
        name: np.frombuffer(content, dtype, math.prod(shape), offset).reshape(shape)
        for name, (dtype, shape, offset) in layout.items()
    }
