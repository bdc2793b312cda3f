"""Ranks share the members of a swarm, and one that was killed or stopped goes on as before."""

from __future__ import annotations

import csv
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launch import REPOSITORY, finish, start, torchrun
from tests.distributed.swarm_cases import MIXTURES
from tests.small_corpus import write_small_corpus

SCRIPT = "tests/distributed/swarm_ranks.py"
SECONDS = 240.0
# Forty steps of Adam from the same weights, whose products were batched otherwise.
TOLERANCE = 2e-3


@dataclasses.dataclass(frozen=True)
class Swarms:
    """A folder with a corpus, swarms, and what each rank got of them."""

    root: Path

    def run(self, num_ranks: int, *names: str) -> None:
        log = self.root / "log.txt"
        process = start(self.command(num_ranks, *names), log)
        assert finish(process, SECONDS) == 0, log.read_text()[-4000:]

    def command(self, num_ranks: int, *names: str) -> list[str]:
        arguments = (str(self.root), *names)
        if num_ranks > 1:
            return torchrun(num_ranks, SCRIPT, *arguments)
        return [sys.executable, str(REPOSITORY / SCRIPT), *arguments]

    def losses(self, name, rank=0):
        return np.load(self.root / f"{name}-{rank}.npy")


@pytest.fixture(scope="module")
def swarms(tmp_path_factory):
    """The swarm by one process, killed by kill -9 and gone on with, and by two ranks."""
    swarms = Swarms(tmp_path_factory.mktemp("swarms"))
    (swarms.root / "corpus").mkdir()
    write_small_corpus(swarms.root / "corpus")
    kill_in_the_second_group(swarms)
    swarms.run(1, "killed", "whole")
    swarms.run(2, "ranks", "stopped")
    return swarms


def kill_in_the_second_group(swarms):
    folder = swarms.root / "killed"
    process = start(swarms.command(1, "killed"), swarms.root / "killed.txt")
    end = time.monotonic() + SECONDS
    while not (list(folder.glob("members/*.json")) and list(folder.glob("groups/*.safetensors"))):
        assert process.poll() is None, (swarms.root / "killed.txt").read_text()
        assert time.monotonic() < end
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    finish(process, SECONDS)


def test_a_killed_swarm_goes_on_to_the_same_bits(swarms):
    assert "Traceback" not in (swarms.root / "killed.txt").read_text()
    np.testing.assert_array_equal(swarms.losses("killed"), swarms.losses("whole"))


def test_ranks_find_what_one_process_finds_and_all_get_it(swarms):
    expected = swarms.losses("whole")
    assert expected.shape == (len(MIXTURES), 1, 3)
    np.testing.assert_allclose(swarms.losses("ranks"), expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(swarms.losses("ranks", rank=1), swarms.losses("ranks"))


def test_a_stop_asked_of_one_rank_stops_all_and_the_swarm_goes_on(swarms):
    np.testing.assert_array_equal(swarms.losses("stopped"), swarms.losses("ranks"))
    said = (swarms.root / "log.txt").read_text()
    assert said.count("has stopped; the same command goes on with it") == 1
    assert not list((swarms.root / "stopped" / "groups").glob("*.safetensors"))


def test_every_member_is_in_the_table_once(swarms):
    for name in ("whole", "ranks", "stopped"):
        with (swarms.root / name / "metrics.csv").open(newline="") as stream:
            rows = list(csv.reader(stream))
        assert [row[0] for row in rows[1:]] == [str(i) for i in range(len(MIXTURES))]
