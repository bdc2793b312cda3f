from __future__ import annotations

import subprocess
import sys

from tests.full_disk import largest_file_size

PROGRAM = """
from megatron_chameleon.training.say import say
from tests.full_disk import largest_file_size
say("before")
with largest_file_size(7):
    say("meanwhile")
say("after")
"""


def test_a_full_disk_silences_and_ends_nothing(tmp_path):
    log = tmp_path / "log"
    with log.open("w") as stream:
        done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=stream, timeout=60)
    assert done.returncode == 0
    said = log.read_text().splitlines()
    assert (said[0], said[-1]) == ("before", "after")


def test_another_refusal_is_told(tmp_path):
    with largest_file_size(1 << 30):
        done = subprocess.run(
            [sys.executable, "-c", "import os; os.close(1)\n" + PROGRAM],
            capture_output=True,
            timeout=60,
        )
    assert b"Bad file descriptor" in done.stderr
