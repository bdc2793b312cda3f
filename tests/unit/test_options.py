"""Every options class of the package: frozen, documented, and complete in its tool's --help."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import TypeGuard, get_type_hints

import pytest

from megatron_chameleon.cli import parse_options
from megatron_chameleon.interchange import ExportOptions
from megatron_chameleon.methods.method import find_methods

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_chameleon"


def is_options(value: object) -> TypeGuard[type]:
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def options_of_the_package() -> list[type]:
    found: list[type] = [ExportOptions, *(method.options for method in find_methods().values())]
    for path in sorted(PACKAGE.rglob("*options.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        own = (v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__)
        found += [value for value in own if is_options(value)]
    return list(dict.fromkeys(found))


def field_docstrings(options_type: type) -> dict[str, str]:
    """Field -> the string below it, with its line breaks turned into spaces."""
    (body,) = ast.parse(inspect.getsource(options_type)).body
    assert isinstance(body, ast.ClassDef)
    documented = {}
    for base in reversed(options_type.__bases__):
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


@pytest.mark.parametrize("options_type", options_of_the_package(), ids=lambda t: t.__name__)
def test_options_are_frozen_documented_and_shown_by_help(options_type, capsys, monkeypatch):
    assert options_type.__dataclass_params__.frozen
    documented = field_docstrings(options_type)
    assert [*documented] == [field.name for field in dataclasses.fields(options_type)]
    bare = {name for name, text in documented.items() if not text.endswith((".", ")"))}
    assert bare <= set(groups_of(options_type))  # a group is described by its class
    monkeypatch.setenv("COLUMNS", "100")  # too narrow for two columns next to each other
    with pytest.raises(SystemExit) as left:
        parse_options(options_type, ["--help"])
    assert left.value.code == 0
    shown = "".join(capsys.readouterr().out.replace("│", "").split())  # lines break anywhere
    flags = []
    for part in with_groups(options_type):
        for name, text in field_docstrings(part).items():
            assert "".join(text.split()) in shown, name
            flags += [name] if name not in groups_of(part) else []
        assert "".join((part.__doc__ or "").strip().split("\n")[0].split()) in shown
    assert len(flags) == len(set(flags))
