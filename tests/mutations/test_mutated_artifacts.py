"""Run the real tools on mutated artifacts; tests/mutations/attack.py can run thousands of cases."""

from __future__ import annotations

import pytest

from tests.mutations.attack import KINDS, OUTCOMES, attack

CASES_PER_KIND = 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_mutated_artifacts_are_rejected_or_change_nothing():
    verdicts = list(attack(range(CASES_PER_KIND * len(KINDS)), seed=1))
    assert len(verdicts) == CASES_PER_KIND * len(KINDS)
    assert {v["outcome"] for v in verdicts} >= {"rejected", "unchanged"}
    assert [v for v in verdicts if v["outcome"] not in OUTCOMES] == []
