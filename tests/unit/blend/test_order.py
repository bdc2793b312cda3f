from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.blend import order
from megatron_chameleon.blend.order import CHUNK, MAX_SAMPLES, BlendOrder
from tests.unit.blend.inputs import hard_weights

WEIGHTS = st.lists(st.floats(0, 1) | st.just(1.0), min_size=1, max_size=12).filter(
    lambda weights: sum(weights) > 1e-6
)


def reference(blended, num_samples):
    """Domain of each of the first samples, found by counting samples at each node of the tree."""
    half = order.HALF_BITS
    counted = [0] * len(blended._nodes)
    domains = []
    for _ in range(num_samples):
        at = 0
        while at >= 0:
            share, share_low, offset, offset_low, *children = (int(n) for n in blended._nodes[at])
            share, offset = (share << half) + share_low, (offset << half) + offset_low
            lefts = [
                min(max(int(Fraction(share * n + offset, 1 << 2 * half).__floor__()), 0), n)
                for n in (counted[at], counted[at] + 1)
            ]
            counted[at] += 1
            at = children[0] if lefts[1] > lefts[0] else children[1]
        domains.append(~at)
    return domains


@settings(deadline=None)
@given(WEIGHTS, st.integers(1, 300), st.data())
def test_locations_and_counts_match_the_reference(weights, num_samples, data):
    deficits = data.draw(
        st.none() | st.lists(st.floats(-2, 2), min_size=len(weights), max_size=len(weights))
    )
    blended = BlendOrder(weights, deficits)
    expected = reference(blended, num_samples)
    samples = np.random.default_rng(0).permutation(num_samples)
    domains, numbers = blended.locate(samples)
    for sample, domain, number in zip(samples, domains, numbers, strict=True):
        assert domain == expected[sample]
        assert number == expected[:sample].count(domain)
    counts = np.bincount(expected, minlength=len(weights))
    assert blended.counts(num_samples).tolist() == counts.tolist()
    assert all(weights[domain] > 0 for domain in expected)


@pytest.mark.parametrize("num_domains", [2, 7, 40, 500])
def test_counts_follow_difficult_weights(num_domains):
    for weights in hard_weights(num_domains):
        if weights.min() >= 0 < weights.max():
            domains, _ = BlendOrder(weights.tolist()).locate(np.arange(5000))
            counts = np.cumsum(np.eye(num_domains)[domains], axis=0)
            targets = np.arange(1, 5001)[:, None] * (weights / weights.sum())
            assert np.abs(counts - targets).max() < 1.25, weights


def test_no_sample_is_lost_or_repeated_near_the_maximum():
    weights = np.random.default_rng(0).dirichlet(np.ones(300))
    blended = BlendOrder(weights.tolist())
    first, size = MAX_SAMPLES - 3 * CHUNK - 5, 3 * CHUNK + 5
    domains, numbers = blended.locate(np.arange(first, MAX_SAMPLES))
    before = blended.counts(first)
    assert before.sum() == first
    assert np.abs(before - weights * first).max() < 1.1
    for domain in range(300):
        own = numbers[domains == domain]
        np.testing.assert_array_equal(own, before[domain] + np.arange(len(own)))
    assert len(domains) == size


def test_the_order_changes_only_with_its_version():
    # A run resumed on another machine must continue with the same order.
    weights, places = [0.5, 0.3, 0.15, 0.05], np.arange(10)
    domains, _ = BlendOrder(weights).locate(np.arange(20))
    far, numbers = BlendOrder(weights, [0.5, -1, 0, 0.5]).locate(10**10 + places)
    assert (order.VERSION, domains.tolist()) == (2, ORDER)
    assert (far.tolist(), numbers[:5].tolist()) == (FAR, NUMBERS)


ORDER = [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1]
FAR = [3, 0, 1, 0, 2, 0, 1, 0, 1, 0]
NUMBERS = [500000000, 5000000001, 2999999999, 5000000002, 1500000000]
