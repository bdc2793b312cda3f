"""The blended index and its parts, against megatron.core's compiled helpers and numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from megatron.core.datasets import helpers
from numpy.typing import NDArray

from benchmarks.measure import compared, interleaved, told
from megatron_chameleon.blend.implicit_index import ImplicitBlendingIndices
from megatron_chameleon.blend.index import BlendedIndex, build_blending_indices
from megatron_chameleon.blend.sample_index import build_sample_index
from megatron_chameleon.blend.shuffle import shuffle

REPEATS = 15
# Domains -> repeats. With 1000 domains the compiled helper takes half a minute for each.
BLENDS = {7: REPEATS, 17: REPEATS, 1000: 5}


def measure(
    num_samples: int = 20_000_000,
    implicit_samples: int = 100_000_000,
    shuffled: int = 10_000_000,
    num_documents: int = 1_000_000,
) -> list[dict[str, Any]]:
    """Time all of them; kernels are compiled and every page is touched before, outputs compared."""
    rows = [_blended(num_domains, num_samples) for num_domains in BLENDS]
    rows.append(_implicit(7, implicit_samples))
    rows.append(_shuffle(shuffled))
    rows += [_sample_index(num_documents, seq_length) for seq_length in (512, 2048)]
    return rows


def _blended(num_domains: int, num_samples: int) -> dict[str, Any]:
    weights = _weights(num_domains)
    theirs, ours = _touched(num_samples), _touched(num_samples)
    runs: dict[str, Callable[[], object]] = {
        "ours, one thread": lambda: build_blending_indices(weights, num_samples, ours, 1),
        "ours, two threads": lambda: build_blending_indices(weights, num_samples, ours, 2),
        "theirs": lambda: _by_helper(weights, theirs),
    }
    runs["theirs"]()
    for name in ("ours, one thread", "ours, two threads"):
        ours[0].fill(-1)
        ours[1].fill(-1)
        runs[name]()
        for found, expected in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(found, expected)
    return _tell(
        f"blended index, {num_domains} domains, {num_samples:,} samples",
        interleaved(runs, BLENDS[num_domains]),
    )


def _implicit(num_domains: int, num_samples: int) -> dict[str, Any]:
    weights = _weights(num_domains)
    theirs = _touched(num_samples)
    _by_helper(weights, theirs)
    implicit = ImplicitBlendingIndices(weights, num_samples)
    samples = np.sort(np.random.default_rng(0).integers(0, num_samples, 1000))
    index, numbers = implicit.indices(samples)
    np.testing.assert_array_equal(index, theirs[0][samples])
    np.testing.assert_array_equal(numbers, theirs[1][samples])
    for sample in (0, num_samples // 3, num_samples):
        expected = np.bincount(theirs[0][:sample], minlength=num_domains)
        np.testing.assert_array_equal(implicit.counts(sample), expected)
    seconds = interleaved(
        {
            "ours": lambda: ImplicitBlendingIndices(weights, num_samples),
            "ours, one thread": lambda: ImplicitBlendingIndices(
                weights, num_samples, num_threads=1
            ),
            "theirs": lambda: _by_helper(weights, theirs),
        }
    )
    memory = {
        "ours": ImplicitBlendingIndices(weights, num_samples).nbytes,
        "ours, after reading": implicit.nbytes,
        "theirs": sum(array.nbytes for array in theirs),
    }
    return _tell(
        f"implicit index, {num_domains} domains, {num_samples:,} samples",
        seconds,
        bytes=memory,
        times_smaller={
            name: memory["theirs"] / memory[name] for name in ("ours", "ours, after reading")
        },
        milliseconds_to_look_up=_look_up_times(implicit),
    )


def _look_up_times(implicit: ImplicitBlendingIndices) -> dict[str, float]:
    """A sample anywhere, and the next 512 in order."""
    rng = np.random.default_rng(1)

    def anywhere() -> None:
        implicit.indices(rng.integers(0, len(implicit), 1))

    place = iter(range(0, len(implicit), 512))

    def next_batch() -> None:
        implicit.indices(np.arange(512) + next(place))

    seconds = interleaved({"a sample anywhere": anywhere, "the next 512": next_batch}, 51)
    return {name: float(np.median(times)) * 1e3 for name, times in seconds.items()}


def _shuffle(size: int) -> dict[str, Any]:
    ours, theirs = np.arange(size, dtype=np.uint32), np.arange(size, dtype=np.uint32)
    states = [np.random.RandomState(5) for _ in range(2)]
    seconds = interleaved(
        {
            "ours": lambda: shuffle(states[0], ours),
            "theirs": lambda: states[1].shuffle(theirs),
        },
        REPEATS,
    )
    np.testing.assert_array_equal(ours, theirs)
    assert states[0].randint(2**31) == states[1].randint(2**31)
    return _tell(f"numpy's RandomState.shuffle, {size:,} numbers", seconds)


def _sample_index(num_documents: int, seq_length: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.2, 1.0, num_documents), 1, 20_000).astype(np.int32)
    order = np.arange(num_documents, dtype=np.int32)
    np.random.RandomState(1234).shuffle(order)
    arguments = lengths, order, seq_length, 1, int(lengths.sum()), True, True

    def ours(threads: int) -> NDArray[Any]:
        return build_sample_index(*arguments, threads)

    for threads in (1, 2):
        np.testing.assert_array_equal(ours(threads), helpers.build_sample_idx(*arguments))
    seconds = interleaved(
        {
            "ours, one thread": lambda: ours(1),
            "ours, two threads": lambda: ours(2),
            "theirs": lambda: helpers.build_sample_idx(*arguments),
        },
        2 * REPEATS,
    )
    return _tell(
        f"sample index, {num_documents:,} documents, sequence {seq_length}",
        seconds,
    )


def _tell(what: str, seconds: dict[str, list[float]], **more: Any) -> dict[str, Any]:
    row = compared(what, seconds, **more)
    print(told(row), flush=True)
    return row


def _by_helper(weights: NDArray[np.float64], out: BlendedIndex) -> None:
    helpers.build_blending_indices(*out, weights, weights.size, out[0].size, False)


def _weights(num_domains: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).dirichlet(np.ones(num_domains))


def _touched(num_samples: int) -> BlendedIndex:
    """Arrays whose pages are there: the first writing of a page costs more than what is written."""
    return np.full(num_samples, -1, np.int16), np.full(num_samples, -1, np.int64)
