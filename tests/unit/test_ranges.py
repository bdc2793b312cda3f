"""Test that every options class rejects numbers that do not fit into int64 or float32."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
from pathlib import Path
from typing import TypeGuard

import pytest

from megatron_chameleon.blend.options import TraceOptions
from megatron_chameleon.checkpoint.options import PushOptions
from megatron_chameleon.cli import parse_options, run_tool
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.options import ConvertOptions
from megatron_chameleon.methods.manual import ManualOptions
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.ranges import LARGEST_FLOAT32, LARGEST_INT64
from megatron_chameleon.training.options import PretrainOptions

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_chameleon"


def is_options(value: object) -> TypeGuard[type]:
    return isinstance(value, type) and dataclasses.is_dataclass(value)


def options_of_the_package() -> list[type]:
    found: list[type] = [*(method.options for method in find_methods().values())]
    for path in sorted(PACKAGE.rglob("*options.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        own = (v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__)
        found += [value for value in own if is_options(value)]
    return list(dict.fromkeys(found))


EXTREMES = (-(2**64), -1, 0, 2**31, 2**63, 2**64, 10**4000)
FLOAT_EXTREMES = (math.nan, math.inf, -math.inf, -1.0, 0.0, 5e-324, 1e308)
REQUIRED = {"clusters": "4", "discover": "4", "format": "json", "method": "uniform"}
REQUIRED |= {"num_proxies": "4", "output": "x.json", "mixtures": "uniform x", "seeds": "1 2 3"}
REQUIRED |= {"token_budget": "1", "split": "test"}
# Flags of which one must be passed, although each has a default.
CHOSEN = {
    ImportOptions: "--data-path x --tokenizer-model x",
    ManualOptions: "--weights x",
    ConvertOptions: "--mixture x",
    TraceOptions: "--steps 1:2",
    PushOptions: "--output x",
}


def default_options(options_type):
    """Parse options with a value for each required field and the other defaults."""
    is_training = issubclass(options_type, PretrainOptions)
    argv = ["--corpus", "x"] if is_training else CHOSEN.get(options_type, "").split()
    for field in dataclasses.fields(options_type):
        needed = field.default is field.default_factory is dataclasses.MISSING
        if field.name == "source":
            argv += ["--input", "x"]
        elif field.name == "runs":
            argv = ["x", *argv]
        elif needed:
            argv += [f"--{field.name.replace('_', '-')}", *REQUIRED.get(field.name, "x").split()]
    return parse_options(options_type, argv)


def numeric_fields(options, kind):
    """Yield name and setter of each field of type ``kind``, including fields of nested options."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            for name, put in numeric_fields(value, kind):
                yield name, lambda n, f=field, p=put: dataclasses.replace(options, **{f.name: p(n)})
        elif type(value) is kind:
            yield field.name, lambda n, f=field: dataclasses.replace(options, **{f.name: n})


@pytest.mark.parametrize("options_type", options_of_the_package(), ids=lambda t: t.__name__)
def test_number_is_rejected_or_representable(options_type):
    options = default_options(options_type)
    for kind, extremes, most in (
        (int, EXTREMES, LARGEST_INT64),
        (float, FLOAT_EXTREMES, LARGEST_FLOAT32),
    ):
        for name, put in numeric_fields(options, kind):
            for number in extremes:
                if abs(number) <= most:  # the type can hold it, so the field may accept it
                    with contextlib.suppress(UserError):
                        put(number)
                    continue
                with pytest.raises(UserError, match=f"--{name.replace('_', '-')} "):
                    put(number)


def test_tool_rejects_a_number_before_it_starts(capsys):
    for flag in ("--train-iters 1000000000000", f"--eval-iters 1{'0' * 5000}", "--adam-eps nan"):
        argv = ["--run-dir", "x", "--corpus", "x", *flag.split()]
        with pytest.raises(SystemExit) as left:
            run_tool(lambda _options: pytest.fail("it started"), PretrainOptions, argv)
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert flag.split()[0] in line
