"""The blended index: which domain, and which of its samples, gives each sample of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

# Domain numbers are int16, as in Megatron's index.
MAX_DOMAINS = np.iinfo(np.int16).max

BlendedIndex = tuple[NDArray[np.int16], NDArray[np.int64]]


def build_blending_indices(
    weights: ArrayLike, num_samples: int, out: BlendedIndex | None = None
) -> BlendedIndex:
    """The greedy blend of Megatron, bit-identical to its compiled helper.

    Sample n goes to the domain i with the largest ``weights[i] * max(n, 1) - count[i]``, where
    count[i] is how many of the samples before n it has had; ties go to the lowest i. All of it is
    in float64, since rounding decides near-ties. A weight of 0 can win such a tie: leave domains
    out that must give nothing.

    Args:
        weights: [num_domains] float64, usually summing to 1.
        num_samples: samples to lay out.
        out: arrays to write into, of the shapes and types returned.

    Returns:
        dataset_index [num_samples] int16, the domain of each sample, and
        dataset_sample_index [num_samples] int64, its number within that domain.

    Raises:
        ValueError: for weights that are not one to 32,767 finite numbers, a negative number of
            samples, or ``out`` arrays that do not fit.
    """
    checked = _checked_weights(weights)
    dataset_index, dataset_sample_index = _output_arrays(num_samples, out)
    if checked.size == 1:
        dataset_index.fill(0)
        dataset_sample_index[:] = np.arange(num_samples)
    else:
        _fill(checked, dataset_index, dataset_sample_index)
    return dataset_index, dataset_sample_index


def blending_indices_reference(weights: Sequence[float], num_samples: int) -> BlendedIndex:
    """:func:`build_blending_indices` in plain Python, for tests."""
    counts = [0] * len(weights)
    dataset_index = np.empty(num_samples, np.int16)
    dataset_sample_index = np.empty(num_samples, np.int64)
    for sample in range(num_samples):
        errors = [
            weight * float(max(sample, 1)) - float(count)
            for weight, count in zip(weights, counts, strict=True)
        ]
        domain = errors.index(max(errors))
        dataset_index[sample] = domain
        dataset_sample_index[sample] = counts[domain]
        counts[domain] += 1
    return dataset_index, dataset_sample_index


def _checked_weights(weights: ArrayLike) -> NDArray[np.float64]:
    array = np.ascontiguousarray(weights, dtype=np.float64)
    if array.ndim != 1 or not 1 <= array.size <= MAX_DOMAINS:
        raise ValueError(
            f"weights of shape {array.shape}: a blend is made of 1 to {MAX_DOMAINS} domains"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"weight {np.flatnonzero(~np.isfinite(array))[0]} is not finite")
    return array


def _output_arrays(num_samples: int, out: BlendedIndex | None) -> BlendedIndex:
    if num_samples < 0:
        raise ValueError(f"num_samples is {num_samples}; it cannot be negative")
    if out is None:
        return np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    _check_output(out[0], np.int16, num_samples)
    _check_output(out[1], np.int64, num_samples)
    return out


def _check_output(array: NDArray[Any], dtype: type, num_samples: int) -> None:
    if array.shape != (num_samples,) or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"out holds {array.dtype} of shape {array.shape}; contiguous {dtype.__name__} of shape "
            f"({num_samples},) is needed"
        )


# No fastmath and no fused multiply-add: either would change the rounding that decides ties.
@njit(cache=True, nogil=True)
def _fill(
    weights: NDArray[np.float64],
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
) -> None:
    # Counts as float64 spare a conversion in the inner loop; they are exact up to 2**53.
    counts = np.zeros(weights.size, np.float64)
    errors = np.empty(weights.size, np.float64)
    for sample in range(dataset_index.size):
        position = float(sample) if sample > 0 else 1.0
        for domain in range(weights.size):
            errors[domain] = weights[domain] * position - counts[domain]
        chosen = _first_largest(errors)
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = np.int64(counts[chosen])
        counts[chosen] += 1.0


# Four running maxima do not wait for each other, and looking for the value afterwards keeps the
# position out of the loop: half the time of one argmax loop at a thousand domains.
@njit(cache=True, nogil=True)
def _first_largest(values: NDArray[np.float64]) -> int:
    """Lowest position of the largest of ``values``; none of them is NaN."""
    a = b = c = d = values[0]
    in_fours = values.size - values.size % 4
    for i in range(0, in_fours, 4):
        a = values[i] if values[i] > a else a
        b = values[i + 1] if values[i + 1] > b else b
        c = values[i + 2] if values[i + 2] > c else c
        d = values[i + 3] if values[i + 3] > d else d
    for i in range(in_fours, values.size):
        a = values[i] if values[i] > a else a
    largest = max(max(a, b), max(c, d))
    position = 0
    while values[position] != largest:
        position += 1
    return position
