from __future__ import annotations

import pytest

from megatron_chameleon.blend.schedule import MixtureSchedule, Phase

THREE = MixtureSchedule((Phase(0, (1, 0)), Phase(10, (1, 3)), Phase(25, (0, 2))))


def test_each_sample_has_the_weights_of_its_phase():
    weights = [THREE.weights_at(sample) for sample in (0, 9, 10, 24, 25, 10**9)]
    assert weights == [(1, 0), (1, 0), (1, 3), (1, 3), (0, 2), (0, 2)]
    with pytest.raises(ValueError, match="numbered from 0"):
        THREE.weights_at(-1)


def test_a_change_replaces_later_phases():
    assert THREE.changed(12, [5, 5]).phases == (*THREE.phases[:2], Phase(12, (5, 5)))
    assert THREE.changed(10, [5, 5]).phases == (THREE.phases[0], Phase(10, (5, 5)))
    assert THREE.changed(0, [5, 5]) == MixtureSchedule.fixed([5, 5])


def test_until_returns_the_phases_that_have_begun():
    assert THREE.until(0) == THREE.until(10) == THREE.phases[:1]
    assert THREE.until(11) == THREE.phases[:2]
    assert THREE.until(26) == THREE.phases


def test_spans_cover_the_run_once():
    assert [length for _, length in THREE.spans(40)] == [10, 15, 15]
    assert [length for _, length in THREE.spans(12)] == [10, 2]
    assert [length for _, length in THREE.spans(10)] == [10]


def test_target_samples_sum_over_phases():
    assert THREE.target_samples(30) == pytest.approx([10 + 15 / 4, 15 * 3 / 4 + 5])
    assert sum(THREE.target_samples(7)) == 7
    assert THREE.target_samples(0) == [0, 0]


@pytest.mark.parametrize(
    "phases",
    [
        (),
        (Phase(1, (1,)),),
        (Phase(0, (1,)), Phase(0, (1,))),
        (Phase(0, (1,)), Phase(5, (1,)), Phase(3, (1,))),
    ],
)
def test_phases_begin_at_zero_and_follow_each_other(phases):
    with pytest.raises(ValueError, match="phases begin at"):
        MixtureSchedule(phases)


def test_all_phases_have_weights_for_the_same_domains():
    with pytest.raises(ValueError, match=r"weights for \[1, 2\] domains"):
        THREE.changed(40, [1])
