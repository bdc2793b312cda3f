"""Draw the gains of mixtures for targets: our small runs, and published runs at scale.

    python benchmarks/target_evidence.py --output docs/targets.png \
      --public benchmarks/results/public-runs.json \
      benchmarks/results/compare-targets-{installed,registers,code}.json

The left panel has a row for each target of the records of examples/compare_methods.sh with TARGETS:
the gain of a mixture over Uniform in the target's held-out loss, with its 95% interval over seeds,
and the gain that was predicted. The right panel has the gain, over the mixture nearest to Uniform,
of the mixture that was chosen from published runs of the smallest size, as measured by runs of
larger sizes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.special import stdtrit

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.report import figures

CHOSEN = "mixtures chosen from"
MEAN = "mean of the domains"


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
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--public", type=Path, required=True)
    parser.add_argument("--method", default="mixmin")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    records = {
        path.stem.removeprefix("compare-targets-"): json.loads(path.read_text())
        for path in arguments.records
    }
    public = json.loads(arguments.public.read_text())
    with replacing(arguments.output) as temporary:
        temporary.write_bytes(figures.png(figure_of(records, public, arguments.method)))
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
