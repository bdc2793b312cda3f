"""Kills preprocessing at one moment after another and lets it go on; run by its test as a script.

Every call that changes the output folder is a moment. The processes are forked from one that has
imported everything and encoded nothing, so that hundreds of runs take seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus.options import (
    DomainOptions,
    EncoderOptions,
    PreprocessOptions,
    SourceOptions,
)
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import assert_same

_CHANGES = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
_MOMENTS, _LAST_MOMENTS = 24, 12


def kill_at(moment: int, output: Path) -> Callable[[], int]:
    """Kill this process right before its ``moment``-th change to ``output``; count the changes."""
    changes = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        if event in _CHANGES and _is_change(event, arguments, str(output)):
            changes += 1
            if changes == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: changes


def _is_change(event: str, arguments: tuple[object, ...], output: str) -> bool:
    if event in ("os.remove", "os.rmdir") and arguments[1] != -1:
        return True  # by a descriptor, as a whole folder is removed
    if event == "open" and (
        arguments[1] in ("r", "rb") or not isinstance(arguments[1], str | None)
    ):
        return False
    return any(output in str(argument) for argument in arguments)


def in_child(work: Callable[[], None]) -> int:
    """Do ``work`` in a forked process; return its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(folder: Path, shard_bytes: int) -> None:
    """Compare with the uninterrupted run after a kill at each of some moments."""
    inputs = tuple(str(path) for path in sorted(folder.glob("*.jsonl")))
    options = PreprocessOptions(
        SourceOptions((inputs,)),
        folder / "expected",
        folder / "tokenizer.json",
        domains=DomainOptions(domain_key="set"),
        encoding=EncoderOptions(encoder="own"),  # without the time that comparing takes
        split="60,20,20",
        shard_bytes=shard_bytes,
    )
    killed = dataclasses.replace(options, output=folder / "killed")

    def count() -> None:
        changes = kill_at(0, options.output)
        preprocess_data(options)
        (folder / "changes").write_text(f"{changes()}")

    assert in_child(count) == 0
    changes = int((folder / "changes").read_text())
    spread = {1 + i * (changes - 1) // (_MOMENTS - 1) for i in range(_MOMENTS)}
    # All of those at which the corpus is put in its place and what it was made of is removed.
    last = range(changes - _LAST_MOMENTS + 1, changes + 1)
    moments = sorted(spread.union(last))

    def work_until(moment: int) -> Callable[[], None]:
        def work() -> None:
            kill_at(moment, killed.output)
            preprocess_data(killed)

        return work

    resumed = most = cleaned = 0
    for moment in moments:
        shutil.rmtree(killed.output, ignore_errors=True)
        assert in_child(work_until(moment)) == -signal.SIGKILL, moment
        whole = (killed.output / "corpus.json").exists()
        if not whole:
            finished = len(list((killed.output / ".partial" / "shards").glob("*")))
            assert finished >= most, f"shards were lost at {moment}"
            most = finished
            resumed += finished > 0
            in_child(work_until(moment // 3 + 1))  # and once more, somewhere in what is left
        if not (killed.output / "corpus.json").exists():
            assert in_child(lambda: preprocess_data(killed)) == 0, moment
        elif (killed.output / ".partial").exists():
            cleaned += 1
            assert in_child(lambda: find_it_done(killed)) == 0, moment
        assert not (killed.output / ".partial").exists(), moment
        assert_same(Corpus.load(options.output), Corpus.load(killed.output))
    print(
        f"{changes} changes, killed at {len(moments)} of them, {resumed} runs were gone on with, "
        f"{cleaned} cleaned up"
    )


def find_it_done(options: PreprocessOptions) -> None:
    """The same command on a corpus that is whole, which removes what is left beside it."""
    with pytest.raises(UserError, match="already holds a corpus"):
        preprocess_data(options)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
