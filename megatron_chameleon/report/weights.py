"""Tables of mixture weights, sampled tokens, and the weights of a sweep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, Mixture, Sweep
from megatron_chameleon.artifacts.corpus import table_label
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import RunFolder, distinct_runs, run_labels
from megatron_chameleon.report.tables import MISSING, Table, format_epochs, formatted, four_decimals

# With more runs than this, a single table shows the extremes of each run.
MOST_TABLES = 6
# A sweep's table lists at most this many domains: those whose weights change most.
MOST_ROWS = 40
# Labels of swept hyperparameters; others are labelled by their names.
SWEPT_LABELS = {
    "steps": "proxy steps",
    "train_iters": "proxy steps",  # one run for each number, in earlier releases
    "model": "proxy size",
    "model_size": "proxy size",  # name of the option in earlier releases
    "ridge": "ridge",
    "num_windows": "windows per domain",
}

# Column heading -> domain -> formatted cell.
Columns = dict[str, dict[str, str]]


def weight_columns(label: str, weights: Mapping[str, float], mixture: Mixture | None) -> Columns:
    """Format columns of the weights and, if ``mixture`` has intervals, of the intervals."""
    columns = {f"{label} weight".strip(): {d: four_decimals(w) for d, w in weights.items()}}
    if mixture is not None and mixture.intervals is not None:
        coverage = "" if mixture.confidence is None else f"{100 * mixture.confidence:g}% "
        columns[f"{label} {coverage}interval".strip()] = {
            domain: " to ".join(map(four_decimals, ends))
            for domain, ends in mixture.intervals.items()
        }
    return columns


def weight_tables(folder: RunFolder) -> list[Table]:
    """Tables of all mixtures, then of each fine-tuning mixture with its pretraining mixture.

    The table of all mixtures is left out if the other tables show every mixture.
    """
    found, shown = [], set()
    modes = {name: mode_of(name, mixture) for name, mixture in folder.mixtures.items()}
    finetune = [name for name, mode in modes.items() if mode == "finetune"]
    for name in finetune:
        mixture, columns = folder.mixtures[name], Columns()
        scores = mixture.scores or {}
        columns["leverage score"] = {
            # Small scores are in scientific notation; fixed decimals would drop their digits.
            domain: f"{score:.4f}" if score >= 0.01 or score == 0 else f"{score:.3e}"
            for domain, score in scores.items()
        }
        # The names of matching mixtures differ only in "finetune" and "pretrain".
        partner = name.replace("finetune", "pretrain")
        if modes.get(partner) == "pretrain":
            other = folder.mixtures[partner]
            columns |= weight_columns("pretraining", other.weights, other)
            shown.add(partner)
        columns |= weight_columns("fine-tuning", mixture.weights, mixture)
        title = "Weights for pretraining and fine-tuning"
        title += f": {name}" if len(finetune) > 1 else ""
        texts = pd.DataFrame(columns, list(mixture.weights))
        found.append(Table.by_row(title, "domain", texts))
        shown.add(name)
    if not folder.mixtures.keys() <= shown:
        columns, notes = {}, ["Shares of training tokens."]
        for name, mixture in folder.mixtures.items():
            columns |= weight_columns(name, mixture.weights, mixture)
        methods = [
            f"{n}: {m.method}" for n, m in folder.mixtures.items() if m.method not in ("", n)
        ]
        notes += [f"Methods: {', '.join(methods)}."] if methods else []
        domains = dict.fromkeys(d for m in folder.mixtures.values() for d in m.weights)
        texts = pd.DataFrame(columns, list(domains))
        found.insert(0, Table.by_row("Weights of each mixture", "domain", texts, notes=notes))
    return found


def mode_of(name: str, mixture: Mixture) -> str | None:
    """Purpose of a mixture, "pretrain" or "finetune", from its parameters or else its name.

    The name is used only for Chameleon's mixtures and for mixtures of unknown method.
    """
    stated = mixture.parameters.get("mode")
    if stated is not None:
        return str(stated)
    if mixture.method and not mixture.method.startswith("chameleon"):
        return None
    return next((mode for mode in ("pretrain", "finetune") if name.endswith(mode)), None)


def token_tables(folder: RunFolder) -> list[Table]:
    """Tables by base run and domain: target tokens, actual tokens, difference and epochs.

    With more than ``MOST_TABLES`` runs, a single table shows each run's largest difference and most
    epochs.
    """
    names = distinct_runs(folder, folder.base_runs)
    runs = {name: run for name in names if (run := folder.base_runs[name]).domain_tokens}
    labels = run_labels(folder.base_runs, runs)
    percent, count = "{:+.2%}".format, "{:,.0f}".format
    tables, extremes = [], []
    changed, unfinished = [], []
    for name, run in runs.items():
        frame = pd.DataFrame({d: dataclasses.asdict(t) for d, t in run.domain_tokens.items()}).T
        target, actual, epochs = frame["target"], frame["actual"], frame["epochs"]
        gaps = (actual - target) / target.where(target != 0)
        columns = {
            "target tokens": target.map(count),
            "actual tokens": actual.map(count),
            "difference": gaps.map(percent, na_action="ignore"),
            "epochs": epochs.map(format_epochs),
        }
        goal = math.fsum(target)
        gap = percent(actual.sum() / goal - 1) if goal else MISSING
        total = ["total", count(goal), count(actual.sum()), gap, ""]
        notes = [
            "Targets are the weights times the tokens of all completed steps; epochs are passes "
            "over the domain's training tokens."
        ]
        if len(run.mixture_phases) > 1:
            notes.append("The weights changed during training.")
            changed.append(labels[name])
        if run.status != "finished":
            notes.append(f"Training has not finished ({run.status}).")
            unfinished.append(f"{labels[name]} ({run.status})")
        title = f"Sampled tokens: {labels[name]}"
        tables.append(Table.by_row(title, "domain", pd.DataFrame(columns), [total], notes))
        most = [
            f"{form(values[domain])} ({domain})" if (domain := _largest(values)) else MISSING
            for values, form in ((gaps, percent), (epochs, format_epochs))
        ]
        extremes.append([labels[name], count(goal), *most])
    if len(tables) <= MOST_TABLES:
        return tables
    notes = [
        "For each run, the table shows the domain with the largest difference between actual and "
        "target tokens, and the domain with the most epochs. The run's run.json has all domains."
    ]
    notes += [f"The weights changed during training: {', '.join(changed)}."] if changed else []
    notes += [f"Training has not finished: {', '.join(unfinished)}."] if unfinished else []
    header = ["run", "target tokens", "largest difference", "most epochs"]
    return [Table.of("Sampled tokens", header, extremes, notes=notes)]


def repeats_table(corpus: Corpus | None) -> Table | None:
    """Table of the documents that repeat an earlier document of their domain.

    The result is None if no domain has any, unless near repetition was counted.
    """
    if corpus is None or not any(
        documents or kind == "near"
        for repeats in corpus.repeats.values()
        for kind, documents, _ in repeats.kinds()
    ):
        return None
    frame = pd.DataFrame(
        {
            table_label(name, corpus.held_out): {"documents": f"{repeats.documents:,}"}
            | {
                column: cell
                for kind, documents, tokens in repeats.kinds()
                for column, cell in (
                    (f"repeated ({kind})", f"{documents:,}"),
                    (f"share of tokens ({kind})", f"{tokens / max(1, repeats.tokens):.2%}"),
                )
            }
            for name, repeats in corpus.repeats.items()
        }
    ).T
    dropped = sum(counts.duplicates for counts in corpus.not_written.values())
    notes = [
        "Repeated documents have the text of an earlier document of the domain (exact), or nearly "
        "the same tokens (near, by MinHash)."
    ]
    if dropped and corpus.provenance.options.get("drop_duplicates"):
        notes.append("Exact repetitions were dropped, and are not in the corpus.")
    return Table.by_row("Repeated documents", "domain", frame, notes=notes)


def _largest(values: pd.Series[float]) -> str | None:
    """Domain with the largest absolute value; None if all values are unknown."""
    known = values.dropna().abs()
    return None if known.empty else str(known.idxmax())


@dataclasses.dataclass(frozen=True, eq=False)
class SweptAxis:
    """The weights of k domains at the n values of one hyperparameter.

    Attributes:
        label: label of the hyperparameter.
        centre: index of the value that the others are compared with: the centre's, or for ``steps``
            that of the checkpoint with as many steps.
        weights: domains (rows) by values as texts (columns), [k, n].
        intervals: [n, k, 2], the ends of the bootstrap intervals; NaN without intervals.
        factors: [n], the factor by which --shrink multiplies log weights; None for other methods
            than Chameleon.
        has_centre: whether the sweep's centre is on the axis.
    """

    label: str
    centre: int
    weights: pd.DataFrame
    intervals: NDArray[np.float64]
    factors: list[float] | None = None
    has_centre: bool = True

    @property
    def changes(self) -> pd.DataFrame:
        """The weights minus those at the centre, [k, n]."""
        return self.weights.sub(self.weights.iloc[:, self.centre], axis=0)

    @property
    def distances(self) -> pd.Series[float]:
        """Total-variation distance to the centre, half the sum of all absolute changes, [n]."""
        return self.changes.abs().sum() / 2


def swept_axes(sweep: Sweep) -> list[SweptAxis]:
    """Load the axes of ``sweep``, with the weights of its mixtures.

    Raises:
        UserError: if a mixture cannot be read, has changed, or does not have the domains of the
            centre.
    """
    names, axes, unknown = list(sweep.load_mixture(sweep.centre).weights), [], (np.nan, np.nan)
    for parameter, values in sweep.axes.items():
        points = sweep.along(parameter)
        mixtures = [sweep.load_mixture(point) for point in points]
        for point, mixture in zip(points, mixtures, strict=True):
            if set(mixture.weights) != set(names):
                raise UserError(
                    f"{sweep.root / sweep.FILE_NAME}: {point.mixture} has other domains than "
                    f"{sweep.centre.mixture}; run the sweep again"
                )
        texts = [
            v if isinstance(v, str) else f"{v:,}" if isinstance(v, int) else f"{v:g}"
            for v in values
        ]
        weights = pd.DataFrame([m.weights for m in mixtures], texts, names).T
        intervals = [[(m.intervals or {}).get(n, unknown) for n in names] for m in mixtures]
        label = SWEPT_LABELS.get(parameter, parameter)
        if sweep.centre in points:
            centre = points.index(sweep.centre)
        else:  # the checkpoint with as many steps as the centre's run, or the last one
            steps = sweep.centre.settings["steps"]
            centre = values.index(steps) if steps in values else len(values) - 1
        factors = None
        if all("shrinkage_factor" in m.parameters for m in mixtures):
            factors = [float(m.parameters["shrinkage_factor"]) for m in mixtures]
        on_axis = sweep.centre in points
        axes.append(SweptAxis(label, centre, weights, np.array(intervals), factors, on_axis))
    return axes


def sweep_table(axis: SweptAxis) -> Table:
    """Table of every domain's weight at each value, and each value's distance to the centre."""
    role = "centre" if axis.has_centre else "reference"
    values = [f"{v} ({role})" if i == axis.centre else v for i, v in enumerate(axis.weights)]
    changes = axis.changes.abs()
    largest = changes.max(axis=1)
    shown = largest.sort_values(ascending=False, kind="stable").index[:MOST_ROWS]
    weights = axis.weights.set_axis(values, axis=1).assign(**{"largest change": largest})
    summary = {"largest change": changes.max(), "total variation": axis.distances}
    rows = [[name, *map(four_decimals, (*each, each.max()))] for name, each in summary.items()]
    if axis.factors is not None:
        rows.append(["factor of --shrink", *(f"{factor:.2f}" for factor in axis.factors), ""])
    hidden = len(axis.weights) - len(shown)
    return Table.by_row(
        f"Weights over {axis.label}",
        "domain",
        formatted(weights[weights.index.isin(shown)], four_decimals),
        rows,
        [f"{hidden} other domains change less."] if hidden else [],
    )
