"""What weighing needs of the store's window vectors, in memory that is bounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import EmbeddingStore
from megatron_chameleon.mixture import group_size, grouped_windows
from megatron_chameleon.mixture.checks import Array


@dataclasses.dataclass(frozen=True, eq=False)
class DomainWindows:
    """The windows of k domains, summed up."""

    means: Array
    """[k, h] float64, the domain embeddings."""
    means_of_half: Array
    """[k, h] float64, of a random half of each domain's windows."""
    resampled: list[NDArray[np.floating]]
    """k arrays [n_i, h] that the bootstrap draws from: windows, or means of groups of them."""
    counts: tuple[int, ...]
    """Windows of each domain."""
    group: int
    """Windows in a group, 1 where they are resampled one by one."""


def read_windows(store: EmbeddingStore, names: Sequence[str], seed: int) -> DomainWindows:
    """Read the vectors of the domains ``names``, one domain at a time.

    Args:
        store: holds all of them.
        names: in the order of the result.
        seed: of the draw of halves and groups.

    Raises:
        UserError: if a file of the store is damaged.
    """
    means, halves, resampled, counts = [], [], [], []
    most = max(store.domains[name].windows for name in names)
    group = group_size(len(names), most, store.hidden_size)
    for name in names:
        vectors = store.vectors(name)
        order = np.random.default_rng([seed, len(vectors)]).permutation(len(vectors))
        half = vectors[order[: max(1, len(vectors) // 2)]]
        means.append(vectors.mean(axis=0, dtype=np.float64))
        halves.append(half.mean(axis=0, dtype=np.float64))
        resampled.append(grouped_windows(vectors, group, seed))
        counts.append(len(vectors))
    return DomainWindows(np.stack(means), np.stack(halves), resampled, tuple(counts), group)
