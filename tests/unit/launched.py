"""Run the launchers of examples/ with stand-ins for torchrun and python, and parse their commands.

The stand-ins record their arguments, which the parsers of the real programs then check.
tests/launchers runs the real programs.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.run import get_args_parser

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.cli import Choice, Subcommands, parse_options, take_values
from megatron_chameleon.commands import load_command
from megatron_chameleon.training.options import PretrainOptions

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WEIGHING = ["mixture_stack", "mixture_wiki40b", "transfer_pile"]
COMPARING = ["finetune_stack", "finetune_wiki40b", "finetune_huggingface"]
COMPARING += [f"pretrain_llama_{size}" for size in ("130m", "350m", "1b")]
# A call is recorded as words that end in NUL and a final record separator, without line breaks:
# bash writes a line at a time, so records of concurrent calls do not mix.
RECORDER = '#!/usr/bin/env bash\nprintf "%s\\0" "${0##*/}" "$@" $\'\\x1e\' >> "$CALLS"\n'


@dataclasses.dataclass(frozen=True)
class Call:
    """One command of a launcher: the program, torchrun's arguments, and the tool's options."""

    program: str
    ranks: Any
    options: Any

    @classmethod
    def read(cls, words: Sequence[str]) -> Call:
        """Parse the program and its arguments with the real parsers."""
        program, *arguments = words
        ranks = None
        if arguments[:2] == ["-m", "torch.distributed.run"]:
            program, arguments = "torchrun", arguments[2:]
        if program == "torchrun":
            ranks = get_args_parser().parse_args(arguments)
            assert ranks.module
            arguments = ["-m", ranks.training_script, *ranks.training_script_args]
        assert arguments[:2] == ["-m", "megatron_chameleon"]
        command, flags = load_command(arguments[2]), arguments[3:]
        if isinstance(command, Choice):
            values, flags = take_values(command.flag, flags)
            command = command.find()[0][values[-1] if values else command.default]
        elif isinstance(command, Subcommands):
            command, flags = command.tools[flags[0]], flags[1:]
        return cls(program, ranks, parse_options(command.options, flags))


class Launched:
    """Exit status, output and recorded commands of a launcher."""

    def __init__(self, done: subprocess.CompletedProcess[str], calls: Path) -> None:
        self.status, self.printed, self.errors = done.returncode, done.stdout, done.stderr
        text = calls.read_text() if calls.exists() else ""
        self.calls = [Call.read(line.split("\0")) for line in text.split("\0\x1e\0")[:-1]]

    def training(self) -> list[PretrainOptions]:
        return [call.options for call in self.calls if isinstance(call.options, PretrainOptions)]


class Launcher:
    """Runs launchers in an empty folder with the stand-ins in the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs, self.calls = folder, folder / "bin", folder / "calls"
        self.programs.mkdir()
        for name in ("torchrun", "python"):
            (self.programs / name).write_text(RECORDER)
            (self.programs / name).chmod(0o755)

    def __call__(self, name: str, *arguments: str, **environment: str) -> Launched:
        """Run examples/NAME.sh with only these settings in the environment."""
        path = f"{self.programs}:{os.environ['PATH']}"
        self.calls.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(EXAMPLES / f"{name}.sh"), *arguments],
            env={"PATH": path, "CALLS": str(self.calls), **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        return Launched(done, self.calls)


def succeeded(launched: Launched) -> Launched:
    assert launched.status == 0, launched.errors + launched.printed
    return launched


def rejected(launched: Launched) -> str:
    """Return the error message of a launcher that started no command."""
    assert (launched.status, launched.calls) == (2, [])
    (line,) = launched.errors.splitlines()
    assert line.startswith("error: ")
    return line


def write_everything(folder: Path) -> None:
    """Create empty files for every corpus, mixture and run that launchers use by default."""
    for name in ("slimpajama", "slimpajama-6b", "pile", "wiki40b", "stack", "quickstart"):
        (folder / f"runs/{name}/1-corpus").mkdir(parents=True)
        (folder / f"runs/{name}/1-corpus/corpus.json").touch()
    names = ["slimpajama", "pile", "wiki40b", "stack", "finetune-model"]
    names += [f"llama-{size}" for size in ("130m", "350m", "1b")]
    for name in (*names, *(f"tiny/{name}" for name in COMPARING)):
        (folder / f"runs/{name}/4-mixture").mkdir(parents=True)
        for mixture in ("chameleon-pretrain", "chameleon-finetune"):
            path = folder / f"runs/{name}/4-mixture/{mixture}.json"
            Mixture({"a": 0.5, "b": 0.5}, method="manual").save(path)
    (folder / "hub/model").mkdir(parents=True)
    (folder / "hub/model/config.json").touch()
    (folder / "runs/pile/5-base/chameleon-pretrain-seed1").mkdir(parents=True)
    (folder / "runs/tiny/pretrain_684m_pile/5-base/uniform-seed1").mkdir(parents=True)
    (folder / "runs/slimpajama/2-proxy/82m-seed1").mkdir(parents=True)
    (folder / "runs/tiny/pretrain_82m_proxy/2-proxy/tiny-seed1").mkdir(parents=True)
