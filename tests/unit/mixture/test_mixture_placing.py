from __future__ import annotations

import numpy as np
import pytest

from megatron_chameleon.mixture import placed_weights


def test_new_domains_have_their_share_and_old_ones_their_ratios():
    placed = placed_weights([0.4, 0.3, 0.2, 0.1], [0.75, 9.0, 0.25, 9.0], [1, 0, 1, 0])
    np.testing.assert_allclose(placed, [0.45, 0.3, 0.15, 0.1])


def test_without_new_domains_the_old_weights_stay():
    np.testing.assert_allclose(placed_weights([0.2, 0.8], [3, 1], [1, 1]), [0.75, 0.25])


def test_an_old_domain_of_weight_zero_keeps_it():
    np.testing.assert_allclose(
        placed_weights([0.5, 0.25, 0.25], [1, 0, 0], [1, 1, 0]), [0.75, 0, 0.25]
    )


@pytest.mark.parametrize(
    ("before", "is_old", "problem"),
    [([1.0, 2.0], [1, 1], "of one length"), ([0.0, 0.0, 5.0], [1, 1, 0], "no old domain")],
)
def test_what_makes_no_sense_is_refused(before, is_old, problem):
    with pytest.raises(ValueError, match=problem):
        placed_weights([0.5, 0.25, 0.25], before, is_old)
