"""The page of measurements, made of benchmarks/results: no figure on it is typed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

INTRODUCTION = """\
# Measurements

What the scripts in `benchmarks/` have measured, as they wrote it to `benchmarks/results`. This page
is made of those files whenever the site is built. A ratio above 1 is in favour of "ours". Ratios of
medians count: the contestants run in turn on one machine, and what else it does troubles all of
them. A file whose name ends in `-cpu` is of a machine without a GPU; what has no file has not been
measured.

    python benchmarks/NAME.py     # one of them, on the device it finds
    make measure-gpu              # the GPU tests, then all that measure a CUDA device
"""
# Of a row, what is told in other places than among its figures.
_APART = frozenset(("what", "date", "machine", "packages", "repeats", "seconds", "times_faster"))


def measurements_page(root: Path) -> str:
    """The page, in Markdown."""
    results = sorted((root / "benchmarks/results").glob("*.json"))
    parts = [INTRODUCTION]
    for path in results:
        parts += _section(path, json.loads(path.read_text(encoding="utf-8")), root)
    return "\n".join([*parts, *_unmeasured(root, results)])


def _section(path: Path, body: Mapping[str, Any], root: Path) -> list[str]:
    """One file of results."""
    rows = [row for row in body.get("rows", []) if isinstance(row, dict)] or [dict(body)]
    places = [_place_told(row, body) for row in rows]
    known = list(dict.fromkeys(places))
    parts = [f"## {path.stem}", ""]
    script = script_of(path, root)
    if script is not None:
        summary, command = _docstring_of(script)
        parts += [summary, "", f"    {command}", ""]
    parts += [f"{number}. {told}" for number, told in enumerate(known, start=1)]
    numbered = [(row, known.index(told) + 1) for row, told in zip(rows, places, strict=True)]
    compared = [(row, number) for row, number in numbered if _is_compared(row)]
    parts += ["", *_comparison(compared)] if compared else []
    for row, number in numbered:
        figures = list(_figures({k: v for k, v in row.items() if k not in _apart_of(row)}))
        if figures:
            where = f" ({number})" if len(known) > 1 else ""
            parts += ["", f"#### {row.get('what', path.stem)}{where}", "", "| | |", "|---|---|"]
            parts += [f"| {name} | {value} |" for name, value in figures]
    return [*parts, ""]


def _place_told(row: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """When and on which machine a row was measured; what it does not say, its file says."""
    date = row.get("date") or body.get("date")
    told = machine_told(row.get("machine") or body.get("machine") or {})
    return f"{date}: {told}" if date else told


def _apart_of(row: Mapping[str, Any]) -> frozenset[str]:
    return _APART if _is_compared(row) else _APART - {"seconds", "repeats"}


def _is_compared(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("seconds"), dict) and isinstance(row.get("times_faster"), dict)


def _comparison(rows: Sequence[tuple[Mapping[str, Any], int]]) -> list[str]:
    """A table of rows whose contestants do the same work; each with where it was measured."""
    lines = ["| What | Seconds | Times faster | Repeats | Measured |", "|---|---|---|---|---|"]
    for row, number in rows:
        seconds = "<br>".join(f"{name}: {figure(v)}" for name, v in row["seconds"].items())
        faster = "<br>".join(f"{name}: {v:.2f}" for name, v in row["times_faster"].items())
        told = (row["what"], seconds, faster, row.get("repeats", ""), f"({number})")
        lines.append(f"| {' | '.join(str(cell) for cell in told)} |")
    return lines


def _figures(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The single figures of a row, each with its name; lists of repeats are left out."""
    if isinstance(value, dict):
        for key, item in value.items():
            plain = str(key).replace("_", " ")
            yield from _figures(item, f"{name}, {plain}" if name else plain)
    elif isinstance(value, bool | int | float | str):
        yield name, figure(value)


def figure(value: bool | int | float | str) -> str:
    """A value for people: four digits of a fraction, thousands apart."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    return (
        f"{value:.4g}"
        if abs(value) < 1e4
        else f"{value:,.0f}"
        if abs(value) < 1e9
        else f"{value:.3g}"
    )


def machine_told(machine: Mapping[str, Any]) -> str:
    """The machine and the versions on it, on one line."""
    device = machine.get("device")
    hardware = [
        *([str(device)] if device not in (None, "cpu") else []),
        str(machine.get("processor", "a processor that is not named")),
        *([f"{machine['cores']} cores"] if "cores" in machine else []),
        *([f"{machine['memory_gb']} GB"] if "memory_gb" in machine else []),
    ]
    versions = [f"Python {machine['python']}"] if "python" in machine else []
    versions += [f"CUDA {machine['cuda']}"] if machine.get("cuda") else []
    versions += [f"{name} {version}" for name, version in machine.get("packages", {}).items()]
    return f"{', '.join(hardware)}; {', '.join(versions) or 'versions not written down'}"


def script_of(results: Path, root: Path) -> Path | None:
    """The benchmark that writes a file of results: NAME.py writes NAME.json or NAME-DEVICE.json."""
    stem = results.stem.replace("-", "_")
    scripts = [p for p in (root / "benchmarks").glob("*.py") if f"{stem}_".startswith(f"{p.stem}_")]
    return max(scripts, key=lambda script: len(script.stem), default=None)


def _docstring_of(script: Path) -> tuple[str, str]:
    """The first line of a benchmark's docstring, and the command that it shows."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    command = re.search(rf"python benchmarks/{script.stem}\.py.*", text)
    return text.partition("\n")[0], command[0] if command else f"python benchmarks/{script.name}"


def _unmeasured(root: Path, results: Sequence[Path]) -> list[str]:
    """The benchmarks that have left no results yet."""
    measured = {script_of(path, root) for path in results}
    lines = []
    for script in sorted((root / "benchmarks").glob("*.py")):
        summary, command = _docstring_of(script)
        runs = '__name__ == "__main__"' in script.read_text(encoding="utf-8")
        if runs and script not in measured:
            lines += [f"- `{command}`: {summary}"]
    return ["## Not measured yet", "", *lines, ""] if lines else []
