"""What paired seeds say of base models that differ in their mixture: spreads and differences.

Everything is about y[m, s], the average perplexity of the model trained by mixture m with seed s.
Models of one seed start from the same weights and draw with the same seed, so that what a seed does
to all of them is taken out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEAST_RATIO = 2.0
"""Mixtures count as told apart where their spread is so many times that between seeds."""
# Student's t, two-sided 95%, for 1 to 10 degrees of freedom; the last serves for more as well, for
# which it is a little wide.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A paired difference over seeds: its mean, its standard error, and how many seeds there are.

    ``is_clear`` says that the 95% interval by Student's t does not hold 0.
    """

    mean: float
    standard_error: float
    num_seeds: int

    @property
    def half_width(self) -> float:
        """Of the 95% interval."""
        return T_95[min(self.num_seeds - 1, len(T_95)) - 1] * self.standard_error

    @property
    def is_clear(self) -> bool:
        """Whether the 95% interval lies on one side of 0."""
        return abs(self.mean) > self.half_width


def difference(ours: Array, theirs: Array) -> Difference:
    """``ours`` [s] less ``theirs`` [s], paired by seed.

    The standard error is that of the mean of the differences, with s - 1 degrees of freedom.
    """
    gaps = ours - theirs
    error = float(gaps.std(ddof=1)) / math.sqrt(len(gaps))
    return Difference(float(gaps.mean()), error, len(gaps))


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far mixtures lie apart, and how far seeds do.

    Attributes:
        mixtures: standard deviation, over mixtures, of their means over seeds.
        seeds: pooled standard deviation within mixtures after the seed's effect is taken out: the
            root of the sum of the squared residuals of y[m, s] = mixture m + seed s, over their
            (m - 1)(s - 1) degrees of freedom.
    """

    mixtures: float
    seeds: float

    @property
    def ratio(self) -> float:
        """Spread between mixtures over spread between seeds; infinite where seeds do nothing.

        Without any effect of the mixture it is around 1 / sqrt(number of seeds).
        """
        if self.seeds == 0:
            return math.inf if self.mixtures > 0 else 0.0
        return self.mixtures / self.seeds

    @property
    def is_told_apart(self) -> bool:
        """Whether the ratio is ``LEAST_RATIO`` or more."""
        return self.ratio >= LEAST_RATIO


def spread(averages: Array) -> Spread:
    """The two spreads of ``averages`` [m, s], for at least two mixtures and two seeds."""
    num_mixtures, num_seeds = averages.shape
    by_mixture = averages.mean(axis=1, keepdims=True)
    by_seed = averages.mean(axis=0, keepdims=True)
    residuals = averages - by_mixture - by_seed + averages.mean()
    freedom = (num_mixtures - 1) * (num_seeds - 1)
    return Spread(
        mixtures=float(by_mixture.std(ddof=1)),
        seeds=math.sqrt(float((residuals**2).sum()) / freedom),
    )
