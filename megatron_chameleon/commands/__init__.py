"""The commands of ``megatron-chameleon``: every module of this package defines one as COMMAND.

A module is imported only when its command is called. Importing it loads no torch.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import sys
from pathlib import Path
from typing import NoReturn

import megatron_chameleon
from megatron_chameleon.cli import INTERRUPTED_STATUS, Command, exit_with_error, leave, start

PROGRAM = "megatron-chameleon"
USAGE = f"""\
usage: {PROGRAM} COMMAND [options]       one process
       torchrun --nproc-per-node N -m megatron_chameleon COMMAND [options]       N ranks

Commands ({PROGRAM} COMMAND --help prints the options):
"""


def command_names() -> list[str]:
    """Return the names of all commands, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def documentation(name: str) -> str:
    """Return the docstring of a command's module, without importing the module."""
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return ast.get_docstring(ast.parse(source)) or ""


def load_command(name: str) -> Command:
    """Import the module of a command, and return the command."""
    command: Command = importlib.import_module(f"{__name__}.{name}").COMMAND
    return command


def main() -> NoReturn:
    """Run the command that the first argument names, and exit the process."""
    rank = start()
    argument, *others = sys.argv[1:] or [""]
    names = command_names()
    if argument in ("-h", "--help", "help"):
        lines = (f"  {name:<23}{documentation(name).partition(chr(10))[0]}" for name in names)
        if rank == 0:
            print(USAGE + "\n".join(lines))
        leave(0)
    if argument == "--version":
        if rank == 0:
            print(megatron_chameleon.__version__)
        leave(0)
    name = argument.replace("-", "_")
    if name not in names:
        closest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        problem = f"unknown command '{argument}'" if argument else "no command"
        hint = f"did you mean '{closest[0]}'? " if closest else ""
        exit_with_error(f"{problem}; {hint}'{PROGRAM} --help' lists the commands", rank)
    sys.argv = [f"{PROGRAM} {name}", *others]
    try:
        load_command(name).run()
    except KeyboardInterrupt:  # during the imports, before the tool handles it
        sys.exit(INTERRUPTED_STATUS)
