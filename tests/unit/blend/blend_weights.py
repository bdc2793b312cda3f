"""Weights that are difficult to blend, shared by the tests of the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]


def hard_weights(num_domains: int, seed: int = 0) -> list[Weights]:
    """Difficult weights [num_domains], some of which are rejected from users."""
    rng = np.random.default_rng([seed, num_domains])
    even = rng.dirichlet(np.ones(num_domains))
    rare, very_rare, some_zero = even.copy(), even.copy(), even.copy()
    half = max(1, num_domains // 2)
    rare[:half] = 10.0 ** -rng.uniform(3, 7, half)
    very_rare[-half:] = 1e-12
    some_zero[:-1:3] = 0.0
    concentrated = rng.dirichlet(np.full(num_domains, 0.05))
    powers_of_two = 0.5 ** np.minimum(np.arange(1.0, num_domains + 1), num_domains - 1)
    some_negative = np.where(np.arange(num_domains) % 3 == 0, -even, even)
    normalized = [w / w.sum() for w in (rare, very_rare, some_zero)]
    equal = [np.full(num_domains, value) for value in (1 / num_domains, 0.0, 1e-12, 5e-324)]
    sums = [2 * even, even / 2, -even]
    return [even, concentrated, powers_of_two, some_negative, *normalized, *equal, *sums]
