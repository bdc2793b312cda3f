from __future__ import annotations

import dataclasses
import os
import runpy
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Literal

import pytest

from megatron_chameleon import cli
from megatron_chameleon.cli import parse_options, run_subcommand, run_tool
from megatron_chameleon.errors import UserError

TOOLS = sorted((Path(__file__).resolve().parents[2] / "tools").glob("*.py"))


@dataclasses.dataclass(frozen=True)
class Group:
    """Settings that belong together."""

    learning_rate: float = 0.5
    """How fast."""


@dataclasses.dataclass(frozen=True)
class ToolOptions:
    """What the tool does, in one sentence."""

    corpus: Path
    """The folder with the tokens."""
    train_iters: int = 10
    """Optimizer steps."""
    mode: Literal["pretrain", "finetune"] = "pretrain"
    """Which weights."""
    bf16: bool = False
    """Compute in bfloat16."""
    group: Group = dataclasses.field(default_factory=Group)


@pytest.fixture(autouse=True)
def _only_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def rank_1(monkeypatch):
    """This process is rank 1, and the job ends while it waits for its turn to speak."""

    class JobEndedError(Exception):
        pass

    waited = []

    def wait(seconds):
        waited.append(seconds)
        raise JobEndedError

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(time, "sleep", wait)
    yield JobEndedError
    assert waited == [cli.OTHER_RANKS_DELAY_SECONDS]


def leave(function, argv, options_type=ToolOptions):
    """Exit status of the tool that calls ``function``."""
    with pytest.raises(SystemExit) as left:
        run_tool(function, options_type, argv)
    return left.value.code


def test_flags_are_the_fields_without_their_groups_names():
    options = parse_options(
        ToolOptions,
        [
            "--corpus",
            "c",
            "--train-iters",
            "3",
            "--bf16",
            "--learning-rate",
            "2",
            "--mode=finetune",
        ],
    )
    assert options == ToolOptions(Path("c"), 3, "finetune", bf16=True, group=Group(2.0))


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """A tool that takes several values."""

    sizes: tuple[str, ...] = ("60m", "82m")
    """Which ones."""


def test_of_a_flag_that_is_given_twice_the_last_one_counts_lists_included():
    """Launchers replace their own values for a small try, and a person any of theirs."""
    argv = ["--sizes", "1m", "nano", "--sizes", "tiny"]
    assert parse_options(ListOptions, argv).sizes == ("tiny",)
    argv = ["--corpus", "c", "--train-iters", "3", "--train-iters", "4"]
    assert parse_options(ToolOptions, argv).train_iters == 4


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_a_tool_leaves_with_what_its_function_returns(returned, status):
    received = []

    def tool(options):
        received.append(options)
        return returned

    assert leave(tool, ["--corpus", "c"]) == status
    assert received == [ToolOptions(Path("c"))]


MISTAKES = [
    (["--corpus", "c", "--trian-iters", "3"], "--trian-iters"),
    (["--corpus", "c", "--train-iters", "many"], "--train-iters"),
    (["--corpus", "c", "--learning-rate", "fast"], "--learning-rate"),
    (["--corpus", "c", "--mode", "sideways"], "--mode"),
    (["--corpus", "c", "--train-iters"], "--train-iters"),
    (["--corpus", "c", "stray"], "stray"),
    ([], "--corpus"),
]


@pytest.mark.parametrize(("argv", "named"), MISTAKES)
def test_a_mistake_on_the_command_line_is_one_line_and_status_2(capsys, argv, named):
    def never(_options):
        raise AssertionError("the tool must not start")

    assert leave(never, argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert not set(line) & set("│╭╮╰╯─\x1b")
    assert "---" not in line


@pytest.mark.parametrize(("argv", "named"), MISTAKES)
def test_other_ranks_say_nothing_while_rank_0_tells_the_mistake(capsys, rank_1, argv, named):
    with pytest.raises(rank_1):
        run_tool(lambda _options: None, ToolOptions, argv)
    assert capsys.readouterr() == ("", "")


def test_a_rank_that_is_still_there_speaks_for_itself(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(cli, "OTHER_RANKS_DELAY_SECONDS", 0.0)

    def tool(_options):
        raise UserError("corpus.json: my copy is another one")

    assert leave(tool, ["--corpus", "c"]) == 2
    assert capsys.readouterr().err == "error: rank 3: corpus.json: my copy is another one\n"
    assert leave(tool, ["--corpsu", "c"]) == 2
    assert "error: rank 3: " in capsys.readouterr().err


def test_a_users_mistake_found_later_is_one_line_and_status_2(capsys):
    def tool(_options):
        raise UserError("x.json:3: field a: missing; add it")

    assert leave(tool, ["--corpus", "c"]) == 2
    assert capsys.readouterr() == ("", "error: x.json:3: field a: missing; add it\n")


def test_a_users_mistake_found_later_is_not_told_by_rank_1(capsys, rank_1):
    def tool(_options):
        raise UserError("the same on every rank")

    with pytest.raises(rank_1):
        run_tool(tool, ToolOptions, ["--corpus", "c"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("error", [ValueError, KeyError, AssertionError, OSError])
def test_a_defect_passes_through(error):
    def tool(_options):
        raise error("a defect")

    with pytest.raises(error, match="a defect"):
        run_tool(tool, ToolOptions, ["--corpus", "c"])


def test_a_defect_is_shown_with_its_traceback_and_status_1():
    program = (
        "from megatron_chameleon.cli import run_tool\n"
        "from tools.doctor import DoctorOptions\n"
        "def tool(options): raise ValueError('a defect')\n"
        "run_tool(tool, DoctorOptions)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback (most recent call last):")
    assert ended.stderr.endswith("ValueError: a defect\n")


LOST_PEER = "[1] Connection closed by peer [127.0.0.1]:29500"


def test_a_rank_that_loses_the_one_that_left_waits_for_its_end(capsys, rank_1):
    def tool(_options):
        raise RuntimeError(LOST_PEER)

    with pytest.raises(rank_1):
        run_tool(tool, ToolOptions, ["--corpus", "c"])
    assert capsys.readouterr().err == ""


def test_the_first_rank_waits_until_the_others_have_spoken(monkeypatch):
    def tool(_options):
        raise RuntimeError(LOST_PEER)

    waits: list[float] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(RuntimeError):
        run_tool(tool, ToolOptions, ["--corpus", "c"])
    assert waits == [2 * cli.OTHER_RANKS_DELAY_SECONDS]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_with_a_defect_of_its_own_says_so_at_once(monkeypatch, rank):
    message = "a defect of its own"

    def tool(_options):
        raise RuntimeError(message)

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(time, "sleep", lambda _seconds: pytest.fail("it waited"))
    with pytest.raises(RuntimeError) as raised:
        run_tool(tool, ToolOptions, ["--corpus", "c"])
    assert str(raised.value) == message


def test_control_c_is_no_defect(capsys):
    def tool(_options):
        raise KeyboardInterrupt

    assert leave(tool, ["--corpus", "c"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rank", "shown"), [("0", "warning: the weights sum to 2, not 1\n"), ("1", "")]
)
def test_a_warning_is_one_line_on_rank_0(capsys, monkeypatch, rank, shown):
    monkeypatch.setenv("RANK", rank)

    def tool(_options):
        warnings.warn("the weights\nsum to 2, not 1", UserWarning, stacklevel=2)

    with warnings.catch_warnings():  # run_tool is the last thing that a process does
        warnings.simplefilter("default")
        assert leave(tool, ["--corpus", "c"]) == 0
    assert capsys.readouterr() == ("", shown)


def test_a_warning_that_is_given_again_is_shown_once(capsys):
    def tool(_options):
        for text in ("the weights sum to 2", "the weights sum to 2", "there is no valid split"):
            with warnings.catch_warnings():  # as libraries do, after which Python counts anew
                warnings.simplefilter("default")
            warnings.warn(text, UserWarning, stacklevel=2)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert leave(tool, ["--corpus", "c"]) == 0
    said = "warning: the weights sum to 2\nwarning: there is no valid split\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("category", [FutureWarning, DeprecationWarning])
def test_warnings_for_programmers_are_not_shown(capsys, category):
    def tool(_options):
        warnings.warn("of a library", category, stacklevel=2)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert leave(tool, ["--corpus", "c"]) == 0
    assert capsys.readouterr() == ("", "")


def test_help_shows_every_fields_docstring(capsys):
    assert leave(lambda _options: None, ["--help"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in (
        "What the tool does, in one sentence.",
        "The folder with the tokens.",
        "Compute in bfloat16.",
        "Settings that belong together.",
        "How fast.",
        "--learning-rate",
    ):
        assert text in printed.out


def test_help_is_shown_once_for_all_ranks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert leave(lambda _options: None, ["--help"]) == 0
    assert capsys.readouterr() == ("", "")


def command(options):
    print("ran with", options.corpus)


COMMANDS = {"one": (command, ToolOptions), "two": (command, ToolOptions)}


def test_a_subcommand_gets_the_flags_after_its_name(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tools/x.py", "two", "--corpus", "c"])
    with pytest.raises(SystemExit) as left:
        run_subcommand(COMMANDS)
    assert left.value.code == 0
    assert capsys.readouterr().out == "ran with c\n"


@pytest.mark.parametrize("argv", [["three", "--corpus", "c"], [], ["--corpus", "c"]])
def test_another_subcommand_is_refused_with_the_ones_there_are(capsys, monkeypatch, argv):
    monkeypatch.setattr(sys, "argv", ["tools/x.py", *argv])
    with pytest.raises(SystemExit) as left:
        run_subcommand(COMMANDS)
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: x.py: ")
    assert line.endswith("the first argument is 'one' or 'two'")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_without_a_subcommand_lists_them(capsys, monkeypatch, flag):
    monkeypatch.setattr(sys, "argv", ["tools/x.py", flag])
    with pytest.raises(SystemExit) as left:
        run_subcommand(COMMANDS)
    assert left.value.code == 0
    assert "{one,two}" in capsys.readouterr().out


def run_file(tool, monkeypatch, *argv):
    """Run a tool's file as Python would, in this process, so that imports are paid once."""
    monkeypatch.setattr(sys, "argv", [str(tool), *argv])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(tool), run_name="__main__")
    return left.value.code


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_every_tool_shows_its_help(capsys, monkeypatch, tool):
    assert run_file(tool, monkeypatch, "--help") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert tool.name in printed.out


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_every_tool_refuses_a_misspelt_flag(capsys, monkeypatch, tool):
    # Of the one tool with an argument that is no flag, a missing one would be told instead.
    argument = ["a-folder"] if tool.stem == "make_report" else []
    assert run_file(tool, monkeypatch, *argument, "--no-such-flag", "3") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert "--no-such-flag" in line


def test_the_subcommands_of_evaluate_have_help_of_their_own(capsys, monkeypatch):
    (tool,) = [tool for tool in TOOLS if tool.stem == "evaluate"]
    assert run_file(tool, monkeypatch, "perplexity", "--help") == 0
    assert "--window-length" in capsys.readouterr().out


@pytest.mark.parametrize("made", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_path_that_is_no_file_is_refused_before_the_work(capsys, tmp_path, made):
    made(tmp_path / "pipe")
    argv = ["--corpus", str(tmp_path / "pipe")]
    assert leave(lambda _options: pytest.fail("it has started"), argv) == 2
    assert capsys.readouterr().err.startswith(f"error: --corpus {tmp_path}/pipe: ")


def test_a_name_that_is_no_utf8_is_refused_before_the_work(capsys, tmp_path):
    argv = ["--corpus", str(tmp_path / "\udcff")]
    assert leave(lambda _options: pytest.fail("it has started"), argv) == 2
    assert capsys.readouterr().err.startswith("error: --corpus ")


@pytest.mark.parametrize(
    ("error", "told"), [(OSError(28, "No space left on device"), "warning: "), (KeyError(1), "Exc")]
)
def test_a_thread_that_the_system_ends_is_one_line(capsys, error, told):
    def fail():
        raise error

    def tool(_options):
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()

    before = threading.excepthook
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert leave(tool, ["--corpus", "c"]) == 0
    threading.excepthook = before
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(told)
    assert (len(lines) == 1) == (told == "warning: ")
