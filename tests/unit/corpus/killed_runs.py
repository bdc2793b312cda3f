"""Kill preprocessing right before some of its changes to the output folder, and resume it.

A test runs this file as a script. The processes are forked from a process that has imported
everything but encoded nothing, so that many runs take only seconds.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pandas  # noqa: F401 - each run would import it to print its table
import pytest

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus.options import DomainOptions, EncoderOptions, PreprocessOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.errors import UserError
from tests.unit.corpus.corpus_making import assert_same, source_options

_CHANGES = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
_KILLS, _LAST_KILLS = 16, 12


def kill_at(at: int, output: Path) -> Callable[[], int]:
    """Kill this process right before its ``at``-th change to ``output``; count the changes."""
    changes = 0

    def is_change(event: str, arguments: tuple[object, ...]) -> bool:
        if event in ("os.remove", "os.rmdir") and arguments[1] != -1:
            return True  # rmtree passes names relative to an open folder, so ``output`` is missing
        if event == "open" and (
            arguments[1] in ("r", "rb") or not isinstance(arguments[1], str | None)
        ):
            return False
        return any(str(output) in str(argument) for argument in arguments)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        if event in _CHANGES and is_change(event, arguments):
            changes += 1
            if changes == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return lambda: changes


def in_child(work: Callable[[], None]) -> int | None:
    """Do ``work`` in a forked process; return its exit status."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode


def main(folder: Path, shard_bytes: int) -> None:
    """Compare each killed and resumed run with the uninterrupted one; print counts."""
    options = PreprocessOptions(
        source_options(*sorted(folder.glob("*.jsonl"))),
        folder / "expected",
        folder / "tokenizer.json",
        domains=DomainOptions(domain_key="set"),
        encoding=EncoderOptions(encoder="own"),  # "auto" would spend time on comparing encoders
        split="60,20,20",
        shard_bytes=shard_bytes,
        workers=1,
    )
    output = folder / "killed"
    killed = dataclasses.replace(options, output=output)

    def count() -> None:
        changes = kill_at(0, options.output)
        preprocess_data(options)
        (folder / "changes").write_text(f"{changes()}")

    def reject_complete() -> None:
        """Run the same command on the complete corpus; it removes leftover files, and fails."""
        with pytest.raises(UserError, match="already holds a corpus"):
            preprocess_data(killed)

    def run_until(at: int) -> int | None:
        def work() -> None:
            kill_at(at, output)
            preprocess_data(killed)

        return in_child(work)

    assert in_child(count) == 0
    changes = int((folder / "changes").read_text())
    spread = {1 + i * (changes - 1) // (_KILLS - 1) for i in range(_KILLS)}
    # Include all changes that publish the corpus and remove its shards.
    kills = sorted(spread.union(range(changes - _LAST_KILLS + 1, changes + 1)))
    resumed = most = cleaned = 0
    for at in kills:
        shutil.rmtree(output, ignore_errors=True)
        assert run_until(at) == -signal.SIGKILL, at
        if not (output / "corpus.json").exists():
            finished = len(list((output / ".partial" / "shards").glob("*")))
            assert finished >= most, f"shards were lost at {at}"
            most = finished
            resumed += finished > 0
            run_until(at // 3 + 1)  # kill the resumed run, too
        if not (output / "corpus.json").exists():
            assert in_child(lambda: preprocess_data(killed)) == 0, at
        elif (output / ".partial").exists():
            cleaned += 1
            assert in_child(reject_complete) == 0, at
        assert not (output / ".partial").exists(), at
        assert_same(Corpus.load(options.output), Corpus.load(output))
    print(changes, len(kills), resumed, cleaned)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
