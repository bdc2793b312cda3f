"""Output that cannot be written, or that contains terminal controls."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from megatron_chameleon.cli import run_tool
from megatron_chameleon.console import escaped, escaped_but_for_bars
from tests.distributed.launch import REPOSITORY
from tools.doctor import DoctorOptions

# Prints more than a pipe holds, then opens a file, as a tool does whose result is one.
WORK = """
import sys
from pathlib import Path
from megatron_chameleon.cli import run_tool
from tools.doctor import DoctorOptions
from megatron_chameleon.progress import progress_bar
def work(options):
    with progress_bar(2, "B") as bar:
        for number in range(20_000):
            print("line", number)
        bar.update()
    assert open(sys.argv[1], "w").fileno() > 2
    Path(sys.argv[1]).write_text("done")
run_tool(work, DoctorOptions, [], prints_log=%r)
"""


def run(program, *arguments, **settings):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    settings = {"stderr": subprocess.PIPE, **settings}
    return subprocess.run(command, timeout=120, text=True, cwd=REPOSITORY, **settings)


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
    """The output is a full disk, or a pipe without a reader."""
    reader, descriptor = os.pipe()
    os.close(reader)
    if is_full:
        descriptor = os.open("/dev/full", os.O_WRONLY)
    done = run(WORK % prints_log, tmp_path / "made", stdout=descriptor)
    os.close(descriptor)
    assert (tmp_path / "made").read_text() == "done"
    assert done.returncode == status, done.stderr
    assert done.stderr.split("\n")[-2 if message else -1].startswith(message), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(("closed", "status"), [((2,), 0), ((0, 1, 2), 2)])
def test_no_file_reuses_a_closed_standard_descriptor(tmp_path, closed, status):
    program = f"import os\nfor n in {closed}: os.close(n)\nos.execv({sys.executable!r}, "
    program += f"[{sys.executable!r}, '-c', {WORK % False!r}, {str(tmp_path / 'made')!r}])"
    done = run(program, stdout=subprocess.DEVNULL)
    assert done.returncode == status, done.stderr
    assert (tmp_path / "made").read_text() == "done"
    assert "Traceback" not in done.stderr


def test_output_resumes_once_a_full_disk_has_space(tmp_path):
    program = (
        "from megatron_chameleon.console import lost_output, open_output\n"
        "from tests.full_disk import largest_file_size\n"
        "open_output()\n"
        "print('before')\n"
        "with largest_file_size(7): print('meanwhile')\n"
        "print('after')\n"
        "assert lost_output() is not None\n"
    )
    log = tmp_path / "log"
    with log.open("w") as stream:
        assert run(program, stdout=stream, stderr=None).returncode == 0
    printed = log.read_text().splitlines()
    assert (printed[0], printed[-1]) == ("before", "after")


HOSTILE = "a\x1b[31mb\x9b2Jc\u202ed\re\udcff\x07é"
SHOWN = r"a\x1b[31mb\x9b2Jc\u202ed\re\udcff\x07é"


def test_terminal_controls_are_escaped():
    assert escaped(HOSTILE) == SHOWN
    assert escaped("tab\tline\n日本 👍🏽") == "tab\tline\n日本 👍🏽"
    bar = "\r 50%|█████| \x1b[32mfast\x1b[0m\x1b[A"
    assert escaped_but_for_bars(bar) == bar
    assert escaped_but_for_bars("\x1b]0;title\x07\x1b[2J") == r"\x1b]0;title\x07\x1b[2J"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_text_can_be_printed_in_any_locale(locale):
    program = f"""
import json, warnings
from megatron_chameleon.cli import run_tool
from megatron_chameleon.errors import UserError
from tools.doctor import DoctorOptions
hostile = json.loads({json.dumps(json.dumps(HOSTILE))})
def work(options):
    print(hostile)
    warnings.warn(hostile)
    raise UserError(hostile)
run_tool(work, DoctorOptions, [])
"""
    environment = {"PATH": os.environ["PATH"], "PYTHONUTF8": "0", "LC_ALL": locale}
    done = run(program, stdout=subprocess.PIPE, env=environment)
    assert done.returncode == 2
    assert done.stdout == f"{SHOWN}\n"
    warned, rejected = done.stderr.splitlines()
    assert warned == "warning: " + SHOWN.replace(r"\r", " ")
    assert rejected == f"error: {SHOWN}"


SYSTEM_ERRORS = [
    OSError(errno.ENOSPC, "No space left on device", "store"),
    PermissionError(errno.EACCES, "Permission denied", "store"),
    RuntimeError("[enforce fail at x.cpp:1] store\nNo space left on device"),
    MemoryError("Unable to allocate 8 TiB"),
]


@pytest.mark.parametrize("error", SYSTEM_ERRORS, ids=lambda error: type(error).__name__)
def test_system_errors_are_one_line_and_bugs_are_not(capsys, error):
    def fail(_options):
        raise error

    def fail_in_a_library(_options):
        raise KeyError("of a library") from error

    def fail_in_the_handler(_options):
        try:
            raise error
        except type(error):
            dict[str, int]()["handled"]

    for work in (fail, fail_in_a_library):
        with pytest.raises(SystemExit) as left:
            run_tool(work, DoctorOptions, [])
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
    with pytest.raises(KeyError):
        run_tool(fail_in_the_handler, DoctorOptions, [])
