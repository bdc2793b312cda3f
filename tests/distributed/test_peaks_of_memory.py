"""What the estimate says each rank holds, beside what real ranks hold."""

from __future__ import annotations

import json

import pytest

from tests.distributed.peak_cases import PEAKS, peak_file, setup_of

TOLERANCE = 0.04
"""The estimate promises a tenth; what is left out in these layouts is less than this."""


@pytest.mark.parametrize("name", PEAKS)
def test_the_estimate_is_near_the_peak_of_every_rank(results, name):
    from megatron_chameleon.model.memory import estimate_memory

    results.require(name)
    measured = json.loads(peak_file(results.places, name).read_text())
    stages = estimate_memory(setup_of(PEAKS[name]))
    ranks_of_a_stage = len(measured) // len(stages)
    assert len(measured) == PEAKS[name].ranks
    for rank, peak in enumerate(measured):
        assert stages[rank // ranks_of_a_stage].total == pytest.approx(peak, rel=TOLERANCE)


def test_sequence_parallelism_holds_less(results):
    """Or the estimates could be near because the layouts make no difference."""
    peaks = []
    for name in ("peak-sp2", "peak-tp2"):
        results.require(name)
        peaks.append(max(json.loads(peak_file(results.places, name).read_text())))
    assert peaks[0] < 0.9 * peaks[1]
