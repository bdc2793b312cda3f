"""Weights that are hard to blend by, shared by the tests of the kernels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Weights = NDArray[np.float64]


def hard_weights(num_domains: int, seed: int = 0) -> dict[str, Weights]:
    """By name, [num_domains] each; some of them no user should give."""
    rng = np.random.default_rng([seed, num_domains])
    even = rng.dirichlet(np.ones(num_domains))
    rare, very_rare, zeros = even.copy(), even.copy(), even.copy()
    half = max(1, num_domains // 2)
    rare[:half] = 10.0 ** -rng.uniform(3, 7, half)
    very_rare[-half:] = 1e-12
    zeros[:-1:3] = 0.0
    signs = np.where(np.arange(num_domains) % 3 == 0, -1.0, 1.0)
    return {
        "even": even,
        "concentrated": rng.dirichlet(np.full(num_domains, 0.05)),
        "equal": np.full(num_domains, 1 / num_domains),
        "powers of two": 0.5 ** np.minimum(np.arange(1.0, num_domains + 1), num_domains - 1),
        "rare": rare / rare.sum(),
        "very rare": very_rare / very_rare.sum(),
        "some zero": zeros / zeros.sum(),
        "all zero": np.zeros(num_domains),
        "tiny": np.full(num_domains, 1e-12),
        "subnormal": np.full(num_domains, 5e-324),
        "sum above one": 2 * even,
        "sum below one": even / 2,
        "some negative": even * signs,
        "all negative": -even,
    }
