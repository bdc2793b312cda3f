"""Shared code of the benchmarks: interleaved timing, machine description and JSON results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.files import write_json
from megatron_chameleon.artifacts.provenance import machine_info, package_versions
from megatron_chameleon.errors import STOPPED_STATUS

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = (
    "megatron-core",
    "torch",
    "triton",
    "numpy",
    "numba",
    "tokenizers",
    "gigatoken",
    "tiktoken",
)


def interleaved(
    contestants: Mapping[str, Callable[[], object]], repeats: int = 5
) -> dict[str, list[float]]:
    """Time ``repeats`` interleaved runs of each contestant, in seconds.

    Other load on the machine varies over time; interleaving makes it affect all contestants.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Measure a GPU operation's median milliseconds by CUDA events, after three warm-up runs."""
    import torch

    times = []
    for number in range(repeats + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def compared(what: str, seconds: Mapping[str, Sequence[float]], **more: Any) -> dict[str, Any]:
    """A row of results: median seconds, and the speedup of each contestant over "theirs"."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "what": what,
        "repeats": min(len(times) for times in seconds.values()),
        "seconds": medians,
        "times_faster": {
            name: medians["theirs"] / median for name, median in medians.items() if name != "theirs"
        },
        **more,
    }


def format_row(row: Mapping[str, Any]) -> str:
    """Format a row on one line."""
    parts = [f"{name} {times:.1f}x" for name, times in row["times_faster"].items()]
    return f"{row['what']}: {', '.join(parts)}; theirs {row['seconds']['theirs']:.3g} s"


def machine() -> dict[str, Any]:
    """Describe the machine, the software versions, and the load average before a measurement."""
    return {
        **machine_info(),
        "python": platform.python_version(),
        "packages": package_versions(PACKAGES),
        "load_at_start": os.getloadavg()[0],
    }


def device_file(name: str, device: str) -> str:
    """Name of the results file of ``name`` on ``device``."""
    return f"{name}-" + re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def put_row(name: str, on: Mapping[str, Any], row: dict[str, Any]) -> Path:
    """Write ``row`` to results/``name``.json, replacing the row with the same "what".

    Each row has its own date and machine, since rows may come from different machines.
    """
    path = RESULTS / f"{name}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    rows = [other for other in rows if other["what"] != row["what"]]
    rows = sorted([*rows, {"date": today, "machine": on, **row}], key=lambda r: str(r["what"]))
    write_json(path, json.loads(json.dumps({"rows": rows})))
    return path


def measure_rows(
    rows: Mapping[str, Callable[[], dict[str, Any]]],
    save: Callable[[dict[str, Any]], object],
    seconds: float,
    finished: Path | None,
) -> int:
    """Measure and save rows within a time limit.

    A row is skipped if it would exceed the limit by taking as long as the longest row so far.

    Args:
        rows: "what" -> function that measures the row.
        save: called with each row.
        seconds: time limit of all rows.
        finished: file of rows to skip, one "what" per line; measured rows are appended.

    Returns:
        The exit status: STOPPED_STATUS if rows were skipped for lack of time, else 0.
    """
    begin, longest, status = time.perf_counter(), 0.0, 0
    skipped = finished.read_text().splitlines() if finished and finished.exists() else []
    for what, measure in rows.items():
        row_begin = time.perf_counter()
        if what in skipped:
            continue
        if row_begin + longest - begin > seconds:
            print(f"skipped for lack of time: {what}")
            status = STOPPED_STATUS
            continue
        save(measure())
        if finished:
            with finished.open("a") as stream:
                stream.write(f"{what}\n")
        longest = max(longest, time.perf_counter() - row_begin)
    return status
