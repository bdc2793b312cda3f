"""The order in which a domain gives its samples, without end."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.blend.gather import ShuffledDocuments, ShuffledWindows, View
from megatron_chameleon.blend.index_cache import cached_arrays
from megatron_chameleon.blend.permutation import epoch_permutation, permutation_key
from megatron_chameleon.blend.sample_index import build_sample_index
from megatron_chameleon.blend.shuffle import shuffle
from megatron_chameleon.blend.token_data import DomainData
from megatron_chameleon.corpus.indexed import TokenFile

# Megatron shuffles the last epoch on its own where less than this share of it is used, so that
# its documents do not crowd out those of the whole epochs.
SEPARATE_FINAL_EPOCH_BELOW = 0.80
# From here on sample numbers do not fit into uint32, by Megatron's reckoning.
WIDE_SHUFFLE_FROM = np.iinfo(np.uint32).max - 1

# Raised by every change of what megatron_indices returns for the same arguments, so that no cache
# gives what an older release built.
MEGATRON_INDICES_VERSION = 1

# What a permutation is for; with the same seed, two of them have nothing in common.
_OF_DOCUMENTS, _OF_WINDOWS = 0, 1


class Stream(Protocol):
    """A domain's samples by number, from 0 on."""

    def view_of(self, number: int) -> View:
        """Where sample ``number`` and its neighbours are read."""
        ...


class MegatronStream:
    """Megatron's order for a number of samples that is known beforehand.

    Documents, samples and their order are those of its GPTDataset for the same seed and number.

    Args:
        domain: which sequences.
        file: their tokens.
        num_samples: how many samples are needed; epochs are whole, so there may be more.
        seq_length: tokens per sample.
        seed: of numpy's RandomState.
        cache: folder in which the indices are kept and looked for, if any.
        num_threads: by default one for every core this process may run on.
    """

    def __init__(
        self,
        domain: DomainData,
        file: TokenFile,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache: Path | None = None,
        num_threads: int | None = None,
    ) -> None:
        lengths = aligned_lengths(file)

        def build() -> dict[str, NDArray[Any]]:
            return megatron_indices(domain, lengths, num_samples, seq_length, seed, num_threads)

        if cache is None:
            arrays = build()
        else:
            key = index_key(domain, lengths, num_samples, seq_length, seed)
            arrays = cached_arrays(cache, key, build)
        self._view = ShuffledDocuments(file, file.starts, lengths, first=0, **arrays)

    def view_of(self, number: int) -> View:
        """The one view that holds all samples."""
        if number >= self._view.num_samples:
            raise IndexError(f"sample {number} of {self._view.num_samples}")
        return self._view


def index_key(
    domain: DomainData, lengths: NDArray[np.int32], num_samples: int, seq_length: int, seed: int
) -> dict[str, Any]:
    """All that decides :func:`megatron_indices`, as JSON values."""
    return {
        "order": "megatron",
        "version": MEGATRON_INDICES_VERSION,
        "first": domain.first,
        "lengths": hashlib.sha256(lengths[domain.first : domain.stop].tobytes()).hexdigest(),
        "num_samples": num_samples,
        "seq_length": seq_length,
        "seed": seed,
    }


def megatron_index_bytes(domain: DomainData, num_samples: int, seq_length: int) -> int:
    """What :func:`megatron_indices` takes at least: with entries of 32 bits."""
    num_epochs = -(-num_samples * seq_length // domain.tokens)
    return 4 * num_epochs * (domain.stop - domain.first) + 12 * num_samples


def megatron_indices(
    domain: DomainData,
    lengths: NDArray[np.int32],
    num_samples: int,
    seq_length: int,
    seed: int,
    num_threads: int | None = None,
) -> dict[str, NDArray[Any]]:
    """Megatron's three indices of a domain, as the fields of :class:`ShuffledDocuments`.

    Args:
        domain: which sequences.
        lengths: [num_sequences] int32, of all sequences of the file.
        num_samples: how many samples are needed.
        seq_length: tokens per sample.
        seed: of numpy's RandomState.
        num_threads: by default one for every core this process may run on.

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
    # The order of the documents is drawn before that of the samples, from one stream.
    random_state = np.random.RandomState(seed)
    sequences = np.arange(domain.first, domain.stop, dtype=np.int32)
    documents = np.tile(sequences, num_epochs)
    _shuffle_parts(documents, len(sequences) * (num_epochs - separate_final), random_state)
    windows = build_sample_index(
        lengths, documents, seq_length, num_epochs, domain.tokens, num_threads=num_threads
    )
    total = len(windows) - 1
    shuffled = np.arange(total, dtype=np.int64 if total >= WIDE_SHUFFLE_FROM else np.uint32)
    _shuffle_parts(shuffled, samples_before_final if separate_final else total, random_state)
    return {"documents": documents, "windows": windows, "shuffle": shuffled}


def _shuffle_parts(
    array: NDArray[Any], first_part: int, random_state: np.random.RandomState
) -> None:
    shuffle(random_state, array[:first_part])
    if first_part < len(array):
        shuffle(random_state, array[first_part:])


@dataclasses.dataclass(frozen=True)
class EpochWindows:
    """How a domain's endless run of tokens, epoch after epoch, is cut into windows.

    Window j begins at token ``j * seq_length``, so none is lost where epochs meet; it belongs to
    the epoch in which it begins.
    """

    tokens_per_epoch: int
    seq_length: int

    def epoch_of(self, number: int) -> int:
        """The epoch to which sample ``number`` belongs."""
        return number * self.seq_length // self.tokens_per_epoch

    def first(self, epoch: int) -> int:
        """The first window of ``epoch``."""
        return -(-epoch * self.tokens_per_epoch // self.seq_length)

    def count(self, epoch: int) -> int:
        """Windows of ``epoch``."""
        return self.first(epoch + 1) - self.first(epoch)

    def phase(self, epoch: int) -> int:
        """Token of ``epoch`` at which its first window begins."""
        return self.first(epoch) * self.seq_length - epoch * self.tokens_per_epoch


class EpochStream:
    """Epoch after epoch, each in an order that seed, ``order_key`` and epoch alone decide.

    It need not know how many samples will be asked for. Documents are shuffled within an epoch,
    and so are the windows cut from them.

    Args:
        domain: which sequences.
        file: their tokens.
        seq_length: tokens per sample.
        seed: of the order.
    """

    def __init__(self, domain: DomainData, file: TokenFile, seq_length: int, seed: int) -> None:
        self._domain, self._file = domain, file
        self._lengths = aligned_lengths(file)
        self._seed, self._domain_number = seed, order_number(domain.order_key)
        self._epochs = EpochWindows(domain.tokens, seq_length)

    def view_of(self, number: int) -> View:
        """The epoch of sample ``number``."""
        epoch, epochs = self._epochs.epoch_of(number), self._epochs
        documents = self._documents(epoch)
        ends = np.cumsum(self._lengths[documents], dtype=np.int64)
        begins = epochs.phase(epoch) + epochs.seq_length * np.arange(epochs.count(epoch))
        # The last window, with its last label, may reach into the next epoch.
        missing = int(begins[-1]) + epochs.seq_length + 1 - int(ends[-1])
        positions = np.searchsorted(ends, begins, side="right")
        offsets = begins - np.where(positions > 0, ends[positions - 1], 0)
        if missing > 0:
            documents = np.concatenate([documents, self._beginning(epoch + 1, missing)])
        order = epoch_permutation(len(begins), self._seed, self._domain_number, epoch, _OF_WINDOWS)
        return ShuffledDocuments(
            file=self._file,
            starts=self._file.starts,
            lengths=self._lengths,
            documents=documents,
            # Neither sequences nor their tokens can be more than int32 counts.
            windows=np.stack([positions, offsets], axis=1).astype(np.int32),
            shuffle=order if len(order) >= WIDE_SHUFFLE_FROM else order.astype(np.uint32),
            first=epochs.first(epoch),
        )

    def _documents(self, epoch: int) -> NDArray[np.int32]:
        """The sequences of the domain in the order of ``epoch``."""
        size = self._domain.stop - self._domain.first
        order = epoch_permutation(size, self._seed, self._domain_number, epoch, _OF_DOCUMENTS)
        return (order + self._domain.first).astype(np.int32)

    def _beginning(self, epoch: int, num_tokens: int) -> NDArray[np.int32]:
        """As many of an epoch's sequences as hold its first ``num_tokens`` tokens."""
        documents = self._documents(epoch)
        ends = np.cumsum(self._lengths[documents], dtype=np.int64)
        return documents[: int(np.searchsorted(ends, num_tokens)) + 1]


class FeistelStream:
    """Epoch after epoch of windows in file order, shuffled by a permutation that needs no memory.

    Documents stay side by side as they are in the file; only the windows are shuffled. It needs
    no more than a few numbers, however large the domain.

    Args:
        domain: which sequences.
        file: their tokens.
        seq_length: tokens per sample.
        seed: of the order.
    """

    def __init__(self, domain: DomainData, file: TokenFile, seq_length: int, seed: int) -> None:
        self._file, self._tokens = file, domain.tokens
        self._begin = int(file.pointers[domain.first]) // file.dtype.itemsize
        self._seed, self._domain_number = seed, order_number(domain.order_key)
        self._epochs = EpochWindows(domain.tokens, seq_length)

    def view_of(self, number: int) -> View:
        """The epoch of sample ``number``."""
        epoch = self._epochs.epoch_of(number)
        return ShuffledWindows(
            file=self._file,
            begin=self._begin,
            num_tokens=self._tokens,
            phase=self._epochs.phase(epoch),
            first=self._epochs.first(epoch),
            num_samples=self._epochs.count(epoch),
            key=permutation_key(self._seed, self._domain_number, epoch, _OF_WINDOWS),
        )


def order_number(order_key: str) -> int:
    """A number that stands for a domain, so that its order does not hang on its place."""
    return int.from_bytes(hashlib.sha256(order_key.encode("utf-8")).digest()[:4])


def aligned_lengths(file: TokenFile) -> NDArray[np.int32]:
    """A file's lengths in memory: in the .idx they are not aligned as compiled loops need them."""
    return np.array(file.lengths, dtype=np.int32)
