"""Blended order in closed form: the domain of sample n, without state or an index.

Two domains are merged by due time: sample j of domain i is due at ``(j + 1/2) / weight[i]``, so the
first m samples hold ``floor(m * r + 1/2)`` of a domain whose share is r. More domains are merged in
a binary tree: each node merges two groups of domains of about equal weight. Sorting all domains by
due time at once would let rounding errors add up: with one domain of weight 0.5 and 200 domains of
equal weight, the heavy domain would run 50 samples ahead before the first light domain is due. In
the tree, a node adds at most 1/2 to the error of its children. A node's own error reaches a child
multiplied by the child's share of the node; since shares are about half at every level, the errors
add up to about 1.

The split at a node is integer arithmetic on 52-bit shares, identical on every machine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numba import njit
from numpy.typing import NDArray

# No order samples a domain more often than its target plus this many samples, unless weights change
# by extreme factors; see BlendOrder. Megatron's order stays within 1 sample.
MAX_SURPLUS = 2

VERSION = 2
"""Version of the sample order of ``epoch`` and ``feistel``; raise it whenever one of these orders
changes.

Version 1 chose the domain of each sample as Megatron does, and shuffled epochs with numpy."""

# Maximum samples of a run: the product with half of a share's bits fits into int64.
MAX_SAMPLES = 2**36
# Half of a share's bits. Counts at MAX_SAMPLES are exact to 2**-16 samples.
HALF_BITS = 26
WEIGHT_BITS = 61
# Samples sorted into the tree at a time, so few that the buffers fit the second-level cache.
CHUNK = 8192

# Columns of the tree's nodes: share of the left child and offset, each as upper and lower half of a
# fixed-point number; then both children, as the number of a node, or ``~domain`` (negative).
SHARE, SHARE_LOW, OFFSET, OFFSET_LOW, CHILDREN = range(5)


class BlendOrder:
    """Assign a domain to each sample of a run, or of one phase of a run, by fixed weights.

    Each domain's count stays within 2 samples of its share of the samples so far (largest
    measured: 1.25). When weights change, the next phase corrects each domain's deficit, except for
    domains whose weight drops to nearly 0: deviations stay below 2 samples for moderate changes,
    and up to 5 have been observed for extreme ones. Without knowledge of future weights, no order
    can bound the deviations by a constant: if each change halts the domain just sampled, the last
    of n domains falls 1/2 + ... + 1/n behind (the cup game, Bender et al. 2019, "Achieving optimal
    backlog in multi-processor cup games").

    Args:
        weights: [num_domains], not negative, scaled here to sum to 1. A domain is never sampled if
            its weight is 0, or below 2**-61 of the sum.
        deficits: [num_domains] deficit of each domain before the first sample: target minus actual
            count; default 0.
    """

    def __init__(self, weights: Sequence[float], deficits: Sequence[float] | None = None) -> None:
        self.num_domains = len(weights)
        total = math.fsum(weights)
        shares = [int(weight / total * 2**WEIGHT_BITS) for weight in weights]
        self._nodes = _tree(shares, [0.0] * len(weights) if deficits is None else list(deficits))

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the domain of each sample (in any order) and its index within it; both [n]."""
        found = np.empty((2, len(samples)), np.int64)
        _locate(self._nodes, samples, found[0], found[1])
        return found[0], found[1]

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Count each domain's samples among the first ``samples``, [num_domains]."""
        counts = np.zeros(self.num_domains, np.int64)
        _count(self._nodes, samples, counts)
        return counts


def _tree(shares: list[int], deficits: list[float]) -> NDArray[np.int64]:
    """Nodes [>= 1, 6] int64 of the tree; parents come before their children."""
    leaves = _leaves(shares, deficits)
    share_before = [0, *accumulate(shares[leaf] for leaf in leaves)]
    deficit_before = [0.0, *accumulate(deficits[leaf] for leaf in leaves)]
    if len(leaves) == 1:
        return np.array([[0, 0, 0, 0, ~leaves[0], ~leaves[0]]], np.int64)
    nodes: list[list[int]] = []
    # Work list, extended by the loop: the leaves of a subtree, and its parent node with the column
    # that refers to the subtree.
    spans = [(0, len(leaves), [0], 0)]
    for first, stop, parent, column in spans:
        if stop - first == 1:
            parent[column] = ~leaves[first]
            continue
        begin, end = share_before[first], share_before[stop]
        # The split nearest to half of the weight, with at least one leaf on each side.
        split = bisect_left(share_before, (begin + end) // 2, first + 1, stop - 1)
        if split > first + 1 and begin + end > share_before[split - 1] + share_before[split]:
            split -= 1
        share = (share_before[split] - begin) / (end - begin)
        left_deficit = deficit_before[split] - deficit_before[first]
        offset = 0.5 + left_deficit - share * (deficit_before[stop] - deficit_before[first])
        node = [*_halves(share), *_halves(offset), 0, 0]
        parent[column] = len(nodes)
        nodes.append(node)
        spans += [(first, split, node, CHILDREN), (split, stop, node, CHILDREN + 1)]
    return np.array(nodes, np.int64)


def _leaves(shares: list[int], deficits: list[float]) -> list[int]:
    """Domains that are sampled, in the order of the tree's leaves.

    Heavy domains come first, which keeps the tree balanced. Domains with a deficit alternate with
    domains with a surplus, so that the deficit of any group of neighbours stays small.
    """
    by_weight = sorted((i for i, share in enumerate(shares) if share), key=lambda i: shares[i])
    behind = [i for i in by_weight if deficits[i] > 0]
    ahead = [i for i in by_weight if deficits[i] <= 0]
    leaves: list[int] = []
    total = 0.0
    while behind and ahead:
        if total == 0:
            side = behind if shares[behind[-1]] > shares[ahead[-1]] else ahead
        else:
            side = behind if total < 0 else ahead
        leaves.append(side.pop())
        total += deficits[leaves[-1]]
    return leaves + behind[::-1] + ahead[::-1]


def _halves(number: float) -> tuple[int, int]:
    """Split a fixed-point number, which may be negative, into its upper and lower half."""
    return divmod(math.floor(number * 2 ** (2 * HALF_BITS)), 2**HALF_BITS)


@njit(inline="always")
def _floor(high: int, low: int, samples: int) -> int:
    """Return the integer part of a fixed-point number, clipped to the range 0 to ``samples``.

    For ``share * samples + offset``, this is the number of a node's samples in its left child.
    """
    return min(max((high + (low >> HALF_BITS)) >> HALF_BITS, 0), samples)


@njit(cache=True, nogil=True)
def _count(nodes: NDArray[np.int64], samples: int, counts: NDArray[np.int64]) -> None:
    """Add the counts of the first ``samples`` samples to ``counts`` [num_domains]."""
    reached = np.zeros(len(nodes), np.int64)
    reached[0] = samples
    for number in range(len(nodes)):
        node = nodes[number]
        high = reached[number] * node[SHARE] + node[OFFSET]
        left = _floor(high, reached[number] * node[SHARE_LOW] + node[OFFSET_LOW], reached[number])
        for child, count in ((node[CHILDREN], left), (node[CHILDREN + 1], reached[number] - left)):
            if child >= 0:
                reached[child] = count
            else:
                counts[~child] += count


@njit(cache=True, nogil=True)
def _locate(
    nodes: NDArray[np.int64],
    samples: NDArray[np.int64],
    domains: NDArray[np.int64],
    numbers: NDArray[np.int64],
) -> None:
    """Write the domain of each of ``samples`` [n], and its number within the domain.

    Walking down the tree sample by sample would mispredict a branch at every level. Instead each
    node partitions all samples that reach it, without a branch, into the samples of its children.
    """
    size = min(CHUNK, len(samples))
    # The number of each sample within a node, and its place in ``samples``: at each level they are
    # moved from one buffer to the other.
    number, place = np.empty((2, size), np.int64), np.empty((2, size), np.int64)
    starts, stops = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
    source = np.zeros(len(nodes), np.int64)
    for begin in range(0, len(samples), CHUNK):
        starts[:], stops[:] = 0, 0
        stops[0] = min(CHUNK, len(samples) - begin)
        for i in range(stops[0]):
            number[0, i], place[0, i] = samples[begin + i], begin + i
        for at in range(len(nodes)):
            if starts[at] == stops[at]:
                continue
            # Scalars, since the compiler assumes that the stores below may change an array.
            share, share_low = nodes[at, SHARE], nodes[at, SHARE_LOW]
            offset, offset_low = nodes[at, OFFSET], nodes[at, OFFSET_LOW]
            buffer = source[at]
            number_in, place_in = number[buffer], place[buffer]
            number_out, place_out = number[1 - buffer], place[1 - buffer]
            # Samples of the left child are written from the front, samples of the right child from
            # the back.
            front, back = np.uint64(starts[at]), np.uint64(stops[at])
            for i in range(front, back):
                own = number_in[i]
                high, low = own * share + offset, own * share_low + offset_low
                left = _floor(high, low, own)
                is_left = _floor(high + share, low + share_low, own + 1) - left
                to = front if is_left != 0 else back - np.uint64(1)
                number_out[to] = left if is_left != 0 else own - left
                place_out[to] = place_in[i]
                front += np.uint64(is_left)
                back -= np.uint64(1 - is_left)
            middle = np.int64(front)
            for column, start, stop in ((0, starts[at], middle), (1, middle, stops[at])):
                child = nodes[at, CHILDREN + column]
                if child >= 0:
                    starts[child], stops[child], source[child] = start, stop, 1 - buffer
                else:
                    for i in range(start, stop):
                        domains[place_out[i]], numbers[place_out[i]] = ~child, number_out[i]
