"""Generate the page of measurements from benchmarks/results."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

INTRODUCTION = """\
# Measurements

This page lists the results of the scripts in `benchmarks/`. It is generated from
`benchmarks/results` when the site is built. Each ratio compares the median times of two
implementations; a ratio above 1 means that "ours" is faster. The implementations run in turn on one
machine, so other load on this machine affects all of them. Files whose names end in `-cpu` were
measured on machines without a GPU. A benchmark without a file has not been run.

    python benchmarks/NAME.py     # one benchmark, on the available device
    make measure-gpu              # the GPU tests, then all benchmarks that use a CUDA device
"""
# Fields of a row that the table of its scalars omits, since other parts of the page show them.
_LISTED_ELSEWHERE = frozenset(
    ("what", "date", "machine", "packages", "repeats", "seconds", "times_faster")
)


def measurements_page(root: Path) -> str:
    """Return the page in Markdown."""
    results = sorted((root / "benchmarks/results").glob("*.json"))
    parts = [INTRODUCTION]
    for path in results:
        parts += _section(path, json.loads(path.read_text(encoding="utf-8")), root)
    return "\n".join([*parts, *_unmeasured(root, results)])


def _section(path: Path, body: Mapping[str, Any], root: Path) -> list[str]:
    """Return the lines of the section for one results file."""
    rows = [row for row in body.get("rows", []) if isinstance(row, dict)] or [dict(body)]
    places = [_format_place(row, body) for row in rows]
    known = list(dict.fromkeys(places))
    parts = [f"## {path.stem}", ""]
    script = script_of(path, root)
    if script is not None:
        summary, command = _docstring_of(script)
        parts += [summary, "", f"    {command}", ""]
    parts += [f"{number}. {place}" for number, place in enumerate(known, start=1)]
    numbered = [(row, known.index(place) + 1) for row, place in zip(rows, places, strict=True)]
    compared = [(row, number) for row, number in numbered if _is_compared(row)]
    parts += ["", *_comparison(compared)] if compared else []
    for row, number in numbered:
        figures = list(_figures({k: v for k, v in row.items() if k not in _listed_elsewhere(row)}))
        if figures:
            where = f" ({number})" if len(known) > 1 else ""
            parts += ["", f"#### {row.get('what', path.stem)}{where}", "", "| | |", "|---|---|"]
            parts += [f"| {name} | {value} |" for name, value in figures]
    return [*parts, ""]


def _format_place(row: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """Return the date and machine of a row; if the row has none, those of its file."""
    date = row.get("date") or body.get("date")
    machine = _format_machine(row.get("machine") or body.get("machine") or {})
    return f"{date}: {machine}" if date else machine


def _listed_elsewhere(row: Mapping[str, Any]) -> frozenset[str]:
    return _LISTED_ELSEWHERE if _is_compared(row) else _LISTED_ELSEWHERE - {"seconds", "repeats"}


def _is_compared(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("seconds"), dict) and isinstance(row.get("times_faster"), dict)


def _comparison(rows: Sequence[tuple[Mapping[str, Any], int]]) -> list[str]:
    """Return a table of the rows that compare implementations; machines are given by number."""
    lines = ["| What | Seconds | Times faster | Repeats | Measured |", "|---|---|---|---|---|"]
    for row, number in rows:
        seconds = "<br>".join(f"{name}: {figure(v)}" for name, v in row["seconds"].items())
        faster = "<br>".join(f"{name}: {v:.2f}" for name, v in row["times_faster"].items())
        cells = (row["what"], seconds, faster, row.get("repeats", ""), f"({number})")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _figures(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and value of each scalar in a row; lists of repeats are skipped."""
    if isinstance(value, dict):
        for key, item in value.items():
            plain = str(key).replace("_", " ")
            yield from _figures(item, f"{name}, {plain}" if name else plain)
    elif isinstance(value, bool | int | float | str):
        yield name, figure(value)


def figure(value: bool | int | float | str) -> str:
    """Format a value with four significant digits and thousands separators."""
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


def _format_machine(machine: Mapping[str, Any]) -> str:
    """Describe the machine and its software versions on one line."""
    device = machine.get("device")
    hardware = [
        *([str(device)] if device not in (None, "cpu") else []),
        str(machine.get("processor", "unknown processor")),
        *([f"{machine['cores']} cores"] if "cores" in machine else []),
        *([f"{machine['memory_gb']} GB"] if "memory_gb" in machine else []),
    ]
    versions = [f"Python {machine['python']}"] if "python" in machine else []
    versions += [f"CUDA {machine['cuda']}"] if machine.get("cuda") else []
    versions += [f"{name} {version}" for name, version in machine.get("packages", {}).items()]
    return f"{', '.join(hardware)}; {', '.join(versions) or 'unknown versions'}"


def script_of(results: Path, root: Path) -> Path | None:
    """Return the benchmark of a results file: NAME.py writes NAME.json or NAME-DEVICE.json."""
    stem = results.stem.replace("-", "_")
    scripts = [p for p in (root / "benchmarks").glob("*.py") if f"{stem}_".startswith(f"{p.stem}_")]
    return max(scripts, key=lambda script: len(script.stem), default=None)


def _docstring_of(script: Path) -> tuple[str, str]:
    """Return the first line of a benchmark's docstring, and the command in the docstring."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    command = re.search(rf"python benchmarks/{script.stem}\.py.*", text)
    return text.partition("\n")[0], command[0] if command else f"python benchmarks/{script.name}"


def _unmeasured(root: Path, results: Sequence[Path]) -> list[str]:
    """The benchmarks without results."""
    measured = {script_of(path, root) for path in results}
    lines = []
    for script in sorted((root / "benchmarks").glob("*.py")):
        summary, command = _docstring_of(script)
        runs = '__name__ == "__main__"' in script.read_text(encoding="utf-8")
        if runs and script not in measured:
            lines += [f"- `{command}`: {summary}"]
    return ["## Not measured yet", "", *lines, ""] if lines else []
