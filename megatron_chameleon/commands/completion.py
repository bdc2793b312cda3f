"""Print a script that completes commands and flags in bash, zsh or fish."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_type_hints

import tyro

from megatron_chameleon import cli
from megatron_chameleon.commands import PROGRAM, command_names, load_command

# Parts of the scripts that tyro generates -> replacement. In fish, tyro passes a program that
# contains all flags as an argument, but Linux limits an argument to 128 KiB. In bash, it appends a
# space instead of a slash to the name of a folder.
_REPLACED_LINES = {
    '$python_cmd -c "$pycode" $': 'printf %s "$pycode" | $python_cmd - $',
    "\ncomplete -F ": "\ncomplete -o filenames -F ",
}


@dataclasses.dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands and flags; it is read when a shell starts."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def main(options: CompletionOptions) -> None:
    """Print the script, which tyro generates from the options of all commands."""
    parsers = {name: _parser_of(name, load_command(name)) for name in command_names()}
    arguments = ["--tyro-write-completion", options.shell, "-"]
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    script = io.StringIO()
    try:
        with contextlib.redirect_stdout(script):
            tyro.cli(_one_of(parsers), prog=PROGRAM, args=arguments, config=config)
    except SystemExit as printed:  # tyro ends a process that prints a script
        if printed.code:
            raise
    text = script.getvalue()
    for generated, replacement in _REPLACED_LINES.items():
        text = text.replace(generated, replacement)
    print(text, end="")


def _parser_of(name: str, command: cli.Command) -> Any:
    """Return a type that tyro parses like the command."""
    if isinstance(command, cli.Tool):
        return _with_flags(name, _flags_of(command.options))
    if isinstance(command, cli.Subcommands):
        return _one_of({name: _parser_of(name, tool) for name, tool in command.tools.items()})
    tools, _ = command.find()
    # The flags depend on the value of the command's own flag, so complete those of every value.
    flags: dict[str, tuple[Any, Any]] = {
        command.flag.strip("-"): (Literal[tuple(tools)], command.default)
    }
    for tool in [*tools.values(), *command.others.values()]:
        flags |= _flags_of(tool.options)
    for flag in command.others:
        flags |= {flag.strip("-"): (bool, False)}
    return _with_flags(name, flags)


def _with_flags(name: str, flags: Mapping[str, tuple[Any, Any]]) -> type[Any]:
    fields = [
        (flag, kind, dataclasses.field(default=default, kw_only=True))
        for flag, (kind, default) in flags.items()
    ]
    return dataclasses.make_dataclass(name.replace("-", "_"), fields)


def _one_of(parsers: Mapping[str, Any]) -> Any:
    """Return a type that tyro parses as subcommands."""
    return Union[  # noqa: UP007
        tuple(Annotated[each, tyro.conf.subcommand(name)] for name, each in parsers.items())
    ]


def _flags_of(options_type: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> type and default of all flags, with those of nested dataclasses."""
    helps, hints = cli.field_helps(options_type), get_type_hints(options_type, include_extras=True)
    found: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(options_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            found |= _flags_of(hint)
        else:
            # In a completion script, a help text is one line.
            text = tyro.conf.arg(help=" ".join(helps.get(field.name, "").split()))
            found[field.name] = (Annotated[hint, text], cli.default_of(field, None))
    return found


COMMAND = cli.Tool(main, CompletionOptions)
