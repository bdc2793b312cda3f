"""Command lines: parsing, exit statuses, one-line errors on one rank, and every tool's --help."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Literal

import pytest

from megatron_chameleon import __version__, cli, commands
from megatron_chameleon.cli import Subcommands, Tool, parse_options, run_tool
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel import releases

LOST_PEER = RuntimeError("[1] Connection closed by peer [127.0.0.1]:29500")
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
    sizes: tuple[str, ...] = ("60m", "82m")
    """Which ones."""
    group: Group = dataclasses.field(default_factory=Group)


@pytest.fixture(autouse=True)
def _process_state(monkeypatch):
    """Set up one rank, and restore the global state that run_tool changes."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def set_rank(monkeypatch, rank):
    """Set the variables that torchrun sets for one of two ranks."""
    launch = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {**launch, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)


def raising(error):
    def tool(_options):
        raise error

    return tool


def exit_status(function, argv=("--corpus", "c")):
    with pytest.raises(SystemExit) as left:
        run_tool(function, ToolOptions, argv)
    return left.value.code


def test_flags_are_field_names_and_the_last_occurrence_wins():
    argv = ["--corpus", "c", "--train-iters", "4", "--sizes", "82m", "nano", "--train-iters", "3"]
    argv += ["--bf16", "--learning-rate", "2", "--mode=finetune", "--sizes", "tiny"]
    expected = ToolOptions(Path("c"), 3, "finetune", bf16=True, sizes=("tiny",), group=Group(2.0))
    assert parse_options(ToolOptions, argv) == expected


def test_exit_status_is_what_the_function_returns():
    assert exit_status(lambda options: None) == 0
    assert exit_status(lambda options: len(str(options.corpus))) == 1
    assert exit_status(raising(KeyboardInterrupt())) == 130


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--corpus", "c", "--trian-iters", "3"], "--trian-iters"),
        (["--corpus", "c", "--train-iters", "many"], "--train-iters"),
        (["--corpus", "c", "--mode", "sideways"], "--mode"),
        (["--corpus", "c", "--train-iters"], "--train-iters"),
        (["--corpus", "c", "stray"], "stray"),
        ([], "--corpus"),
    ],
)
def test_invalid_command_line_is_one_line_and_status_2(capsys, argv, named):
    assert exit_status(lambda _options: pytest.fail("it started"), argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert not set(line) & set("│╭╮╰╯─\x1b")
    assert "---" not in line


@pytest.mark.parametrize("error", [UserError("the same on every rank"), LOST_PEER])
def test_rank_1_leaves_the_message_to_rank_0(capsys, monkeypatch, error):
    """Rank 1 waits until torchrun ends the job; only rank 0 prints the message."""
    job_ended, waited = KeyError("the job has ended"), []

    def wait(seconds):
        waited.append(seconds)
        raise job_ended

    set_rank(monkeypatch, "1")
    monkeypatch.setattr(time, "sleep", wait)
    for argv in (["--corpus", "c"], ["--corpsu", "c"]):
        with pytest.raises(KeyError) as ended:
            run_tool(raising(error), ToolOptions, argv)
        assert ended.value is job_ended
    assert set(waited) == {cli.OTHER_RANKS_DELAY_SECONDS}
    assert capsys.readouterr() == ("", "")


def test_a_failed_import_is_explained_by_the_installed_packages(capsys, monkeypatch):
    failing = raising(ImportError("cannot import name 'x'", name="megatron.core"))
    with pytest.raises(ImportError):
        run_tool(failing, ToolOptions, ["--corpus", "c"])
    capsys.readouterr()
    assert exit_status(raising(ModuleNotFoundError(name="triton"))) == cli.USER_ERROR_STATUS
    assert capsys.readouterr().err.endswith(": pip install triton\n")
    problem = "megatron-core 0.20.0 is installed, but ..."
    monkeypatch.setattr(releases, "release_problem", lambda: problem)
    assert exit_status(failing) == cli.USER_ERROR_STATUS
    assert capsys.readouterr().err == f"error: {problem}\n"


def test_bug_keeps_its_traceback_and_status_1():
    program = (
        "from megatron_chameleon.cli import run_tool\n"
        "from megatron_chameleon.commands.doctor import DoctorOptions\n"
        "def tool(options): raise ValueError('a bug')\n"
        "run_tool(tool, DoctorOptions)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback (most recent call last):")
    assert ended.stderr.endswith("ValueError: a bug\n")


def test_warnings_are_one_line_each_once_on_rank_0(capsys, monkeypatch):
    def tool(_options):
        for text in ("the weights\nsum to 2", "the weights\nsum to 2", "no valid split"):
            # As in some libraries, this block resets Python's record of warnings that were shown.
            with warnings.catch_warnings():
                warnings.simplefilter("default")
            warnings.warn(text, UserWarning, stacklevel=2)
        for category in (FutureWarning, DeprecationWarning):
            warnings.warn("of a library", category, stacklevel=2)

    for rank, printed in (
        ("0", "warning: the weights sum to 2\nwarning: no valid split\n"),
        ("1", ""),
    ):
        set_rank(monkeypatch, rank)
        assert exit_status(tool) == 0
        assert capsys.readouterr() == ("", printed)


def test_help_shows_every_docstring_on_rank_0(capsys, monkeypatch):
    assert exit_status(lambda _options: None, ["--help"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for docstring in ("The folder with the tokens.", "Settings that belong together.", "How fast."):
        assert docstring in printed.out
    set_rank(monkeypatch, "1")
    assert exit_status(lambda _options: None, ["--help"]) == 0
    assert capsys.readouterr() == ("", "")
    # A pod sets the same variables. Without a launcher that shows the output of rank 0, an empty
    # output would look like a failure.
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert exit_status(lambda _options: None) == 0
    assert capsys.readouterr().out.startswith("rank 1 of 2 ")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "MASTER_PORT"),
    ],
)
def test_incomplete_variables_of_a_launcher_are_an_error(capsys, monkeypatch, variables, named):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert exit_status(lambda _options: None) == cli.USER_ERROR_STATUS
    assert named in capsys.readouterr().err


def test_a_rank_without_a_number_of_ranks_is_a_single_process(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert exit_status(lambda _options: print("ran")) == 0
    out, err = capsys.readouterr()
    assert out == "ran\n"
    assert "WORLD_SIZE" in err
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("argv", "status", "out", "err"),
    [
        (["two", "--corpus", "c"], 0, "ran with c\n", ""),
        (["--help"], 0, "{one,two}", ""),
        (["three", "--corpus", "c"], 2, "", "error: "),
        ([], 2, "", "error: "),
    ],
)
def test_subcommand_gets_the_flags_after_its_name(capsys, monkeypatch, argv, status, out, err):
    def tool(options):
        print("ran with", options.corpus)

    monkeypatch.setattr(sys, "argv", ["tools/x.py", *argv])
    with pytest.raises(SystemExit) as left:
        Subcommands(dict.fromkeys(("one", "two"), Tool(tool, ToolOptions))).run()
    assert left.value.code == status
    printed = capsys.readouterr()
    assert out in printed.out
    assert err in printed.err
    assert len(printed.err.splitlines()) == bool(err)


def test_tools_of_the_checkout_are_the_commands():
    template = TOOLS[0].read_text(encoding="utf-8")
    for tool, name in zip(TOOLS, commands.command_names(), strict=True):
        expected = template.replace(TOOLS[0].stem, name)
        assert (tool.name, tool.read_text("utf-8")) == (f"{name}.py", expected)
        assert os.access(tool, os.X_OK)


@pytest.fixture
def megatron_chameleon(capsys, monkeypatch):
    """``megatron_chameleon(*argv)``: exit status, stdout and stderr of the command line."""

    def run(*argv):
        monkeypatch.setattr(sys, "argv", ["/bin/megatron-chameleon", *argv])
        with pytest.raises(SystemExit) as left:
            commands.main()
        return left.value.code, *capsys.readouterr()

    return run


def test_commands_are_listed_with_their_descriptions(megatron_chameleon):
    status, printed, errors = megatron_chameleon("--help")
    assert (status, errors) == (0, "")
    listed = dict(re.findall(r"^  (\w+) +(\S.*)\.$", printed, re.MULTILINE))
    assert list(listed) == commands.command_names()
    assert megatron_chameleon("--version")[:2] == (0, f"{__version__}\n")


@pytest.mark.parametrize("name", ["pretrain_gpt", "pretrain-gpt"])
def test_command_gets_the_other_arguments(megatron_chameleon, name):
    status, printed, _ = megatron_chameleon(name, "--help")
    assert status == 0
    assert "megatron-chameleon pretrain_gpt" in printed
    assert "--train-iters" in printed


@pytest.mark.parametrize(
    ("argv", "closest"), [(["pretrain"], "pretrain_gpt"), (["xyz"], ""), ([], "")]
)
def test_unknown_command_is_one_line_with_the_closest_name(megatron_chameleon, argv, closest):
    status, printed, errors = megatron_chameleon(*argv)
    assert (status, printed, len(errors.splitlines())) == (2, "", 1)
    assert closest in errors
    assert ("did you mean" in errors) == bool(closest)


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("pre", ["preprocess_data", "pretrain_gpt"]),
        ("compute_mixture --method doge --doge-e", ["--doge-eps"]),
        ("evaluate perplexity --pac", ["--packing"]),
    ],
)
def test_bash_completes_commands_and_flags(bash_completion, line, completed):
    assert bash_completion(line) == completed


@pytest.fixture(scope="module")
def bash_completion(tmp_path_factory):
    """``complete(line)``: what bash offers after ``megatron-chameleon LINE``."""
    script = tmp_path_factory.mktemp("completion") / "script"
    with script.open("w") as out:
        program = [sys.executable, "-m", "megatron_chameleon", "completion", "bash"]
        subprocess.run(program, check=True, stdout=out)
    assert "\ncomplete -o filenames -F " in script.read_text()  # ends the name of a folder by /

    def complete(line):
        command = (
            f"source {script}; COMP_WORDS=(megatron-chameleon {line}); "
            "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _tyro_megatron_chameleon; "
            'echo "${COMPREPLY[@]}"'
        )
        return subprocess.check_output(["bash", "-c", command], text=True).split()

    return complete


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.stem)
def test_every_tool_has_help_and_rejects_unknown_flags(capsys, monkeypatch, tool):
    def printed(status, *argv):
        monkeypatch.setattr(sys, "argv", [str(tool), *argv])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(tool), run_name="__main__")
        assert left.value.code == status
        return capsys.readouterr()

    out, err = printed(0, "--help")
    assert tool.name in out
    assert err == ""
    # Without a positional argument that is required, the error would be about this argument.
    argument = {"make_report": ["a-folder"], "completion": ["bash"]}.get(tool.stem, [])
    (line,) = printed(2, *argument, "--no-such-flag", "3").err.splitlines()
    assert line.startswith("error: ")
    assert "--no-such-flag" in line


@pytest.mark.parametrize(
    "create", [os.mkfifo, lambda path: os.symlink("/dev/zero", path), lambda _path: None]
)
def test_special_files_and_names_that_are_not_utf_8_are_rejected(capsys, tmp_path, create):
    path = tmp_path / "pipe"
    create(path)
    path = path if path.exists() else tmp_path / "\udcff"
    assert exit_status(lambda _options: pytest.fail("it started"), ["--corpus", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: --corpus ")
