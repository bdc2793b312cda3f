"""Tolerances that hold on every processor.

The order of a float32 sum depends on the vector width, the BLAS and the number of threads, and its
rounding error with it. A bound measured on one machine fails on the next; the error of a reference
of the same precision, measured where the test runs, does not.
"""

from __future__ import annotations

import torch


def assert_as_near(
    result: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, factor: float = 4.0
) -> None:
    """Assert that ``result``'s largest error is at most ``factor`` times ``reference``'s.

    The reference's error counts as at least one rounding of the largest value.

    Args:
        result: any shape and precision.
        reference: [the same], an independent computation at the precision under test.
        exact: [the same], in float64.
        factor: small enough that a step in a lower precision fails.

    Raises:
        AssertionError: naming the element with the largest error.
    """
    rounding = torch.finfo(reference.dtype).eps * float(exact.abs().max())
    error = float((reference.double() - exact).abs().max())
    torch.testing.assert_close(result.double(), exact, atol=factor * max(error, rounding), rtol=0.0)
