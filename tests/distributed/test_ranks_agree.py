"""What one rank finds, all know: damage, a signal, and who takes most memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.agreeing_ranks import LATER_GROUPS, MORE_BYTES, NUM_RANKS, TIMEOUT_MINUTES
from tests.distributed.launch import finish, start, torchrun
from tests.small_corpus import write_small_corpus

SECONDS = 120.0


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each rank was told."""
    root = tmp_path_factory.mktemp("agreeing")
    corpus = write_small_corpus(root / "corpus")
    tokens = corpus.prefix("poems", "valid").with_suffix(".bin")
    tokens.write_bytes(b"\0" + tokens.read_bytes()[1:])
    script, log = Path(__file__).with_name("agreeing_ranks.py"), root / "log"
    assert finish(start(torchrun(NUM_RANKS, script, str(root)), log), SECONDS) == 0, log.read_text()
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def test_a_damaged_corpus_that_one_rank_finds_is_refused_by_all(told):
    assert "poems.bin" in told[0]["damage"]
    assert told[0]["damage"] == told[1]["damage"]


def test_a_signal_to_one_rank_is_known_to_all_and_the_time_is_left_out(told):
    assert [found["signals"] for found in told] == [["SIGUSR1"], ["SIGUSR1"]]


def test_memory_is_told_of_the_rank_that_takes_most(told):
    assert told[0]["most memory"] == told[1]["most memory"]
    assert told[0]["most memory"] == pytest.approx(told[1]["memory"], rel=0.02)
    assert told[0]["most memory"] > told[0]["memory"] + MORE_BYTES // 2


def test_ranks_wait_for_each_other_as_long_as_was_asked_for(told):
    assert [found["timeout"] for found in told] == [60.0 * TIMEOUT_MINUTES] * 2


def test_ranks_find_each_other_again_after_their_groups_were_taken_down(told):
    said = [10 * number for number in range(LATER_GROUPS)]
    assert [found["later groups"] for found in told] == [said, said]
