"""RegMix: sample mixtures, fit a regression to their losses, and find the predicted best mixture.

Liu et al.: RegMix: Data Mixture as Regression for Language Model Pre-training, ICLR 2025. The
mixtures are Dirichlet samples around the domains' token shares (section 3.1 and the code).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy.spatial import cKDTree

from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import Predict

# Mixtures are chosen in blocks of this size. A block is chosen from its own samples and the unused
# samples of earlier blocks.
BLOCK = 32


@dataclasses.dataclass(frozen=True)
class SamplingRule:
    """Distribution of a swarm's mixtures; the defaults are RegMix's."""

    prior_exponent: float = 0.5
    """Exponent of the prior: the Dirichlet's mean is prior^exponent, renormalised. An exponent
    below 1 makes the mean flatter than the prior."""
    min_strength: float = 0.1
    max_strength: float = 5.0
    """The Dirichlet's concentration, the sum of its parameters, is one of ``num_strengths`` values
    log-spaced from ``min_strength`` to ``max_strength``, times :meth:`strength_factor`."""
    num_strengths: int = 15
    strength_domains: int = 17
    """Number of domains up to which the concentration is not scaled; RegMix has 17."""
    max_upweighting: float = 15.0
    """A sample with a weight above this many times its domain's prior is rejected."""
    smallest_weight: float = 2e-4
    """Step of the weights: all weights are multiples of it, and smaller weights become 0."""
    oversampling: int = 100
    """Samples per mixture. Mixtures are chosen at random from the samples that remain after
    rejected ones and duplicates are removed, so that frequent samples (a single domain) are not
    chosen more often."""
    near_duplicate: float = 1e-5
    """Mixtures within this L1 distance are duplicates."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        if not 0 <= self.prior_exponent < math.inf:
            raise ValueError(f"prior exponent {self.prior_exponent}: must be finite and >= 0")
        if not 0 < self.min_strength <= self.max_strength < math.inf:
            raise ValueError(
                f"min_strength {self.min_strength:g}, max_strength {self.max_strength:g}: must "
                "be finite and > 0, and min_strength <= max_strength"
            )
        if self.strength_domains < 1:
            raise ValueError(f"strength_domains {self.strength_domains}: must be >= 1")
        if not 0 < self.smallest_weight <= 1:
            raise ValueError(f"smallest_weight {self.smallest_weight}: must be > 0 and <= 1")
        if not self.max_upweighting >= 1:
            raise ValueError(f"max_upweighting {self.max_upweighting}: must be >= 1")

    def strength_factor(self, num_domains: int) -> float:
        """Return the factor of the concentration for mixtures of ``num_domains`` domains.

        Concentrations that suit 17 domains give nearly all of the weight to a few of many domains.
        Their mean number in a mixture grows with the concentration per domain, so that a factor in
        proportion to the number of domains keeps only their share constant. With the square of the
        ratio, a mixture contains most of 50 domains, as it does of 7. RegMix's range is not reduced
        for fewer domains, since its code uses it for any number, and since mixtures of one domain
        would then dominate.
        """
        return max(1.0, num_domains / self.strength_domains) ** 2


REGMIX_SAMPLING = SamplingRule()


def sample_mixtures(
    prior: Array, count: int, seed: int, rule: SamplingRule = REGMIX_SAMPLING
) -> Array:
    """Sample ``count`` mixtures; mixture i depends only on ``prior``, ``seed``, ``rule`` and i.

    The mixtures are distinct, and a swarm can be extended later.

    Weights are quantized by the largest-remainder method, so every row sums to 1; rounding each
    weight separately, as RegMix's code does, would leave the sums off by a few steps.

    Args:
        prior: [k] token shares, >= 0, not all 0; they need not sum to 1. A domain with share 0 gets
            no weight.
        count: number of mixtures.
        seed: random seed.
        rule: distribution of the mixtures.

    Returns:
        [count, k] float64; rows sum to 1 up to rounding.

    Raises:
        ValueError: if the samples contain fewer than ``count`` distinct mixtures.
    """
    shares = prior / prior.sum()
    present = np.flatnonzero(shares)
    chosen = left = np.empty((0, present.size))
    num_blocks, rejected = -(-count // BLOCK), 0
    for block in range(num_blocks):
        rng = np.random.default_rng([seed, block])
        sampled = _dirichlet_samples(shares[present], BLOCK * rule.oversampling, rng, rule)
        allowed = sampled[(sampled <= rule.max_upweighting * shares[present]).all(axis=1)]
        rejected += len(sampled) - len(allowed)
        found = drop_near_duplicates(quantize(allowed, rule.smallest_weight), rule.near_duplicate)
        known = np.concatenate([chosen, left])
        if len(known) and len(found):
            # query() excludes distances equal to its bound, so pass the next larger number.
            beyond = np.nextafter(rule.near_duplicate, np.inf)
            nearest, _ = cKDTree(known).query(found, p=1, distance_upper_bound=beyond)
            found = found[np.isinf(nearest)]
        left = np.concatenate([left, found])
        left = left[rng.permutation(len(left))]
        chosen, left = np.concatenate([chosen, left[:BLOCK]]), left[BLOCK:]
    if len(chosen) < count:
        raise ValueError(
            f"only {len(chosen)} distinct mixtures in "
            f"{num_blocks * BLOCK * rule.oversampling} samples ({rejected} had a weight above "
            f"{rule.max_upweighting:g} times its prior), fewer than {count}: request "
            "fewer, or allow more upweighting"
        )
    mixtures = np.zeros((count, shares.size))
    mixtures[:, present] = chosen[:count]
    return mixtures


def _dirichlet_samples(
    shares: Array, count: int, rng: np.random.Generator, rule: SamplingRule
) -> Array:
    """Sample [count, k] from Dirichlets with mean ``shares``^exponent and random concentrations."""
    center = shares**rule.prior_exponent
    center /= center.sum()
    strengths = np.geomspace(rule.min_strength, rule.max_strength, rule.num_strengths)
    strengths *= rule.strength_factor(shares.size)
    chosen = rng.integers(rule.num_strengths, size=count)
    sampled = np.empty((count, shares.size))
    for number, strength in enumerate(strengths):
        rows = np.flatnonzero(chosen == number)
        sampled[rows] = rng.dirichlet(center * strength, size=rows.size)
    return sampled


def quantize(mixtures: Array, smallest: float) -> Array:
    """Quantize ``mixtures`` [n, k] in steps of ``smallest``; smaller weights are 0, rows sum to 1.

    A step is 1 / round(1 / smallest). Each weight is rounded down, and the missing steps go
    to the largest remainders: no weight is off by a step or more.
    """
    steps = round(1 / smallest)
    kept = np.where(mixtures < smallest, 0.0, mixtures)
    empty = kept.sum(axis=1) == 0  # all weights are too small: keep the largest
    kept[empty, mixtures[empty].argmax(axis=1)] = 1.0
    exact = kept / kept.sum(axis=1, keepdims=True) * steps
    whole = np.floor(exact)
    missing = steps - whole.sum(axis=1, keepdims=True)
    # A domain that was set to 0 has remainder 0, so it gets a step only after all others.
    order = np.argsort(-(exact - whole), axis=1, kind="stable")
    rank = np.argsort(order, axis=1, kind="stable")
    return (whole + (rank < missing)) / steps


def drop_near_duplicates(mixtures: Array, distance: float) -> Array:
    """Return the rows of ``mixtures`` [n, k] in lexicographic order, without near-duplicates.

    A row is dropped if its L1 distance to the last kept row is <= ``distance``.
    """
    ordered = mixtures[np.lexsort(mixtures.T)]
    kept: list[Array] = []
    for row in ordered:
        if not kept or np.abs(row - kept[-1]).sum() > distance:
            kept.append(row)
    return np.array(kept).reshape(-1, mixtures.shape[1])


@dataclasses.dataclass(frozen=True)
class TreeSettings:
    """Settings of gradient-boosted trees; all other parameters are LightGBM's defaults.

    RegMix's code stops early on its test set, which is then no longer held out. Here the number of
    trees is fixed.
    """

    num_trees: int = 1000
    learning_rate: float = 0.01
    min_runs_in_leaf: int | None = None
    """LightGBM's min_data_in_leaf; if None, the value of :func:`runs_in_leaf`."""
    seed: int = 42


def runs_in_leaf(settings: TreeSettings, num_runs: int) -> int:
    """Return the minimum number of runs per leaf of trees fitted to ``num_runs`` runs.

    The default is LightGBM's 20, and an eighth of the runs if there are fewer than 160. On RegMix's
    public runs, an eighth raises the rank correlation of held-out Pile-CC losses from 0.90 to 0.94
    with 64 runs. With 32 runs, an eighth gives 0.89, whereas leaves of 20 runs would allow no split
    at all.
    """
    if settings.min_runs_in_leaf is not None:
        return settings.min_runs_in_leaf
    return max(1, min(20, num_runs // 8))


def fit_trees(
    mixtures: Array,
    losses: Array,
    settings: TreeSettings,
    on_fit: Callable[[], object] = lambda: None,
) -> Predict:
    """Fit LightGBM with squared error, one model per loss.

    Args:
        mixtures: [n, k] float64.
        losses: [n, m] float64, finite.
        settings: settings of the trees.
        on_fit: called after each of the m fits.

    Returns:
        A function from mixtures [any, k] to losses [any, m].

    Raises:
        ImportError, OSError: LightGBM is not installed, or its library cannot be loaded.
    """
    import lightgbm

    parameters = {
        "objective": "regression",
        "learning_rate": settings.learning_rate,
        "min_data_in_leaf": runs_in_leaf(settings, len(losses)),
        "seed": settings.seed,
        "deterministic": True,
        "force_row_wise": True,  # otherwise, timings determine the layout
        "verbosity": -1,
        # On hundreds of runs, threads wait for each other longer than they compute.
        "num_threads": 1,
    }
    boosters = []
    for column in losses.T:
        data = lightgbm.Dataset(mixtures, column, params={"verbosity": -1})
        boosters.append(lightgbm.train(parameters, data, num_boost_round=settings.num_trees))
        on_fit()

    def predict(others: Array) -> Array:
        predicted = np.empty((len(others), len(boosters)))
        for column, booster in enumerate(boosters):
            predicted[:, column] = booster.predict(others)
        return predicted

    return predict


@dataclasses.dataclass(frozen=True, eq=False)
class SampledOptimum:
    """Predicted optimum: the mean of the sampled mixtures with the lowest predictions."""

    weights: Array
    """[k], summing to 1."""
    spread: Array
    """Standard deviation [k] of the weights among the best samples."""
    low: Array
    """5% quantile [k] of the weights among the best samples."""
    high: Array
    """[k] 95% quantile."""
    predicted_best: float
    """Predicted value of the target, averaged over the best samples."""
    predicted_all: float
    """Mean over all samples."""


def sampled_optimum(
    objective: Callable[[Array], Array],
    prior: Array,
    *,
    num_draws: int = 100_000,
    num_best: int = 128,
    seed: int = 42,
    on_draws: Callable[[int], object] = lambda count: None,
) -> SampledOptimum:
    """Average the best ``num_best`` of ``num_draws`` Dirichlet(prior) samples (paper, section 3.4).

    Args:
        objective: mixtures [n, k] -> values [n] to minimize.
        prior: [k] parameters of the Dirichlet distribution, after scaling them to sum to 1; >= 0,
            not all 0.
        num_draws: number of mixtures to sample.
        num_best: number of best mixtures that are averaged; at most ``num_draws``.
        seed: random seed.
        on_draws: called with the number of samples evaluated since its last call.
    """
    shares = prior / prior.sum()
    present = np.flatnonzero(shares)
    sampled = np.zeros((num_draws, shares.size))
    sampled[:, present] = np.random.default_rng(seed).dirichlet(shares[present], size=num_draws)
    predicted = np.empty(num_draws)
    for first in range(0, num_draws, 1000):  # blocks allow progress reports
        block = slice(first, first + 1000)
        predicted[block] = objective(sampled[block])
        on_draws(len(predicted[block]))
    chosen = np.argsort(predicted, kind="stable")[:num_best]
    best = sampled[chosen]
    low, high = np.quantile(best, [0.05, 0.95], axis=0)
    return SampledOptimum(
        weights=best.mean(axis=0),
        spread=best.std(axis=0),
        low=low,
        high=high,
        predicted_best=float(predicted[chosen].mean()),
        predicted_all=float(predicted.mean()),
    )
