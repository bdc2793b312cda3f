"""Tables of mixture weights, of the tokens that runs sampled, and of weights over a sweep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Mixture, Sweep, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import RunFolder, run_labels, uniform_first
from megatron_chameleon.report.tables import MISSING, Table, format_weight

# With more groups of runs than this, a single table shows the extremes of each group.
MOST_TABLES = 6
# A note lists this many runs.
MOST_NAMES = 12
# A sweep's table lists this many domains, those that change most.
MOST_ROWS = 40
# Other hyperparameters are labelled by their names.
SWEPT_LABELS = {
    "train_iters": "proxy steps",
    "model_size": "proxy size",
    "ridge": "ridge",
    "num_windows": "windows per domain",
}

Array = NDArray[np.float64]
# Heading -> domain -> text.
Columns = dict[str, dict[str, str]]


def weight_columns(label: str, weights: Mapping[str, float], mixture: Mixture | None) -> Columns:
    """'LABEL weight' and, where ``mixture`` has intervals, 'LABEL 95% interval'."""
    columns = {f"{label} weight".strip(): {d: format_weight(w) for d, w in weights.items()}}
    if mixture is not None and mixture.intervals is not None:
        coverage = "" if mixture.confidence is None else f"{100 * mixture.confidence:g}% "
        columns[f"{label} {coverage}interval".strip()] = {
            domain: " to ".join(map(format_weight, ends))
            for domain, ends in mixture.intervals.items()
        }
    return columns


def rows_by_domain(domains: Iterable[str], columns: Columns) -> list[list[str]]:
    """A row of texts per domain; '-' where a column has none."""
    return [[d, *(texts.get(d, MISSING) for texts in columns.values())] for d in domains]


def weight_tables(folder: RunFolder) -> list[Table]:
    """All mixtures, unless the fine-tuning tables have them; and each fine-tuning mixture."""
    found, shown = [], set()
    modes = {name: mode_of(name, mixture) for name, mixture in folder.mixtures.items()}
    pretrain = [name for name, mode in modes.items() if mode == "pretrain"]
    finetune = [name for name, mode in modes.items() if mode == "finetune"]
    for name in finetune:
        mixture, notes = folder.mixtures[name], []
        scores, columns = mixture.scores or {}, {}
        columns["leverage score"] = {
            # Four digits below 0.01.
            domain: f"{score:.4f}" if score >= 0.01 or score == 0 else f"{score:.3e}"
            for domain, score in scores.items()
        }
        # Its pretraining partner is the mixture of the same name, or the only one.
        same_name = name.replace("finetune", "pretrain")
        partner = same_name if same_name in pretrain else None
        if partner is None and len(pretrain) == 1:
            (partner,) = pretrain
            notes.append(f"The pretraining weights are those of {partner}, the only ones here.")
        if partner is not None:
            other = folder.mixtures[partner]
            columns |= weight_columns("pretraining", other.weights, other)
            pair = pd.DataFrame([scores, other.scores or {}])
            if scores and other.scores and not np.allclose(pair.iloc[0], pair.iloc[1], rtol=1e-4):
                notes.append("The pretraining weights come from other scores than those shown.")
        columns |= weight_columns("fine-tuning", mixture.weights, mixture)
        title = "Weights for pretraining and fine-tuning"
        title += f": {name}" if len(finetune) > 1 else ""
        rows = rows_by_domain(mixture.weights, columns)
        found.append(Table.of(title, ["domain", *columns], rows, notes=notes))
        shown |= {name, partner}
    if not folder.mixtures.keys() <= shown:
        columns, notes = {}, ["Shares of training tokens."]
        for name, mixture in folder.mixtures.items():
            columns |= weight_columns(name, mixture.weights, mixture)
        methods = [
            f"{n}: {m.method}" for n, m in folder.mixtures.items() if m.method not in ("", n)
        ]
        notes += [f"Methods: {', '.join(methods)}."] if methods else []
        domains = dict.fromkeys(d for m in folder.mixtures.values() for d in m.weights)
        rows = rows_by_domain(domains, columns)
        found.insert(0, Table.of("Weights of each mixture", ["domain", *columns], rows, (), notes))
    return found


def mode_of(name: str, mixture: Mixture) -> str | None:
    """Purpose of a mixture, "pretrain" or "finetune", from its parameters or else its name.

    The name is used only for Chameleon's mixtures and those of unknown method.
    """
    stated = mixture.parameters.get("mode")
    if stated is not None:
        return str(stated)
    if mixture.method and not mixture.method.startswith("chameleon"):
        return None
    return next((mode for mode in ("pretrain", "finetune") if name.endswith(mode)), None)


def token_tables(folder: RunFolder) -> list[Table]:
    """Per base run and domain: target tokens, actual tokens, their difference and the epochs.

    Runs with the same targets share a table, which shows differing values as ranges. With more than
    ``MOST_TABLES`` groups, a single table shows each group's largest difference and most epochs.
    """
    alike: dict[object, dict[str, TrainingRun]] = {}
    for name in uniform_first(folder.base_runs):
        run = folder.base_runs[name]
        if run.domain_tokens:
            targets = tuple((domain, tokens.target) for domain, tokens in run.domain_tokens.items())
            alike.setdefault((run.mixture_method, targets), {})[name] = run
    labels = run_labels(folder.base_runs, (name for runs in alike.values() for name in runs))
    tables, extremes = [], []
    for runs in alike.values():
        first, *others = runs
        label = f"{first} and {len(others)} more with the same weights" if others else labels[first]
        tokens = {name: run.domain_tokens for name, run in runs.items()}
        # By domain; actual tokens and epochs [k, runs]; the difference is relative to the target.
        target = pd.Series({domain: each.target for domain, each in tokens[first].items()})
        actual = pd.DataFrame({n: {d: t.actual for d, t in ts.items()} for n, ts in tokens.items()})
        epochs = pd.DataFrame({n: {d: t.epochs for d, t in ts.items()} for n, ts in tokens.items()})
        difference = actual.sub(target, axis=0).div(target.where(target != 0), axis=0)
        goal, sums = math.fsum(target), actual.sum()
        percent, count = "{:+.2%}".format, "{:,.0f}".format
        columns = {
            "target tokens": target.map(count),
            "actual tokens": actual.apply(_range, axis=1, form=count),
            "difference": difference.apply(_range, axis=1, form=percent),
            "epochs": epochs.apply(_range, axis=1, form=format_epochs),
        }
        gaps = (sums - goal) / (goal or math.nan)
        total = ["total", count(goal), _range(sums, count), _range(gaps, percent), ""]
        notes = [
            "Targets are the weights times all steps done; epochs are passes over the domain's "
            "training tokens.",
            *_token_notes([runs]),
        ]
        rows = [[domain, *(texts[domain] for texts in columns.values())] for domain in target.index]
        title = f"Sampled tokens: {label}"
        tables.append(Table.of(title, ["domain", *columns], rows, [total], notes))
        most = [_extreme(difference, percent), _extreme(epochs, format_epochs)]
        extremes.append([label, count(goal), *most])
    if len(tables) <= MOST_TABLES:
        return tables
    note = (
        "Per run the domain with the largest difference between actual and target tokens, and the "
        "one with the most epochs. run.json of each run has all of them."
    )
    header = ["run", "target tokens", "largest difference", "most epochs"]
    notes = [note, *_token_notes(list(alike.values()))]
    return [Table.of("Sampled tokens", header, extremes, notes=notes)]


def format_epochs(epochs: float) -> str:
    """Epochs, to three digits."""
    return f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.3g}"


def _range(values: pd.Series[float], form: Callable[[float], str]) -> str:
    """The smallest and largest figure, or the only one; '-' where one is NaN."""
    if values.isna().any():
        return MISSING
    return " to ".join(dict.fromkeys((form(values.min()), form(values.max()))))


def _extreme(frame: pd.DataFrame, form: Callable[[float], str]) -> str:
    """The figure farthest from 0 over all domains and runs, with its domain; '-' for none."""
    figures = frame.stack(future_stack=True).dropna()
    if figures.empty:
        return MISSING
    place = figures.abs().idxmax()
    return f"{form(figures[place])} ({place[0]})"


def _token_notes(groups: list[dict[str, TrainingRun]]) -> list[str]:
    """Which runs share a row or table, changed their weights, or are still training."""

    def names(runs: Iterable[str]) -> str:
        first, rest = list(runs)[:MOST_NAMES], list(runs)[MOST_NAMES:]
        return ", ".join(first) + (f" and {len(rest)} more" if rest else "")

    runs = {name: run for group in groups for name, run in group.items()}
    found = {
        "Runs with the same weights, shown as a range": "; ".join(
            names(group) for group in groups if len(group) > 1
        ),
        "The weights changed during training": names(
            name for name, run in runs.items() if len(run.mixture_phases) > 1
        ),
        "Training has not finished": names(n for n, r in runs.items() if r.status != "finished"),
    }
    return [f"{what}: {which}." for what, which in found.items() if which]


@dataclasses.dataclass(frozen=True, eq=False)
class SweptAxis:
    """The weights of k domains at the n values of one hyperparameter.

    Attributes:
        label: of the hyperparameter.
        values: n texts.
        centre: index of the centre's value.
        names: k domains.
        weights: [n, k].
        intervals: [n, k, 2], the ends of the bootstrap intervals; NaN where there is none.
        confidence: coverage of the intervals; None where they differ.
    """

    label: str
    values: tuple[str, ...]
    centre: int
    names: tuple[str, ...]
    weights: Array
    intervals: Array
    confidence: float | None

    @property
    def changes(self) -> Array:
        """[n, k]: the weights minus those at the centre."""
        return self.weights - self.weights[self.centre]

    @property
    def distances(self) -> Array:
        """[n]: total-variation distance to the centre, half the sum of all absolute changes."""
        distances: Array = np.abs(self.changes).sum(axis=1) / 2
        return distances

    @property
    def sentence(self) -> str:
        """The largest change of a weight and of the mixture, without a full stop."""
        value, domain = np.unravel_index(np.abs(self.changes).argmax(), self.changes.shape)
        change, distance = self.changes[value, domain], self.distances.max()
        if not distance:
            return f"Over {self.label} no weight changes"
        return (
            f"Over {self.label} a weight changes by {abs(change):.4f} at most "
            f"({self.names[domain]} {change:+.4f} at {self.values[value]}), the mixture by "
            f"{distance:.4f} in total variation"
        )


def swept_axes(sweep: Sweep) -> list[SweptAxis]:
    """The axes of ``sweep``, with the weights of its mixtures.

    Raises:
        UserError: if a mixture cannot be read, has changed, or has other domains than the centre's.
    """
    names, axes, unknown = tuple(sweep.load_mixture(sweep.centre).weights), [], (np.nan, np.nan)
    for parameter, values in sweep.axes.items():
        points = sweep.along(parameter)
        mixtures = [sweep.load_mixture(point) for point in points]
        for point, mixture in zip(points, mixtures, strict=True):
            if set(mixture.weights) != set(names):
                raise UserError(
                    f"{sweep.root / sweep.FILE_NAME}: {point.mixture} has other domains than "
                    f"{sweep.centre.mixture}; run the sweep again"
                )
        coverages = {mixture.confidence for mixture in mixtures}
        intervals = [[(m.intervals or {}).get(n, unknown) for n in names] for m in mixtures]
        axis = SweptAxis(
            label=SWEPT_LABELS.get(parameter, parameter),
            values=tuple(
                v if isinstance(v, str) else f"{v:,}" if isinstance(v, int) else f"{v:g}"
                for v in values
            ),
            centre=points.index(sweep.centre),
            names=names,
            weights=np.array([[m.weights[name] for name in names] for m in mixtures]),
            intervals=np.array(intervals),
            confidence=coverages.pop() if len(coverages) == 1 else None,
        )
        axes.append(axis)
    return axes


def sweep_table(axis: SweptAxis) -> Table:
    """Weight per domain at each value, and the distance of each value from the centre."""
    changes = np.abs(axis.changes)
    largest = changes.max(axis=0)
    shown = sorted(np.argsort(-largest, kind="stable")[:MOST_ROWS])
    values = [f"{v} (centre)" if i == axis.centre else v for i, v in enumerate(axis.values)]
    hidden = len(axis.names) - len(shown)
    summary = {"largest change": changes.max(axis=1), "total variation": axis.distances}
    return Table.of(
        f"Weights over {axis.label}",
        ["domain", *values, "largest change"],
        [[axis.names[k], *map(format_weight, (*axis.weights[:, k], largest[k]))] for k in shown],
        [[n, *map(format_weight, (*each, each.max()))] for n, each in summary.items()],
        [*([f"{hidden} other domains move by less."] if hidden else []), f"{axis.sentence}."],
    )
