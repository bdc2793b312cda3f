from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.blend import fillers, greedy
from megatron_chameleon.blend.fillers import Filler, checkpoints, fill_index
from tests.unit.blend.blend_weights import hard_weights


@pytest.fixture
def small_parts(monkeypatch):
    """Kernels and threads for a few samples, too."""
    monkeypatch.setattr(fillers, "FEW_ERRORS", 100)
    monkeypatch.setattr(fillers, "SMALLEST_PART", 1000)
    monkeypatch.setattr(fillers, "FIRST_PIECE", 64)


@pytest.fixture(params=["a good guess", "a wrong guess", "an impossible guess"])
def guesses(request, monkeypatch):
    """What threads start from; whatever it is, the result is exact."""

    def wrong(self, sample):
        counts = np.zeros(self.weights.size)
        if sample > 0 and request.param == "a wrong guess":
            counts[0] = sample
        elif sample > 0:
            counts[:] = 2.0**40
        return counts

    if request.param != "a good guess":
        monkeypatch.setattr(Filler, "guess", wrong)


def by_the_rule(weights, num_samples):
    found = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    greedy.fill(weights, np.zeros(weights.size), 0, num_samples, *found, greedy.NO_TOPS)
    return found


@pytest.mark.usefixtures("small_parts", "guesses")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_domains", [2, 7, 40, 600])
def test_any_number_of_threads_follows_the_rule(num_domains, num_threads):
    num_samples = 23_456
    for name, weights in hard_weights(num_domains).items():
        expected = by_the_rule(weights, num_samples)
        found = np.full(num_samples, -1, np.int16), np.full(num_samples, -1, np.int64)
        fill_index(weights, num_samples, found, num_threads)
        np.testing.assert_array_equal(found[0], expected[0], name)
        np.testing.assert_array_equal(found[1], expected[1], name)


# Blocks that lanes can take as they are, that they cannot, and longer than all samples.
@pytest.mark.usefixtures("small_parts", "guesses")
@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("block_size", [1, 77, 512, 20_000])
@pytest.mark.parametrize("num_domains", [7, 40, 600])
def test_checkpoints_are_the_counts_before_each_block(num_domains, block_size, num_threads):
    num_samples = min(19_999, 400 * block_size)
    for name, weights in hard_weights(num_domains, seed=2).items():
        index, _ = by_the_rule(weights, num_samples)
        filler = Filler(weights, num_samples, keep=False)
        found = checkpoints(filler, num_samples, block_size, num_threads)
        assert found.shape == (num_samples // block_size + 1, num_domains)
        for block in np.unique(np.linspace(0, len(found) - 1, 40).astype(int)):
            before = np.bincount(index[: block * block_size], minlength=num_domains)
            np.testing.assert_array_equal(found[block], before, name)


def test_weights_that_overflow_are_filled_sample_by_sample():
    weights = np.array([1e300, 1e305, -1e300, 1e-300])
    num_samples = fillers.FEW_ERRORS
    found = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    fill_index(weights, num_samples, found, 2)
    for array, expected in zip(found, by_the_rule(weights, num_samples), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_copy_for_another_thread_shares_nothing_that_changes():
    weights = hard_weights(7)["even"]
    filler = Filler(weights, 10_000_000, keep=True)
    other = filler.for_another_thread()
    assert other.lanes is not filler.lanes
    expected = by_the_rule(weights, 300_000)
    found = np.empty(300_000, np.int16), np.empty(300_000, np.int64)
    counts = np.zeros(7)
    filler.fill(counts, 0, 100_000, (found[0], found[1]))
    filler.fill(counts, 100_000, 200_000, (found[0][100_000:], found[1][100_000:]))
    other.fill(counts, 200_000, 300_000, (found[0][200_000:], found[1][200_000:]))
    for array, others in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, others)
