"""How far the weights would move with other windows: a bootstrap over windows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from megatron_chameleon.mixture.checks import Array, as_matrix
from megatron_chameleon.mixture.weights import DegenerateScoreWarning

# Values held at once in the means of a block of resamples and in one domain's counts, 256 MiB each:
# every block goes through all domains, so where these are many small blocks cost dearly.
BLOCK_VALUES = 1 << 25


@dataclasses.dataclass(frozen=True, eq=False)
class BootstrapResult:
    """Weights over resamples, and percentile intervals."""

    weights: Array
    """[num_resamples, k] float64; each row sums to 1."""

    low: Array
    """[k] lower end of the interval of each weight."""

    high: Array
    """[k] upper end."""

    confidence: float
    """Share of the resamples that the intervals hold."""

    num_windows: tuple[int, ...]
    """Windows per domain."""


def bootstrap_weights(
    window_vectors: Sequence[npt.ArrayLike],
    weight_fn: Callable[[Array], Array],
    num_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> BootstrapResult:
    """Percentile intervals of domain weights under resampling of windows (Efron's bootstrap).

    In each resample every domain draws as many of its windows as it has, with replacement,
    independently of the other domains; the means of the drawn windows are the embeddings that
    ``weight_fn`` turns into weights. The draws of domain i depend on (seed, i) and on its number
    of windows only, and asking for more resamples keeps the first ones.

    The intervals show the noise of the windows, not of the proxy's training. Windows count as
    independent; where many come from one document, the true intervals are wider. A domain with one
    window draws that window every time: its embedding is fixed, and if every domain has one
    window all intervals have zero width, which says nothing about certainty. Resampling adds
    noise of its own to the embeddings, so with few windows an interval can lie to one side of the
    weight computed from all windows.

    Args:
        window_vectors: k arrays [n_i, h], the embedding of each window of a domain; any real
            dtype, sums are taken in float64.
        weight_fn: maps embeddings [k, h] to weights [k], for example
            ``chameleon_weight_fn("pretrain")``.
        num_resamples: how many times to resample; at least 2.
        seed: not negative.
        confidence: in (0, 1).

    Raises:
        ValueError: no domain, a domain without windows, windows of differing width, a value that
            is not finite (domain and window are named), or an argument out of range.

    Warns:
        DegenerateScoreWarning: once, with the number of resamples in which ``weight_fn`` warned.
    """
    windows = _checked_windows(window_vectors)
    _check_settings(num_resamples, seed, confidence)
    weights = np.empty((num_resamples, len(windows)))
    num_degenerate = 0
    done = 0
    for means in _resampled_means(windows, num_resamples, seed):
        for embeddings in means:
            weights[done], degenerate = _call_weight_fn(weight_fn, embeddings)
            num_degenerate += degenerate
            done += 1
    if num_degenerate:
        warnings.warn(
            f"leverage scores were held at a limit in {num_degenerate} of {num_resamples} "
            "resamples, so the intervals are partly bounds: use more windows per domain",
            DegenerateScoreWarning,
            stacklevel=2,
        )
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(weights, [tail, 1.0 - tail], axis=0)
    return BootstrapResult(weights, low, high, confidence, tuple(len(w) for w in windows))


def resampled_means_direct(
    window_vectors: Sequence[npt.ArrayLike], num_resamples: int, seed: int
) -> Array:
    """Mean of the drawn windows, copied out one draw at a time: the plain reference.

    Returns:
        [num_resamples, k, h] float64, the embeddings that ``bootstrap_weights`` weighs.
    """
    windows = _checked_windows(window_vectors)
    means = np.empty((num_resamples, len(windows), windows[0].shape[1]))
    for domain, vectors in enumerate(windows):
        generator = _generator(seed, domain)
        for resample in range(num_resamples):
            drawn = generator.integers(len(vectors), size=len(vectors))
            means[resample, domain] = np.asarray(vectors[drawn], dtype=np.float64).mean(axis=0)
    return means


def _resampled_means(
    windows: list[npt.NDArray[np.floating]], num_resamples: int, seed: int
) -> Iterator[Array]:
    """Blocks [r, k, h] of resampled domain means, num_resamples in all.

    The mean of n drawn windows is counts @ windows / n, a matrix product per domain in place of
    a copy of the windows per resample.
    """
    num_domains, width = len(windows), windows[0].shape[1]
    largest = max(num_domains * width, max(len(vectors) for vectors in windows))
    block = max(1, BLOCK_VALUES // largest)
    generators = [_generator(seed, domain) for domain in range(num_domains)]
    for start in range(0, num_resamples, block):
        size = min(block, num_resamples - start)
        means = np.empty((size, num_domains, width))
        for domain, vectors in enumerate(windows):
            counts = _draw_counts(generators[domain], len(vectors), size)
            means[:, domain] = counts @ vectors / len(vectors)
        yield means


def _draw_counts(generator: np.random.Generator, num_windows: int, num_resamples: int) -> Array:
    """[num_resamples, num_windows] how often each window is drawn; each row sums to num_windows."""
    counts = np.empty((num_resamples, num_windows))
    for row in counts:
        drawn = generator.integers(num_windows, size=num_windows)
        row[:] = np.bincount(drawn, minlength=num_windows)
    return counts


def _generator(seed: int, domain: int) -> np.random.Generator:
    return np.random.default_rng([seed, domain])


def _call_weight_fn(weight_fn: Callable[[Array], Array], embeddings: Array) -> tuple[Array, bool]:
    """Weights of one resample, and whether it was degenerate; other warnings pass through."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DegenerateScoreWarning)
        weights = weight_fn(embeddings)
    if np.shape(weights) != embeddings.shape[:1]:
        raise ValueError(
            f"weight_fn gave shape {np.shape(weights)} for {len(embeddings)} domains: "
            "it must map embeddings [k, h] to weights [k]"
        )
    degenerate = False
    for entry in caught:
        if issubclass(entry.category, DegenerateScoreWarning):
            degenerate = True
        else:
            warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)
    return weights, degenerate


def _checked_windows(window_vectors: Sequence[npt.ArrayLike]) -> list[npt.NDArray[np.floating]]:
    """The windows as arrays in their own dtype: a float64 copy of every window would be large."""
    if len(window_vectors) == 0:
        raise ValueError("window_vectors is empty: pass one array of windows per domain")
    windows: list[npt.NDArray[np.floating]] = []
    for domain, vectors in enumerate(window_vectors):
        checked = as_matrix(vectors, f"window_vectors[{domain}]", "window")
        width = windows[0].shape[1] if windows else checked.shape[1]
        if checked.shape[1] != width:
            raise ValueError(
                f"window_vectors[{domain}] has {checked.shape[1]} features but window_vectors[0] "
                f"has {width}: embed all domains with one proxy and layer"
            )
        windows.append(np.asarray(vectors))
    return windows


def _check_settings(num_resamples: int, seed: int, confidence: float) -> None:
    if num_resamples < 2:
        raise ValueError(f"num_resamples is {num_resamples}: an interval needs at least 2")
    if seed < 0:
        raise ValueError(f"seed is {seed}: it must not be negative")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}: it must lie between 0 and 1, such as 0.95")
