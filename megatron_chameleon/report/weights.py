"""Tables of mixture weights, of the tokens that runs sampled, and of weights over a sweep."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Mixture, Sweep, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import RunFolder, run_labels, uniform_first
from megatron_chameleon.report.tables import MISSING, Table, format_score, format_weight

# With more groups of runs, one table shows the extremes of each.
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


@dataclasses.dataclass(frozen=True)
class WeightColumns:
    """A column of weights, and one of intervals where ``mixture`` has them."""

    label: str
    weights: Mapping[str, float]
    mixture: Mixture | None

    def cells(self, domain: str) -> list[str]:
        """The weight of ``domain`` and, where there are any, its interval; '-' for none."""
        found = [format_weight(self.weights[domain]) if domain in self.weights else MISSING]
        intervals = self.mixture.intervals if self.mixture else None
        if intervals is None:
            return found
        ends = map(format_weight, intervals.get(domain, ()))
        return [*found, " to ".join(ends) or MISSING]

    def header(self) -> list[str]:
        """Headings of the cells, for example 'Chameleon weight' and 'Chameleon 95% interval'."""
        found = [f"{self.label} weight".strip()]
        if self.mixture is None or self.mixture.intervals is None:
            return found
        confidence = self.mixture.confidence
        coverage = "" if confidence is None else f"{100 * confidence:g}% "
        return [*found, f"{self.label} {coverage}interval".strip()]


def weight_tables(folder: RunFolder) -> list[Table]:
    """All mixtures, unless the fine-tuning tables have them; and each fine-tuning mixture."""
    found, shown = [], set()
    modes = {name: mode_of(name, mixture) for name, mixture in folder.mixtures.items()}
    pretrain = [name for name, mode in modes.items() if mode == "pretrain"]
    finetune = [name for name, mode in modes.items() if mode == "finetune"]
    for name in finetune:
        # Its pretraining partner is the mixture of the same name, or the only one.
        same_name = name.replace("finetune", "pretrain")
        partner = same_name if same_name in pretrain else None
        if partner is None and len(pretrain) == 1:
            (partner,) = pretrain
        found.append(_fine_tuning_table(folder, name, partner, len(finetune) == 1))
        shown |= {name, partner}
    if not folder.mixtures.keys() <= shown:
        columns = [WeightColumns(n, m.weights, m) for n, m in folder.mixtures.items()]
        domains = dict.fromkeys(d for m in folder.mixtures.values() for d in m.weights)
        methods = [
            f"{n}: {m.method}" for n, m in folder.mixtures.items() if m.method not in ("", n)
        ]
        table = Table.of(
            "Weights of each mixture",
            ["domain", *(name for column in columns for name in column.header())],
            [[d, *(cell for column in columns for cell in column.cells(d))] for d in domains],
            notes=[
                "Shares of training tokens.",
                *([f"Methods: {', '.join(methods)}."] if methods else []),
            ],
        )
        found.insert(0, table)
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


def _fine_tuning_table(folder: RunFolder, name: str, partner: str | None, is_only: bool) -> Table:
    """Leverage scores and weights for fine-tuning, next to the pretraining weights."""
    finetune = folder.mixtures[name]
    scores, notes, columns = finetune.scores or {}, [], []
    if partner is not None:
        pretrain = folder.mixtures[partner]
        columns.append(WeightColumns("pretraining", pretrain.weights, pretrain))
        if partner != name.replace("finetune", "pretrain"):
            notes.append(f"The pretraining weights are those of {partner}, the only ones here.")
        theirs = pretrain.scores or {}
        pairs = [(scores.get(n, np.nan), theirs.get(n, np.nan)) for n in {*scores, *theirs}]
        ours_and_theirs = np.array(pairs).reshape(-1, 2).T
        if scores and theirs and not np.allclose(ours_and_theirs[0], ours_and_theirs[1], rtol=1e-4):
            notes.append("The pretraining weights come from other scores than those shown.")
    columns.append(WeightColumns("fine-tuning", finetune.weights, finetune))
    return Table.of(
        "Weights for pretraining and fine-tuning" + ("" if is_only else f": {name}"),
        ["domain", "leverage score", *(n for column in columns for n in column.header())],
        [
            [
                domain,
                format_score(scores[domain]) if domain in scores else MISSING,
                *(cell for column in columns for cell in column.cells(domain)),
            ]
            for domain in finetune.weights
        ],
        notes=notes,
    )


def token_tables(folder: RunFolder) -> list[Table]:
    """Per base run and domain: target tokens, actual tokens, their difference and the epochs.

    Runs with the same targets share a table, in which figures that differ are ranges. With more
    than ``MOST_TABLES`` groups, one table has a row for each with its extremes.
    """
    alike: dict[object, list[str]] = {}
    for name in uniform_first(folder.base_runs):
        run = folder.base_runs[name]
        if run.domain_tokens:
            targets = tuple((domain, tokens.asked) for domain, tokens in run.domain_tokens.items())
            alike.setdefault((run.mixture_method, targets), []).append(name)
    labels = run_labels(folder.base_runs, (name for names in alike.values() for name in names))
    groups = {}
    for first, *others in alike.values():
        label = f"{first} and {len(others)} more with the same weights" if others else labels[first]
        groups[label] = {name: folder.base_runs[name] for name in (first, *others)}
    if len(groups) <= MOST_TABLES:
        return [_token_table(label, runs) for label, runs in groups.items()]
    rows = []
    for label, runs in groups.items():
        target, _, difference, epochs = _token_frames(runs)
        largest, most = _extreme(difference, "{:+.2%}".format), _extreme(epochs, format_epochs)
        rows.append([label, f"{math.fsum(target):,.0f}", largest, most])
    header = ["run", "target tokens", "largest difference", "most epochs"]
    note = (
        "Per run the domain with the largest difference between actual and target tokens, and the "
        "one with the most epochs. run.json of each run has all of them."
    )
    shown = {name: run for runs in groups.values() for name, run in runs.items()}
    notes = [note, *_shared_rows_notes(groups.values()), *_token_notes(shown)]
    return [Table.of("Sampled tokens", header, rows, notes=notes)]


def format_epochs(epochs: float) -> str:
    """Epochs, to three digits."""
    return f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.3g}"


def _token_frames(
    runs: Mapping[str, TrainingRun],
) -> tuple[pd.Series[float], pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Tokens by domain (rows) and run (columns).

    Returns:
        Target tokens, the same for all runs; actual tokens; actual minus target tokens, relative to
        the target, NaN for a target of 0; and epochs.
    """
    tokens = {name: run.domain_tokens for name, run in runs.items()}
    first = next(iter(tokens.values()))
    target = pd.Series({domain: each.asked for domain, each in first.items()})
    actual = pd.DataFrame({n: {d: t.got for d, t in ts.items()} for n, ts in tokens.items()})
    epochs = pd.DataFrame({n: {d: t.epochs for d, t in ts.items()} for n, ts in tokens.items()})
    difference = actual.sub(target, axis=0).div(target.where(target != 0), axis=0)
    return target, actual, difference, epochs


def _token_table(label: str, runs: Mapping[str, TrainingRun]) -> Table:
    target, actual, difference, epochs = _token_frames(runs)
    whole, sums = math.fsum(target), actual.sum()

    def row(name: str, goal: float, actual: pd.Series[float], gap: pd.Series[float]) -> list[str]:
        return [
            name,
            f"{goal:,.0f}",
            _range(actual, "{:,.0f}".format),
            _range(gap, "{:+.2%}".format),
        ]

    gaps = (sums - whole) / (whole or math.nan)
    return Table.of(
        f"Sampled tokens: {label}",
        ["domain", "target tokens", "actual tokens", "difference", "epochs"],
        [
            [
                *row(d, target[d], actual.loc[d], difference.loc[d]),
                _range(epochs.loc[d], format_epochs),
            ]
            for d in target.index
        ],
        [[*row("total", whole, sums, gaps), ""]],
        [
            "Targets are the weights times all steps done; epochs are passes over the domain's "
            "training tokens.",
            *_shared_rows_notes([runs]),
            *_token_notes(runs),
        ],
    )


def _range(values: pd.Series[float], form: Callable[[float], str]) -> str:
    """The smallest and largest figure, or the only one; '-' where one is NaN."""
    if values.isna().any():
        return MISSING
    return " to ".join(dict.fromkeys((form(values.min()), form(values.max()))))


def _extreme(frame: pd.DataFrame, form: Callable[[float], str]) -> str:
    """The figure farthest from 0 over all domains and runs, with its domain; '-' for none."""
    sizes = frame.abs()
    if sizes.isna().all(axis=None):
        return MISSING
    domain = sizes.max(axis=1).idxmax()
    return f"{form(frame.loc[domain, sizes.loc[domain].idxmax()])} ({domain})"


def _shared_rows_notes(groups: Iterable[Mapping[str, TrainingRun]]) -> list[str]:
    """Which runs share a row or table."""
    several = "; ".join(_names(list(runs)) for runs in groups if len(runs) > 1)
    return [f"Runs with the same weights, shown as a range: {several}."] if several else []


def _token_notes(runs: Mapping[str, TrainingRun]) -> list[str]:
    """Which runs changed their weights, or are still training."""
    notes = []
    changed = [name for name, run in runs.items() if len(run.mixture_phases) > 1]
    if changed:
        notes.append(f"The weights changed during training: {_names(changed)}.")
    unfinished = [name for name, run in runs.items() if run.status != "finished"]
    if unfinished:
        notes.append(f"Training has not finished: {_names(unfinished)}.")
    return notes


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES])
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"


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
    return [_swept_axis(sweep, name) for name in sweep.axes]


def _swept_axis(sweep: Sweep, parameter: str) -> SweptAxis:
    points = sweep.along(parameter)
    mixtures = [sweep.load_mixture(point) for point in points]
    names = tuple(sweep.load_mixture(sweep.centre).weights)
    for point, mixture in zip(points, mixtures, strict=True):
        if set(mixture.weights) != set(names):
            raise UserError(
                f"{sweep.root / sweep.FILE_NAME}: {point.mixture} has other domains than "
                f"{sweep.centre.mixture}; run the sweep again"
            )
    coverages = {mixture.confidence for mixture in mixtures}
    unknown = (np.nan, np.nan)
    return SweptAxis(
        label=SWEPT_LABELS.get(parameter, parameter),
        values=tuple(
            v if isinstance(v, str) else f"{v:,}" if isinstance(v, int) else f"{v:g}"
            for v in sweep.axes[parameter]
        ),
        centre=points.index(sweep.centre),
        names=names,
        weights=np.array([[m.weights[name] for name in names] for m in mixtures]),
        intervals=np.array(
            [[(m.intervals or {}).get(name, unknown) for name in names] for m in mixtures]
        ),
        confidence=coverages.pop() if len(coverages) == 1 else None,
    )


def sweep_table(axis: SweptAxis) -> Table:
    """Weight per domain at each value, and the distance of each value from the centre."""
    changes = np.abs(axis.changes)
    largest = changes.max(axis=0)
    shown = sorted(np.argsort(-largest, kind="stable")[:MOST_ROWS])
    values = [f"{v} (centre)" if i == axis.centre else v for i, v in enumerate(axis.values)]
    hidden = len(axis.names) - len(shown)
    return Table.of(
        f"Weights over {axis.label}",
        ["domain", *values, "largest change"],
        [[axis.names[k], *map(format_weight, (*axis.weights[:, k], largest[k]))] for k in shown],
        [
            [name, *map(format_weight, (*figures, figures.max()))]
            for name, figures in (
                ("largest change", changes.max(axis=1)),
                ("total variation", axis.distances),
            )
        ],
        [*([f"{hidden} other domains move by less."] if hidden else []), f"{axis.sentence}."],
    )
