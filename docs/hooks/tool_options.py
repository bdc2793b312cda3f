"""What each tool takes on its command line, read from its options as the command line does it."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import runpy
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest import mock

import tyro
from tyro.constructors import MISSING_NONPROP

from megatron_chameleon import cli

Commands = Mapping[str, tuple[Callable[[Any], int | None], type[Any]]]
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
    """A file of tools/.

    Attributes:
        name: of the file, without its suffix.
        summary: the file's docstring.
        commands: how it may be called ('perplexity', '--method doge'; '' where there is one way)
            -> its options.
    """

    name: str
    summary: str
    commands: Mapping[str, type[Any]]


@dataclasses.dataclass(frozen=True)
class Flag:
    """One option: '--lr', 'NUMBER', its default in words (None: it has to be given), its help."""

    name: str
    values: str
    default: str | None
    help: str


@dataclasses.dataclass(frozen=True)
class FlagGroup:
    """Options that belong together: the name of the group, its dataclass's docstring, and they."""

    name: str
    text: str
    flags: list[Flag]


def find_tools(root: Path) -> dict[str, Tool]:
    """Name -> tool, for every file of ``root``/tools."""
    return {path.stem: _tool_at(path) for path in sorted((root / "tools").glob("*.py"))}


def _tool_at(path: Path) -> Tool:
    """What the file hands to the command line; what it would call is not called."""
    commands: dict[str, type[Any]] = {}

    def run_tool(_function: object, options_type: type[Any], **_how: object) -> None:
        commands[""] = options_type

    def run_subcommand(given: Commands) -> None:
        commands.update({name: options for name, (_, options) in given.items()})

    def run_choice(choice: cli.Choice) -> None:
        given = choice.commands.items()
        commands.update({f"{choice.flag} {name}": options for name, (_, options) in given})

    recorded = {"run_tool": run_tool, "run_subcommand": run_subcommand, "run_choice": run_choice}
    with contextlib.ExitStack() as patches:
        for name, recorder in recorded.items():
            patches.enter_context(mock.patch.object(cli, name, recorder))
        runpy.run_path(str(path), run_name="__main__")
    summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return Tool(path.stem, summary, commands)


def flag_groups(options_type: type[Any], options: Any = None, name: str = "") -> list[FlagGroup]:
    """The flags of an options dataclass, and after them those of each dataclass in it that has any.

    Args:
        options_type: the dataclass.
        options: one whose values are the defaults; the dataclass's own unless given.
        name: of the first group; the others are called by their fields.
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
        return Flag(f"--{dashed}, --no-{dashed}", "", _told(default), text)
    values = _values_of(inner)
    if POSITIONAL in markers:
        return Flag(dashed.upper(), "..." if values.endswith("...") else "", _told(default), text)
    return Flag(f"--{dashed}", values, _told(default), text)


def _without_markers(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without what tyro is told of it, and that."""
    if get_origin(hint) is Annotated:
        inner, *markers = get_args(hint)
        return inner, tuple(markers)
    return hint, ()


def _values_of(hint: Any) -> str:
    """How a value of the type is written: INT, one|of|these, TEXT ..."""
    hint, _ = _without_markers(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "|".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        known = bool in arguments  # a flag that also knows "as it is"
        return "|".join(_values_of(each) for each in arguments if known or each is not type(None))
    if origin in (tuple, list):
        values = _values_of(arguments[0])
        return values if values.endswith("...") else f"{values} ..."
    return PLAIN[hint]


def _told(default: Any) -> str | None:
    """A default as it would be typed; '' where none is, None where one has to be given."""
    if default is MISSING_NONPROP:
        return None
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(str(value) for value in default)
    return f"{default:g}" if isinstance(default, float) else str(default)
