"""By how much a mixture is predicted to lower the loss of a target."""

from __future__ import annotations

import dataclasses

CONFIDENCE = 0.9


@dataclasses.dataclass(frozen=True)
class PredictedGain:
    """Predicted target loss of a baseline minus that of a mixture, in the unit of the losses.

    Attributes:
        gain: prediction.
        low: lower end of its interval.
        high: upper end.
        confidence: coverage of the interval.
    """

    gain: float
    low: float
    high: float
    confidence: float

    def describe(self, baseline: str) -> str:
        """Describe the gain of an optimum over ``baseline``."""
        verdict = "not predicted to beat"
        if self.low > 0:
            verdict = "predicted to beat"
        elif self.high < 0:
            verdict = "predicted to be worse than"
        return (
            f"the optimum is {verdict} {baseline} with {self.confidence:.0%} confidence: "
            f"gain {self.gain:.4f} ({self.low:.4f} to {self.high:.4f})"
        )
