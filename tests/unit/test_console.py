"""Test output that cannot be written or that contains terminal control characters."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from megatron_chameleon.cli import run_tool
from megatron_chameleon.commands.doctor import DoctorOptions
from megatron_chameleon.console import escaped, escaped_but_for_bars, message_line
from tests.distributed.launch import REPOSITORY

# A tool that prints more than a pipe holds, and then writes a file.
WORK = """
import sys
from megatron_chameleon.cli import run_tool
from megatron_chameleon.commands.doctor import DoctorOptions
from megatron_chameleon.progress import progress_bar
def work(options):
    with progress_bar(2, "B") as bar:
        for number in range(20_000):
            print("line", number)
        bar.update()
    with open(sys.argv[1], "w") as made:
        assert made.fileno() > 2  # not a closed standard descriptor
        made.write("done")
run_tool(work, DoctorOptions, [], prints_log=%r)
"""


@pytest.mark.parametrize(
    ("is_full", "prints_log", "status", "message"),
    [
        (False, False, 0, ""),
        (False, True, 0, "warning: "),
        (True, False, 2, "error: "),
        (True, True, 0, "warning: "),
    ],
)
def test_lost_output_does_not_stop_the_tool(tmp_path, is_full, prints_log, status, message):
    """Standard output is a full disk, or a pipe without a reader."""
    reader, descriptor = os.pipe()
    os.close(reader)
    if is_full:
        descriptor = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-c", WORK % prints_log, str(tmp_path / "made")]
    done = subprocess.run(
        command, stdout=descriptor, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    os.close(descriptor)
    assert (tmp_path / "made").read_text() == "done"
    assert done.returncode == status, done.stderr
    assert done.stderr.split("\n")[-2 if message else -1].startswith(message), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(("closed", "status"), [((2,), 0), ((0, 1, 2), 2)])
def test_closed_standard_descriptors_are_not_reused(tmp_path, closed, status):
    arguments = [sys.executable, "-c", WORK % False, str(tmp_path / "made")]
    program = (
        f"import os\nfor n in {closed}: os.close(n)\nos.execv({sys.executable!r}, {arguments})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == status, done.stderr
    assert (tmp_path / "made").read_text() == "done"
    assert "Traceback" not in done.stderr


HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\re\udcff\x07é"
SHOWN = r"a\x1b[31mb\x9b2Jc\u202ed\re\udcff\x07é"


def test_terminal_controls_are_escaped():
    assert escaped(HOSTILE) == SHOWN
    assert escaped("tab\tline\n日本 👍🏽") == "tab\tline\n日本 👍🏽"
    bar = "\r 50%|█████| \x1b[32mfast\x1b[0m\x1b[A"
    assert escaped_but_for_bars(bar) == bar
    assert escaped_but_for_bars("\x1b]0;title\x07\x1b[2J") == r"\x1b]0;title\x07\x1b[2J"


PRINT_HOSTILE = f"""
import warnings
from megatron_chameleon.cli import run_tool
from megatron_chameleon.errors import UserError
from megatron_chameleon.commands.doctor import DoctorOptions
def work(options):
    print({HOSTILE!a})
    warnings.warn({HOSTILE!a})
    raise UserError({HOSTILE!a})
run_tool(work, DoctorOptions, [])
"""


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_text_is_printed_in_any_locale(locale):
    environment = {"PATH": os.environ["PATH"], "PYTHONUTF8": "0", "LC_ALL": locale}
    command = [sys.executable, "-c", PRINT_HOSTILE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert (done.returncode, done.stdout) == (2, f"{SHOWN}\n")
    one_line = SHOWN.replace(r"\r", " ")
    assert done.stderr.splitlines() == [f"warning: {one_line}", f"error: {SHOWN}"]


SYSTEM_ERRORS = [
    OSError(errno.ENOSPC, "No space left on device", "store"),
    PermissionError(errno.EACCES, "Permission denied", "store"),
    RuntimeError("[enforce fail at x.cpp:1] store\nNo space left on device"),
    MemoryError("Unable to allocate 8 TiB"),
]


@pytest.mark.parametrize("error", SYSTEM_ERRORS, ids=lambda error: type(error).__name__)
def test_system_error_is_one_line_without_a_traceback(capsys, error):
    def fail(_options):
        raise error

    with pytest.raises(SystemExit) as left:
        run_tool(fail, DoctorOptions, [])
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_only_words_that_are_no_paths_are_cut_from_messages():
    path, value = "/" + "p" * 4000, "v" * 2_000_000
    line = message_line(f"{path}: weight of '{value}' is \x1b; fix it")
    assert line.startswith(f"{path}: weight of 'vvv")
    assert line.endswith(r"vvv' is \x1b; fix it")
    assert len(line) < 5000
    assert len(message_line("word " * 100_000)) < 9000
