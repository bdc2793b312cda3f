"""The blended index: which domain, and which of its samples, gives each sample of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_chameleon.blend.fillers import fill_index
from megatron_chameleon.blend.threads import usable_threads

# Domain numbers are int16, as in Megatron's index.
MAX_DOMAINS = np.iinfo(np.int16).max

BlendedIndex = tuple[NDArray[np.int16], NDArray[np.int64]]


def build_blending_indices(
    weights: ArrayLike,
    num_samples: int,
    out: BlendedIndex | None = None,
    num_threads: int | None = None,
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
        num_threads: by default one for every core this process may run on.

    Returns:
        dataset_index [num_samples] int16, the domain of each sample, and
        dataset_sample_index [num_samples] int64, its number within that domain.

    Raises:
        ValueError: for weights that are not one to 32,767 finite numbers, a negative number of
            samples, or ``out`` arrays that do not fit.
    """
    checked = checked_weights(weights)
    dataset_index, dataset_sample_index = _output_arrays(num_samples, out)
    if checked.size == 1:
        dataset_index.fill(0)
        dataset_sample_index[:] = np.arange(num_samples)
    else:
        outputs = dataset_index, dataset_sample_index
        fill_index(checked, num_samples, outputs, usable_threads(num_threads))
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


def checked_weights(weights: ArrayLike) -> NDArray[np.float64]:
    """``weights`` as an array of their own, or a ValueError that says what is wrong."""
    # Adding 0 turns -0 into 0, whose bits are those of no other number.
    array = np.ascontiguousarray(weights, dtype=np.float64) + 0.0
    if array.ndim != 1 or not 1 <= array.size <= MAX_DOMAINS:
        raise ValueError(
            f"weights of shape {array.shape}: a blend is made of 1 to {MAX_DOMAINS} domains"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"weight {np.flatnonzero(~np.isfinite(array))[0]} is not finite")
    return array


def checked_num_samples(num_samples: int) -> int:
    """``num_samples``, or a ValueError where it is negative."""
    if num_samples < 0:
        raise ValueError(f"num_samples is {num_samples}; it cannot be negative")
    return num_samples


def _output_arrays(num_samples: int, out: BlendedIndex | None) -> BlendedIndex:
    checked_num_samples(num_samples)
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
