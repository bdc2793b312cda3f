from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.blend.implicit_index import RECENT_BLOCKS, ImplicitBlendingIndices
from megatron_chameleon.blend.index import blending_indices_reference, build_blending_indices
from tests.unit.blend.blend_weights import hard_weights


def assert_same(found, expected):
    for array, other in zip(found, expected, strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.integers(1, 300),
    st.integers(1, 400),
    st.data(),
)
def test_any_samples_in_any_order(weights, num_samples, block_size, data):
    index, numbers = blending_indices_reference(weights, num_samples)
    implicit = ImplicitBlendingIndices(weights, num_samples, block_size)
    assert len(implicit) == num_samples
    for _ in range(3):
        samples = np.array(
            data.draw(st.lists(st.integers(0, num_samples - 1), max_size=20)), np.int64
        )
        assert_same(implicit.indices(samples), (index[samples], numbers[samples]))
        before = data.draw(st.integers(0, num_samples))
        expected = np.bincount(index[:before], minlength=len(weights))
        np.testing.assert_array_equal(implicit.counts(before), expected)


@pytest.mark.parametrize("num_domains", [2, 7, 40, 600])
def test_what_the_arrays_hold_at_every_kind_of_weights(num_domains):
    num_samples = 300_000 if num_domains < 100 else 50_000
    samples = np.random.default_rng(0).integers(0, num_samples, 50)
    for weights in hard_weights(num_domains).values():
        index, numbers = build_blending_indices(weights, num_samples)
        implicit = ImplicitBlendingIndices(weights, num_samples, 8192)
        assert_same(implicit.indices(samples), (index[samples], numbers[samples]))
        for sample in (0, 8191, 8192, num_samples // 2, num_samples):
            before = np.bincount(index[:sample], minlength=num_domains)
            np.testing.assert_array_equal(implicit.counts(sample), before)


def test_reading_on_goes_on_from_where_it_was():
    weights = hard_weights(7)["even"]
    index, numbers = build_blending_indices(weights, 50_000)
    implicit = ImplicitBlendingIndices(weights, 50_000, 10_000)
    for start in range(0, 50_000 - 64, 64):
        samples = np.arange(start, start + 64)
        assert_same(implicit.indices(samples), (index[samples], numbers[samples]))


def test_memory_is_flat_in_samples_and_reading():
    weights = hard_weights(7)["even"]
    implicit = ImplicitBlendingIndices(weights, 10_000_000)
    before = implicit.nbytes
    # Counts and weights, against the ten bytes that the arrays hold for each sample.
    assert before == (10_000_000 // 65536 + 1) * 7 * 8 + 7 * 8
    implicit.indices(np.arange(0, 10_000_000, 65536))
    assert implicit.nbytes <= before + RECENT_BLOCKS * 7 * 8
    assert implicit.nbytes * 5000 < 10_000_000 * 10


def test_no_samples():
    implicit = ImplicitBlendingIndices([0.5, 0.5], 0)
    assert len(implicit) == 0
    assert implicit.counts(0).tolist() == [0, 0]
    assert_same(
        implicit.indices(np.empty(0, np.int64)), (np.empty(0, np.int16), np.empty(0, np.int64))
    )


@pytest.mark.parametrize("sample", [-1, 10])
def test_samples_out_of_range_are_refused(sample):
    implicit = ImplicitBlendingIndices([0.5, 0.5], 10)
    with pytest.raises(IndexError, match="of 10"):
        implicit.indices(np.array([3, sample]))


@pytest.mark.parametrize("sample", [-1, 11])
def test_counts_out_of_range_are_refused(sample):
    with pytest.raises(IndexError, match="of 10"):
        ImplicitBlendingIndices([0.5, 0.5], 10).counts(sample)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([0.5, 0.5], 10, 0), "block_size is 0"),
        (([0.5, float("inf")], 10), "weight 1 is not finite"),
        (([0.5, 0.5], -1), "cannot be negative"),
        (([0.5, 0.5], 10, 16, 0), "num_threads is 0"),
    ],
)
def test_refuses_what_is_no_blend(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        ImplicitBlendingIndices(*arguments)


def test_two_threads_read_what_one_does():
    """As a prefetching thread does while the run asks how far each domain has come."""
    num_samples, step, batch = 102_400, 128, 8
    weights = [0.4, 0.3, 0.2, 0.1]
    index, numbers = build_blending_indices(weights, num_samples)
    chosen = np.arange(4) == index.reshape(-1, step)[..., None]
    expected = np.concatenate([np.zeros((1, 4), np.int64), chosen.sum(1).cumsum(0)])
    implicit = ImplicitBlendingIndices(weights, num_samples)
    wrong: list[str] = []
    read = 0

    def read_all():
        nonlocal read
        for start in range(0, num_samples, batch):
            samples = np.arange(start, start + batch)
            found = implicit.indices(samples)
            right = index[samples], numbers[samples]
            if not np.array_equal(np.stack(found), np.stack(right)):
                wrong.append(f"samples from {start} on")
            read = start + batch

    thread = threading.Thread(target=read_all)
    thread.start()
    asked = 0
    while thread.is_alive():
        asked, done = asked + 1, read // step
        for steps in (max(done - 1, 0), done):
            if not np.array_equal(implicit.counts(steps * step), expected[steps]):
                wrong.append(f"counts before step {steps}")
    thread.join()
    assert asked > 100
    assert wrong == []
