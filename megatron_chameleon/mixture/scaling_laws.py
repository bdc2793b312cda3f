"""Power laws of losses over training steps or model sizes: L(x) = c + (x0 / x)^a.

Ye et al.: Data Mixing Laws, ICLR 2025, section 4 (nested scaling laws).
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.optimize import minimize_scalar

from megatron_chameleon.mixture.checks import Array

EXPONENTS = (0.02, 3.0)
FEWEST_POINTS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class PowerLaws:
    """One law a curve, all with the same exponent."""

    constant: Array
    """[curves] c, the loss without end of x, not negative."""
    factor: Array
    """[curves] x0^a / unit^a, not negative: what the loss lies above c at x = ``unit``."""
    exponent: float
    """a, shared: single curves of a few points do not tell it (the study ties it as well)."""
    unit: float
    """x is counted in this, so that numbers stay near 1."""

    def predict(self, x: float) -> Array:
        """The losses [curves] at ``x``."""
        losses: Array = self.constant + self.factor * (x / self.unit) ** -self.exponent
        return losses


def fit_power_laws(x: Array, losses: Array) -> PowerLaws:
    """Least squares over all curves, exact in c and x0 for each exponent (variable projection).

    Args:
        x: [points] training steps or parameters, rising, above 0.
        losses: [curves, points], finite.

    Raises:
        ValueError: for fewer than three points, which any exponent fits, or x that does not rise.
    """
    if len(x) < FEWEST_POINTS:
        raise ValueError(f"{len(x)} points: a power law takes {FEWEST_POINTS} or more")
    if not (x[0] > 0 and (np.diff(x) > 0).all()):
        raise ValueError("x must rise, from above 0")
    unit = float(x[-1])

    def error(log_exponent: float) -> float:
        curve = (x / unit) ** -np.exp(log_exponent)
        constant, factor = _lines(curve, losses)
        residuals = constant[:, None] + factor[:, None] * curve - losses
        return float((residuals**2).sum())

    # The error may have more than one valley, so the search starts around the best of a row.
    row = np.log(np.geomspace(*EXPONENTS, 41))
    best = int(np.argmin([error(value) for value in row]))
    around = (row[max(best - 1, 0)], row[min(best + 1, len(row) - 1)])
    found = minimize_scalar(error, bounds=around, method="bounded", options={"xatol": 1e-10})
    exponent = float(np.exp(found.x))
    constant, factor = _lines((x / unit) ** -exponent, losses)
    return PowerLaws(constant, factor, exponent, unit)


def _lines(curve: Array, losses: Array) -> tuple[Array, Array]:
    """The c and f [curves], not negative, with the least squares of c + f * curve - losses."""
    centered = curve - curve.mean()
    factor = np.maximum((losses - losses.mean(axis=1, keepdims=True)) @ centered, 0.0)
    factor /= (centered**2).sum()
    constant = losses.mean(axis=1) - factor * curve.mean()
    # Where c would be negative, it is 0 and the line goes through the origin.
    through_origin = np.maximum(losses @ curve, 0.0) / (curve**2).sum()
    negative = constant < 0
    return np.where(negative, 0.0, constant), np.where(negative, through_origin, factor)
