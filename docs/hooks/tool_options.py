"""Read the command line of each tool from its options dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import MISSING_NONPROP

from megatron_chameleon import cli, commands

POSITIONAL: Any = tyro.conf.Positional
PLAIN = {
    bool: "True|False",
    int: "INT",
    float: "NUMBER",
    str: "TEXT",
    Path: "PATH",
    type(None): "None",
}


@dataclasses.dataclass(frozen=True)
class Tool:
    """A command.

    Attributes:
        name: name of the command.
        summary: docstring of the command's module, for the command's page.
        commands: maps each command ('perplexity', '--method doge', '--headroom'; '' for one) to its
            options.
    """

    name: str
    summary: str
    commands: Mapping[str, type[Any]]


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a tool: name ('--lr'), metavar ('NUMBER'), default (None if required) and help."""

    name: str
    values: str
    default: str | None
    help: str


@dataclasses.dataclass(frozen=True)
class FlagGroup:
    """The options of one dataclass: the group's name, the dataclass's docstring, and the flags."""

    name: str
    text: str
    flags: list[Flag]


def find_tools() -> dict[str, Tool]:
    """Return every command by name."""
    return {
        name: Tool(name, commands.documentation(name), _options_of(commands.load_command(name)))
        for name in commands.command_names()
    }


def _options_of(command: cli.Command) -> dict[str, type[Any]]:
    if isinstance(command, cli.Tool):
        return {"": command.options}
    if isinstance(command, cli.Subcommands):
        return {name: tool.options for name, tool in command.tools.items()}
    tools, _ = command.find()
    others = {flag: tool.options for flag, tool in command.others.items()}
    return {f"{command.flag} {name}": tool.options for name, tool in tools.items()} | others


def flag_groups(options_type: type[Any], options: Any = None, name: str = "") -> list[FlagGroup]:
    """Return the flags of an options dataclass, and those of each nested dataclass with flags.

    Args:
        options_type: the dataclass.
        options: an instance with the default values; None for the dataclass's own defaults.
        name: name of the first group; nested groups are named by their fields.
    """
    helps, hints = cli.field_helps(options_type), get_type_hints(options_type, include_extras=True)
    own, nested = [], []
    for field in dataclasses.fields(options_type):
        hint, default = hints[field.name], cli.default_of(field, options)
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            groups = flag_groups(hint, default, field.name.replace("_", " "))
            nested += [group for group in groups if group.flags]
        else:
            own.append(_flag(field.name, hint, default, helps.get(field.name, "")))
    return [FlagGroup(name, inspect.getdoc(options_type) or "", own), *nested]


def _flag(name: str, hint: Any, default: Any, text: str) -> Flag:
    dashed = name.replace("_", "-")
    inner, markers = _without_markers(hint)
    if inner is bool and default is not MISSING_NONPROP:
        return Flag(f"--{dashed}, --no-{dashed}", "", _format_default(default), text)
    values = _values_of(inner)
    if POSITIONAL in markers:
        return Flag(
            dashed.upper(), "..." if values.endswith("...") else "", _format_default(default), text
        )
    return Flag(f"--{dashed}", values, _format_default(default), text)


def _without_markers(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without its ``Annotated`` markers, and the markers."""
    if get_origin(hint) is Annotated:
        inner, *markers = get_args(hint)
        return inner, tuple(markers)
    return hint, ()


def _values_of(hint: Any) -> str:
    """Return the metavar of a type: INT, one|of|these, TEXT ..."""
    hint, _ = _without_markers(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        known = bool in arguments  # for `bool | None`, None is also a value
        return "|".join(_values_of(each) for each in arguments if known or each is not type(None))
    if origin in (tuple, list):
        values = _values_of(arguments[0])
        return values if values.endswith("...") else f"{values} ..."
    return PLAIN[hint]


def _format_default(default: Any) -> str | None:
    """Format a default as on the command line; '' for None or (), None for a required option."""
    if default is MISSING_NONPROP:
        return None
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(str(value) for value in default)
    return f"{default:g}" if isinstance(default, float) else str(default)
