"""Tabulate and draw the gains of mixtures for targets: our small runs, and published runs at scale.

    python benchmarks/target_evidence.py \
      benchmarks/results/compare-targets-{installed,registers,code}.json \
      --output docs/targets.png --public benchmarks/results/public-runs.json

The records are those of examples/compare_methods.sh with TARGETS. The table has the mean gain of
each method over the targets of each record and of all, with its standard error over targets.

The left panel has a row for each target: the gain of a mixture over Uniform in the target's
held-out loss, with its 95% interval over seeds, and the gain that was predicted. The right panel
has the gain, over the mixture nearest to Uniform, of the mixture that was chosen from published
runs of the smallest size, as measured by runs of larger sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtr, stdtrit

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.report import figures
from megatron_chameleon.report.significance import holm_adjusted
from megatron_chameleon.report.tables import MISSING, Table, terminal_table
from megatron_chameleon.report.targets import LEVEL

CHOSEN = "mixtures chosen from"
MEAN = "mean of the domains"


def frame_of(records: dict[str, dict[str, Any]], omitted: Collection[str]) -> pd.DataFrame:
    """Return one row per record, target and method.

    Columns: record, method, gain (mean over seeds), predicted (NaN if none is), and p_value
    (corrected by Holm's method for all rows, with a variance that is pooled over the records).
    """
    rows = [
        {
            "record": name,
            "method": method,
            "gain": np.mean(gains),
            "predicted": found["predicted_gain"].get(method, np.nan),
            "equals_baseline": found["equals_baseline"][method],
        }
        for name, record in records.items()
        for target, found in record["targets"].items()
        if target not in omitted
        for method, gains in found["gain"].items()
    ]
    frame = pd.DataFrame(rows).assign(p_value=1.0)
    freedom = [record["degrees_of_freedom"] for record in records.values()]
    squares = [record["pooled_standard_error"] ** 2 for record in records.values()]
    if sum(freedom):
        error = np.sqrt(np.average(squares, weights=freedom))
        tested = ~frame["equals_baseline"]
        plain = 2 * stdtr(sum(freedom), -np.abs(frame["gain"][tested].to_numpy() / error))
        frame.loc[tested, "p_value"] = holm_adjusted(plain)
    return frame


def tabulate(frame: pd.DataFrame) -> Table:
    """Tabulate the mean gains of each method over the targets of each record, and of all."""
    header = [*frame["record"].unique(), "all", "better", "worse", "predicted", "Pearson"]
    rows = []
    for method, found in frame.groupby("method", sort=False):
        by_record = [found[found["record"] == name]["gain"] for name in frame["record"].unique()]
        cells = [
            f"{one.mean():+.3f} ± {one.sem():.3f}" if len(one) else MISSING
            for one in (*by_record, found["gain"])
        ]
        sure = found["p_value"] < LEVEL
        cells += [f"{sum(sure & side)}" for side in (found["gain"] > 0, found["gain"] < 0)]
        known = found.dropna(subset="predicted")
        cells.append(f"{known['predicted'].mean():+.3f}" if len(known) else MISSING)
        correlation = known["gain"].corr(known["predicted"])
        # A mixture that equals the baseline has gains of 0.
        enough = (~known["equals_baseline"]).sum() >= 3
        rows.append([method, *cells, f"{correlation:.2f}" if enough else MISSING])
    notes = [
        "Gain in nats per token; ± is the standard error over targets. Better, worse: targets of "
        f"all records whose gain is significant at {LEVEL:.0%} after Holm's correction for all "
        "gains of the table, with a variance between seeds that is pooled over the records."
    ]
    return Table.of("Mean gains over targets", ["method", *header], rows, notes=notes)


def draw_targets(axes: Axes, records: dict[str, dict[str, Any]], method: str) -> list[Any]:
    """Draw real and predicted gains of ``method``, a row for each target; return the handles."""
    rows = []
    for name, record in records.items():
        half = record["pooled_standard_error"] * stdtrit(record["degrees_of_freedom"], 0.975)
        for target, found in record["targets"].items():
            gains = found["gain"][method]
            predicted = found["predicted_gain"].get(method)
            equal = found["equals_baseline"][method]
            label = target if len(records) == 1 else f"{target} ({name})"
            rows.append((sum(gains) / len(gains), label, 0.0 if equal else half, predicted))
    rows.sort()
    color, other = figures.COLORS[:2]
    handles: list[Any] = []
    for place, (gain, _label, half, predicted) in enumerate(rows):
        axes.hlines(place, gain - half, gain + half, color=color, linewidth=1.4)
        real = axes.plot(gain, place, "o", color=color, ms=5, ls="none")
        if predicted is not None:
            points = axes.plot(predicted, place, "s", color=other, ms=4, ls="none", mfc="none")
            if not handles:
                handles = [*real, *points]
    axes.set_yticks(range(len(rows)), [label for _, label, _, _ in rows], parse_math=False)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title("0.5M parameters: targets not trained on", fontsize=10)
    return handles


def draw_public(axes: Axes, public: dict[str, Any]) -> None:
    """Draw the gain of the chosen mixture on each target at each larger size."""
    (table,) = [
        table
        for table in public["tables"]
        if table["title"].startswith("SlimPajama") and CHOSEN in table["title"]
    ]
    targets = list(dict.fromkeys(row["target"] for row in table["rows"]))
    targets.sort(key=lambda name: (name != MEAN, name == "openhermes", name), reverse=True)
    sizes = list(dict.fromkeys(row["size"] for row in table["rows"]))
    handles: list[Any] = []
    for marker, color, size in zip("o^sDv", figures.COLORS, sizes, strict=False):
        rows = {row["target"]: row["gain"] for row in table["rows"] if row["size"] == size}
        places = [targets.index(name) for name in rows]
        handles += axes.plot(list(rows.values()), places, marker, color=color, ms=5, ls="none")
    axes.set_yticks(range(len(targets)), targets, parse_math=False)
    axes.set_ylim(-0.6, len(targets) - 0.4)
    smallest = table["title"].split(CHOSEN)[1].split()[0]
    axes.set_title(f"published runs: chosen at {smallest}", fontsize=10)
    axes.legend(handles, sizes, loc="upper right", frameon=False, fontsize=9)


def figure_of(records: dict[str, dict[str, Any]], public: dict[str, Any], method: str) -> Figure:
    """Draw both panels."""
    count = sum(len(record["targets"]) for record in records.values())
    figure = figures.new_figure(10.5, 1.5 + 0.24 * max(count, 9))
    left, right = figure.subplots(1, 2)
    handles = draw_targets(left, records, method)
    draw_public(right, public)
    for axes in (left, right):
        axes.axvline(0, color=figures.REFERENCE_COLOR, linestyle="--", linewidth=1.2)
        axes.set_xlabel("gain in the target's loss, nats per token")
        figures.tidy(axes, "x")
    figures.legend_above(figure, handles, ["gain over Uniform", "predicted by n-gram models"])
    return figure


def main() -> None:
    """Print the table, and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--omit", nargs="+", default=[], help="targets to leave out of the table")
    parser.add_argument("--public", type=Path, help="record of public_runs.py, for the figure")
    parser.add_argument("--method", default="mixmin", help="method of the figure")
    parser.add_argument("--output", type=Path, help="write the figure to this file")
    arguments = parser.parse_args()
    if (arguments.output is None) != (arguments.public is None):
        parser.error("pass --output and --public together")
    records = {
        path.stem.removeprefix("compare-targets-"): json.loads(path.read_text())
        for path in arguments.records
    }
    print(terminal_table(tabulate(frame_of(records, arguments.omit))))
    if arguments.output is None:
        return
    public = json.loads(arguments.public.read_text())
    with replacing(arguments.output) as temporary:
        temporary.write_bytes(figures.png(figure_of(records, public, arguments.method)))
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
