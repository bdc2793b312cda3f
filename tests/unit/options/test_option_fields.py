"""Every option of every tool is documented, frozen and of one name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
from typing import TypeGuard, get_type_hints

import pytest

import megatron_chameleon.options as options_package
from megatron_chameleon.cli import parse_options
from megatron_chameleon.corpus.options import (
    GatherOptions,
    PreprocessOptions,
    TrainTokenizerOptions,
)
from megatron_chameleon.evaluation.options import (
    DownstreamOptions,
    PerplexityOptions,
    PerplexityToolOptions,
)
from megatron_chameleon.interchange import ExportOptions
from megatron_chameleon.methods.common.registry import find_methods
from megatron_chameleon.methods.discovery.options import DiscoverOptions
from megatron_chameleon.options.convert import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.options.doctor import DoctorOptions
from megatron_chameleon.options.head_to_head import CompareMethodsOptions
from megatron_chameleon.options.memory import EstimateMemoryOptions
from megatron_chameleon.options.report import ReportOptions
from megatron_chameleon.options.sweep import SweepOptions
from megatron_chameleon.options.training import PretrainOptions


def is_options(value: object) -> TypeGuard[type]:
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def dataclasses_of_the_package() -> list[type]:
    found: list[type] = []
    names = [module.name for module in pkgutil.iter_modules(options_package.__path__)]
    of_stages = ("corpus", "evaluation", "methods.discovery")
    modules = [f"{options_package.__name__}.{name}" for name in names]
    for name in [*modules, *(f"megatron_chameleon.{stage}.options" for stage in of_stages)]:
        module = importlib.import_module(name)
        found += [
            value
            for value in vars(module).values()
            if is_options(value) and value.__module__ == module.__name__
        ]
    return found


METHODS = [method.options for method in find_methods().values()]  # in the package methods
TOOLS = [
    CompareMethodsOptions,
    DiscoverOptions,
    DoctorOptions,
    DownstreamOptions,
    EstimateMemoryOptions,
    ExportOptions,
    FromHuggingFaceOptions,
    GatherOptions,
    PerplexityOptions,  # of one checkpoint, made of those of the tool
    PerplexityToolOptions,
    PreprocessOptions,
    PretrainOptions,
    ReportOptions,
    SweepOptions,
    ToHuggingFaceOptions,
    TrainTokenizerOptions,
    *METHODS,
]


def field_docstrings(options_type: type) -> dict[str, str]:
    """Field -> the string below it, with its line breaks turned into blanks."""
    (body,) = ast.parse(inspect.getsource(options_type)).body
    assert isinstance(body, ast.ClassDef)
    documented = {}
    for base in options_type.__bases__:
        if is_options(base):  # inherited fields come first, as in dataclasses.fields
            documented.update(field_docstrings(base))
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = following.value.value if is_text else ""  # type: ignore[union-attr]
            documented[statement.target.id] = " ".join(str(text).split())
    return documented


def groups_of(options_type: type) -> dict[str, type]:
    """Field -> dataclass, for the fields that hold options themselves, inherited ones included."""
    hints = get_type_hints(options_type)
    return {name: hint for name, hint in hints.items() if is_options(hint)}


def with_groups(options_type: type) -> list[type]:
    return [options_type, *(t for g in groups_of(options_type).values() for t in with_groups(g))]


PACKAGE = dataclasses_of_the_package()
ALL = list(dict.fromkeys([*PACKAGE, *(part for tool in TOOLS for part in with_groups(tool))]))


def test_every_options_class_belongs_to_a_tool():
    """By being a tool's options, a group of them, or what one of these is derived from."""
    parts = {part for tool in TOOLS for part in with_groups(tool)}
    bases = {base for part in parts for base in part.__mro__ if is_options(base)}
    assert set(PACKAGE) <= bases


@pytest.mark.parametrize("options_type", ALL, ids=lambda t: t.__name__)
def test_options_are_frozen(options_type):
    assert options_type.__dataclass_params__.frozen


@pytest.mark.parametrize("options_type", ALL, ids=lambda t: t.__name__)
def test_every_field_has_a_docstring(options_type):
    documented = field_docstrings(options_type)
    assert list(documented) == [field.name for field in dataclasses.fields(options_type)]
    bare = [name for name, text in documented.items() if not text.endswith((".", ")"))]
    # A group is described by its class.
    assert set(bare) <= set(groups_of(options_type))
    assert (options_type.__doc__ or "").strip().split("\n")[0].endswith(".")


@pytest.mark.parametrize("options_type", TOOLS, ids=lambda t: t.__name__)
def test_help_shows_every_docstring(options_type, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")  # too narrow for two columns beside each other
    with pytest.raises(SystemExit) as left:
        parse_options(options_type, ["--help"])
    assert left.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for part in with_groups(options_type):
        for name, text in field_docstrings(part).items():
            assert text in shown, name
        summary = (part.__doc__ or "").strip().split("\n")[0]
        assert summary in shown


@pytest.mark.parametrize("options_type", TOOLS, ids=lambda t: t.__name__)
def test_help_is_broken_at_its_margin_alone(options_type, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse_options(options_type, ["--help"])
    lines = [line.replace("│", " ").rstrip() for line in capsys.readouterr().out.splitlines()[3:]]
    margin = max(len(line) for line in lines if line.startswith(6 * " "))
    continued = 0
    for line, following in itertools.pairwise(lines):
        column = len(following) - len(following.lstrip())
        # A text goes on where the line above has text in the same column.
        above = line[column - 2 : column + 1]
        if column >= 6 and above.startswith("  ") and above.strip():
            continued += 1
            word = following.split()[0]
            assert len(line) + len(" ") + len(word) > margin, (line, following)
    assert continued


@pytest.mark.parametrize("options_type", TOOLS, ids=lambda t: t.__name__)
def test_no_two_groups_of_a_tool_share_a_flag(options_type):
    names = [
        field.name
        for part in with_groups(options_type)
        for field in dataclasses.fields(part)
        if field.name not in groups_of(part)
    ]
    assert len(names) == len(set(names))
