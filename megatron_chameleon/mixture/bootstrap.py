"""Bootstrap over windows: confidence intervals of the weights."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, as_matrix
from megatron_chameleon.mixture.weights import DegenerateScoreWarning

# Maximum number of values (256 MiB) in a block of resampled means, and in the window counts of one
# domain. Each block reads the windows of all domains, so smaller blocks are slower.
BLOCK_VALUES = 1 << 25


@dataclasses.dataclass(frozen=True, eq=False)
class BootstrapResult:
    """Weights of every resample, and percentile intervals of the weights."""

    weights: Array
    """Weights [num_resamples, k] float64; each row sums to 1."""

    low: Array
    """Lower ends [k] of the intervals of the weights."""

    high: Array
    """Upper ends [k] of the intervals of the weights."""


def bootstrap_weights(
    window_vectors: Sequence[npt.ArrayLike],
    weight_fn: Callable[[Array], Array],
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> BootstrapResult:
    """Compute percentile intervals of domain weights by resampling windows (Efron's bootstrap).

    Each resample samples n_i of the n_i windows of every domain, with replacement and independently
    of the other domains; ``weight_fn`` maps the means of the sampled windows to weights. The
    sampled windows of domain i depend only on (seed, i) and n_i. A larger ``num_resamples`` adds
    resamples without changing the first ones.

    The intervals reflect the sampling of windows, not the randomness of the proxy's training.
    Windows are treated as independent; if many come from one document, the true intervals are
    wider. A domain with one window has the same embedding in every resample; if every domain has
    one window, the intervals have zero width and no meaning. Resampling adds noise to the
    embeddings, so with few windows an interval can lie to one side of the weight computed from all
    windows.

    Args:
        window_vectors: k arrays [n_i, h], the embedding of each window of a domain; any real dtype;
            summed in float64.
        weight_fn: maps embeddings [k, h] to weights [k].
        num_resamples: how many times to resample; at least 2.
        seed: not negative.
        confidence: in (0, 1).

    Raises:
        ValueError: if there is no domain, a domain has no windows, windows differ in width, or a
            value is not finite (the message names domain and window).

    Warns:
        DegenerateScoreWarning: once, with the number of resamples in which ``weight_fn`` warned.
    """
    windows = _checked_windows(window_vectors)
    rows, num_degenerate = [], 0
    for embeddings in _resampled_means(windows, num_resamples, seed):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DegenerateScoreWarning)
            rows.append(weight_fn(embeddings))
        others = [each for each in caught if each.category is not DegenerateScoreWarning]
        num_degenerate += len(others) < len(caught)
        for each in others:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    weights = np.array(rows)
    if weights.shape != (num_resamples, len(windows)):
        raise ValueError("weight_fn must map embeddings [k, h] to weights [k]")
    if num_degenerate:
        warnings.warn(
            f"leverage scores were clipped in {num_degenerate} of {num_resamples} "
            "resamples, so the intervals depend on the score limits: use more windows per domain",
            DegenerateScoreWarning,
            stacklevel=2,
        )
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(weights, [tail, 1.0 - tail], axis=0)
    return BootstrapResult(weights, low, high)


def _resampled_means(
    windows: list[npt.NDArray[np.floating]], num_resamples: int, seed: int
) -> Iterator[Array]:
    """Yield the domain means [k, h] of each resample.

    The mean of n sampled windows is counts @ windows / n, one matrix product per domain and block
    of resamples, instead of a copy of the windows per resample.
    """
    num_domains, width = len(windows), windows[0].shape[1]
    largest = max(num_domains * width, max(len(vectors) for vectors in windows))
    block = max(1, BLOCK_VALUES // largest)
    generators = [np.random.default_rng([seed, domain]) for domain in range(num_domains)]
    for start in range(0, num_resamples, block):
        size = min(block, num_resamples - start)
        means = np.empty((size, num_domains, width))
        for domain, vectors in enumerate(windows):
            count = len(vectors)
            counts = np.empty((size, count))
            for row in counts:
                sampled = generators[domain].integers(count, size=count)
                row[:] = np.bincount(sampled, minlength=count)
            means[:, domain] = counts @ vectors / count
        yield from means


def _checked_windows(window_vectors: Sequence[npt.ArrayLike]) -> list[npt.NDArray[np.floating]]:
    """Check the windows and return them as arrays; the dtype is kept to save memory."""
    if len(window_vectors) == 0:
        raise ValueError("window_vectors is empty: pass one array of windows per domain")
    windows: list[npt.NDArray[np.floating]] = []
    for domain, vectors in enumerate(window_vectors):
        width = as_matrix(vectors, f"window_vectors[{domain}]", "window").shape[1]
        windows.append(np.asarray(vectors))
        if width != windows[0].shape[1]:
            raise ValueError(
                f"window_vectors[{domain}] has {width} features but window_vectors[0] has "
                f"{windows[0].shape[1]}: embed all domains with one proxy and layer"
            )
    return windows


# Maximum number of values in memory in the windows of all domains: 1 GiB in float32, enough for 80
# domains of 4096 windows with 768 features.
MAX_VALUES = 1 << 28
# Minimum number of groups per domain: a variance that is estimated from 32 groups has a relative
# error of 1 / sqrt(2 * 31) = 13%.
FEWEST_GROUPS = 32


def group_size(num_domains: int, num_windows: int, width: int) -> int:
    """Choose the windows per group so that all groups together have at most ``MAX_VALUES`` values.

    The result is 1 (no grouping) if the windows themselves have at most ``MAX_VALUES`` values.

    Args:
        num_domains: k.
        num_windows: windows per domain.
        width: h, features of a window.
    """
    most = max(FEWEST_GROUPS, MAX_VALUES // max(1, num_domains * width))
    return max(1, math.ceil(num_windows / most))


def grouped_windows(
    vectors: npt.NDArray[np.floating], size: int, seed: int
) -> npt.NDArray[np.floating]:
    """Average random groups of ``size`` windows, to resample the averages instead of windows.

    The mean of n / g resampled groups of g windows has the same variance as the mean of n resampled
    windows, because a group's mean has 1 / g of a window's variance. Windows beyond the last whole
    group are left out, and the group means are shifted so that their mean is that of all windows.

    Args:
        vectors: [n, h], any real dtype; summed in float64.
        size: g, windows per group; reduced if there would be fewer than ``FEWEST_GROUPS`` groups.
        seed: random seed of the grouping.

    Returns:
        [n // g, h] float32 if g > 1; ``vectors`` itself if g is 1.
    """
    size = min(size, max(1, len(vectors) // FEWEST_GROUPS))
    if size == 1:
        return vectors
    order = np.random.default_rng([seed, len(vectors)]).permutation(len(vectors))
    count = len(vectors) // size
    groups = vectors[order[: count * size]].reshape(count, size, -1)
    means = groups.mean(axis=1, dtype=np.float64)
    means += vectors.mean(axis=0, dtype=np.float64) - means.mean(axis=0)
    return means.astype(np.float32)


def outweighing_probability(
    resampled: BootstrapResult, one: npt.ArrayLike, other: npt.ArrayLike
) -> Array:
    """Compute the share of resamples in which one domain outweighs another; a tie counts as half.

    Args:
        resampled: the weights of every resample.
        one: [n] positions of domains.
        other: [n] positions of the domains to compare them with.

    Returns:
        [n] float64.
    """
    first, second = (resampled.weights[:, np.asarray(each, dtype=int)] for each in (one, other))
    difference = first - second
    return (difference > 0).mean(axis=0) + (difference == 0).mean(axis=0) / 2
