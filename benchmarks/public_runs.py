"""Price mixtures on published runs of others: the paper's tables, and mixtures for a target.

    OMP_NUM_THREADS=1 python benchmarks/public_runs.py --validation FOLDER [--output FILE.json]

FOLDER holds tables of runs, each with the weights of a mixture and the held-out losses of a model:

- slimpajama/runs*.csv: columns ``weight_DOMAIN`` of SlimPajama's seven domains, ``model_size``,
  ``n_tokens``, and ``TEXT_loss`` of the domains and of other text. A size without a column is read
  from the file's name ("1300M", "2.7B").
- regmix/{train,test}_mixture_SIZE.csv and ..._pile_loss_SIZE.csv: RegMix's runs on the Pile.

All sizes that are found are used; the surrogate is fitted to the runs of each size separately. Only
computed figures are written: FILE.json, and the same tables as Markdown next to it. It takes about
three minutes on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import re
import sys
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import pandas as pd
from scipy.stats import norm, pearsonr, spearmanr

from benchmarks.measure import RESULTS, machine
from megatron_chameleon.artifacts.files import replacing, write_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.mixture import Surrogate, fit_surrogate
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import reach_of
from megatron_chameleon.mixture.surrogate import FEWEST_RUNS
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.report.paper import Setting, paper_names, paper_settings, printed_figures
from megatron_chameleon.report.tables import (
    METHOD_LABELS,
    MISSING,
    Table,
    markdown,
    markdown_table,
    terminal_table,
)

COMMAND = "OMP_NUM_THREADS=1 python benchmarks/public_runs.py --validation FOLDER"
# Corpus -> the paper's settings on it.
SETTINGS = {"SlimPajama": ("slimpajama-684m", "slimpajama-1.2b"), "the Pile": ("pile-684m",)}
# Shares of the tokens of SlimPajama (Soboleva et al., 2023: the data set's card).
NATURAL = {
    "arxiv": 0.046,
    "book": 0.042,
    "c4": 0.267,
    "cc": 0.522,
    "github": 0.052,
    "stackexchange": 0.033,
    "wikipedia": 0.038,
}
MEAN = "mean of the domains"
# A token count is used if at least this share of a size's runs has all losses there.
COMMON_SHARE = 0.9
NUM_DRAWS = 2000
NORMAL_90 = float(norm.ppf(0.95))

# Units of "1300M" and of headings like "tokens_billions".
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
COUNT = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([kmbt]?)", re.IGNORECASE)
UNIT_OF_HEADING = re.compile(r"_(m|b)(?:illions?)?$")
SIZE_IN_NAME = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?[mb])(?![a-z0-9])", re.IGNORECASE)
TOKENS_HEADING = re.compile(r"(?:n_|num_|train_|training_)?tokens(?:_[mb](?:illions?)?)?")
SIZE_HEADING = re.compile(r"(?:model_?)?size(?:_.*)?|(?:n_|num_)?param.*|model")
LOSS = re.compile(r"(?:.*/)?(?:loss_(.+)|(.+?)(?:_val|_valid)?_loss)")
WEIGHT = re.compile(r"(?:weight|train)_(.+)|(.+)_weight")


class Signed(float):
    """A figure that is printed with its sign."""


@dataclasses.dataclass(frozen=True)
class Result:
    """A table with unrounded figures.

    Attributes:
        title: heading.
        rows: heading of a column -> cell: a text, a count, a figure, (figure, half of its
            interval) or (figure, low end, high end).
        note: sentences below the table.
    """

    title: str
    rows: list[dict[str, Any]]
    note: str


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """Runs of one model size on one corpus, at one token count.

    Attributes:
        corpus: a key of ``SETTINGS``.
        size: parameters.
        tokens: training tokens; None if the table does not have them.
        mixtures: [n, k] weights by domain, named as in the paper; rows sum to 1, up to rounding.
        losses: [n, m] losses in nats per token by text; texts of domains are named like them.
        total: number of runs of this size, also those that lack losses at this token count.
    """

    corpus: str
    size: float
    tokens: float | None
    mixtures: pd.DataFrame
    losses: pd.DataFrame
    total: int

    @property
    def domains(self) -> list[str]:
        """The domains that have a loss."""
        return [text for text in self.losses if text in self.mixtures]

    @property
    def labels(self) -> dict[str, Any]:
        """Cells that name the runs in a row of a table."""
        tokens = MISSING if self.tokens is None else count_label(self.tokens)
        return {"size": count_label(self.size), "tokens": tokens, "runs": len(self.mixtures)}


Fits = list[tuple[Runs, Surrogate]]


def count_label(count: float) -> str:
    """Format a number of parameters or tokens, like 122M or 2.7B."""
    unit = "B" if count >= 0.9995e9 else "M"
    return f"{count / UNITS[unit.lower()]:.3g}{unit}"


def counts(column: pd.Series) -> pd.Series:
    """Numbers of a column of parameters or tokens; NaN where a cell is not a number."""
    heading = UNIT_OF_HEADING.search(str(column.name))

    def number(cell: object) -> float:
        found = COUNT.fullmatch(str(cell).strip())
        if found is None:
            return math.nan
        unit = found[2] or (heading[1] if heading else "")
        return float(round(float(found[1]) * UNITS.get(unit.lower(), 1.0)))

    return column.map(number)


def size_in_name(path: Path) -> float:
    """Model size in a file's name; NaN unless the name has exactly one."""
    found = SIZE_IN_NAME.findall(path.stem.replace("_", " "))
    return float(counts(pd.Series(found))[0]) if len(found) == 1 else math.nan


def standard_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Rename columns to ``size``, ``tokens``, ``weight/DOMAIN`` and ``loss/TEXT``; drop others."""
    found: dict[str, pd.Series] = {}
    for heading in table:
        name = str(heading).strip().lower().replace(" ", "_").replace("the_pile_", "")
        if TOKENS_HEADING.fullmatch(name):
            found["tokens"] = counts(table[heading].rename(name))
        elif SIZE_HEADING.fullmatch(name):
            found["size"] = counts(table[heading].rename(name))
        elif match := LOSS.fullmatch(name):
            found[f"loss/{match[1] or match[2]}"] = pd.to_numeric(table[heading], errors="coerce")
        elif match := WEIGHT.fullmatch(name):
            found[f"weight/{match[1] or match[2]}"] = pd.to_numeric(table[heading], errors="coerce")
    return pd.DataFrame(found)


def as_runs_of(corpus: str, table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Rename the domains as in the paper, and drop rows without a size or a mixture.

    Raises:
        UserError: if the table does not have the corpus's domains, or has no losses or sizes.
    """
    weights = [name for name in table if name.startswith("weight/")]
    domains = [name.removeprefix("weight/") for name in weights]
    names = paper_names(paper_settings()[SETTINGS[corpus][0]], domains)
    if names is None:
        raise UserError(f"its weights are not those of the domains of {corpus}")
    if not any(f"loss/{domain}" in table for domain in domains):
        raise UserError("no column has the loss of a domain")
    if "size" not in table or table["size"].isna().all():
        table = table.assign(size=size_in_name(path))
    table = table.dropna(subset=["size", *weights])
    if table.empty:
        raise UserError("it has no model sizes: add a column model_size, or a size to its name")
    # Tables have rounded weights, whose sums differ from 1. Equal weights must remain equal, since
    # trees would split them at their rounding errors.
    table[weights] = table[weights].div(table[weights].sum(axis=1), axis=0).round(5)
    kinds = ("weight", "loss")
    return table.rename(columns={f"{k}/{d}": f"{k}/{names[d]}" for d in domains for k in kinds})


def runs_by_size(corpus: str, table: pd.DataFrame) -> list[Runs]:
    """Split a table by size; of each size, take the last token count common to its runs.

    This is the last count where at least 90% of the size's runs have all losses, or else the count
    where the most have.
    """
    weights = [name for name in table if name.startswith("weight/")]
    table = table.assign(tokens=table["tokens"].fillna(0.0) if "tokens" in table else 0.0)
    found = []
    for size, rows in table.drop_duplicates().groupby("size"):
        total = int(rows.groupby("tokens").size().max())
        complete = rows.dropna(axis=1, how="all").dropna()
        number = complete.groupby("tokens").size()
        common = number[number >= min(COMMON_SHARE * total, number.max())]
        tokens = float(common.index.max()) if len(common) else 0.0
        chosen = complete[complete["tokens"] == tokens].reset_index(drop=True)
        runs = Runs(
            corpus=corpus,
            size=float(size),
            tokens=tokens or None,
            mixtures=chosen[weights].rename(columns=lambda name: name.removeprefix("weight/")),
            losses=chosen.filter(regex="^loss/").rename(columns=lambda n: n.removeprefix("loss/")),
            total=total,
        )
        if len(runs.mixtures) >= FEWEST_RUNS and runs.domains:
            found.append(runs)
        else:
            print(
                f"skipped {corpus}, {count_label(runs.size)}: {len(runs.mixtures)} runs with all "
                f"losses of {len(runs.domains)} domains; a fit needs {FEWEST_RUNS} runs",
                flush=True,
            )
    return found


def read_runs(folder: Path) -> list[Runs]:
    """Read all tables below ``folder``, by corpus and size; print a line for each skipped file.

    Raises:
        UserError: if there are no runs.
    """
    tables: dict[str, list[pd.DataFrame]] = {corpus: [] for corpus in SETTINGS}

    def read(corpus: str, *paths: Path) -> None:
        where = ", ".join(str(path.relative_to(folder)) for path in paths)
        try:
            for path in paths:
                if not path.is_file():
                    raise UserError(f"no file {path.name}")
            parts = [pd.read_csv(path, index_col=0 if paths[1:] else None) for path in paths]
            table = standard_columns(parts[0].join(parts[1:], how="inner"))
            tables[corpus].append(as_runs_of(corpus, table, paths[0]))
        except (UserError, ValueError, OSError) as error:
            print(f"skipped {where}: {error}", flush=True)

    for path in sorted(folder.glob("slimpajama/runs*.csv")) or [folder / "slimpajama/runs*.csv"]:
        read("SlimPajama", path)
    # The mixtures of test tables are used for the sizes that have no table of training runs.
    by_size: dict[str, Path] = {}
    for kind in ("test", "train"):
        for path in sorted(folder.glob(f"regmix/{kind}_mixture_*.csv")):
            by_size[path.stem.rpartition("_")[2]] = path
    for path in by_size.values() or [folder / "regmix/train_mixture_*.csv"]:
        read("the Pile", path, path.with_name(path.name.replace("_mixture_", "_pile_loss_")))

    found = [
        runs
        for corpus, parts in tables.items()
        if parts
        for runs in runs_by_size(corpus, pd.concat(parts, ignore_index=True))
    ]
    if not found:
        raise UserError(
            f"--validation {folder}: no runs; pass the folder that holds slimpajama/runs*.csv or "
            "regmix/*_mixture_*.csv"
        )
    return found


def fit_all(all_runs: list[Runs]) -> Fits:
    """Fit a surrogate to the runs of each corpus and size, with a progress bar."""
    work = sum(4 * runs.losses.size for runs in all_runs)
    fits = Fits()
    with progress_bar(work, "loss", "fitting") as bar:
        for runs in all_runs:
            done = partial(bar.update, len(runs.losses))
            fits.append((runs, fit_surrogate(runs.mixtures, runs.losses, on_fit=done)))
    return fits


def paper_mixtures(setting: Setting, runs: Runs) -> pd.DataFrame:
    """Mixtures [methods, k] of a printed perplexity table, normalized, with the baseline first."""
    printed = {name: pd.Series(column.printed) for name, column in setting.columns.items()}
    if setting.baseline == "uniform":
        printed = {"uniform": uniform_like(runs), **printed}
    frame = pd.DataFrame(printed).T[list(runs.mixtures)]
    order = [setting.baseline, *(name for name in frame.index if name != setting.baseline)]
    return frame.div(frame.sum(axis=1), axis=0).loc[order]


def uniform_like(runs: Runs) -> pd.Series:
    """Return equal weights of the domains of ``runs``."""
    return pd.Series(1.0 / runs.mixtures.shape[1], index=runs.mixtures.columns)


def predicted_changes(
    runs: Runs, surrogate: Surrogate, mixtures: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predict the losses of ``mixtures`` less those of the first one.

    Returns:
        Changes in nats, and half of the widths of their 90% intervals (of the expected losses,
        without the noise of a run): [mixtures, texts and their mean over domains].
    """
    places = [list(runs.losses).index(domain) for domain in runs.domains]

    def changes(losses: Array) -> Array:
        """Append the mean over domains to losses [..., mixtures, m], less those of the first."""
        means = losses[..., places].mean(axis=-1, keepdims=True)
        full = np.concatenate([losses, means], axis=-1)
        return full - full[..., :1, :]

    rows = mixtures.to_numpy()
    draws = changes(surrogate.sample(rows, NUM_DRAWS, 0))
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    names = [*runs.losses, MEAN]
    found = (
        pd.DataFrame(values, index=mixtures.index, columns=names)
        for values in (changes(surrogate.mean(rows)), (high - low) / 2)
    )
    return next(found), next(found)


def printed_changes(setting: Setting, runs: Runs, mixtures: pd.DataFrame) -> pd.DataFrame:
    """Log perplexities that the paper prints, and their mean, less those of its baseline."""
    logs = np.log(printed_figures(setting.perplexity[0]).T.loc[mixtures.index, runs.domains])
    logs = logs - logs.loc[setting.baseline]
    return logs.assign(**{MEAN: logs.mean(axis=1)})


def rank_correlation(one: Array, other: Array) -> float:
    """Rank correlation of all values of two arrays."""
    return float(spearmanr(np.ravel(one), np.ravel(other)).statistic)


def with_interval(correlation: float, count: int) -> tuple[float, float, float]:
    """Return a rank correlation and its 90% interval (Bonett and Wright, 2000)."""
    if count <= 3 or not abs(correlation) < 1:
        return correlation, math.nan, math.nan
    half = NORMAL_90 * math.sqrt((1 + correlation**2 / 2) / (count - 3))
    middle = math.atanh(correlation)
    return correlation, math.tanh(middle - half), math.tanh(middle + half)


def used(all_runs: list[Runs]) -> Result:
    """List the runs that are used."""
    rows = [
        {
            "corpus": runs.corpus,
            **runs.labels,
            "of all": runs.total,
            "domains": runs.mixtures.shape[1],
            "domains with a loss": len(runs.domains),
            "other text": ", ".join(t for t in runs.losses if t not in runs.mixtures) or MISSING,
        }
        for runs in all_runs
    ]
    return Result(
        "Runs used",
        rows,
        "Runs: those with all losses at the last token count that at least 90% of the size's runs "
        "have. Losses are in nats per token.",
    )


def agreement(setting: Setting, runs: Runs, surrogate: Surrogate) -> dict[str, Any]:
    """Compare predicted with printed log ratios of one table: a row of the table of agreement."""
    mixtures = paper_mixtures(setting, runs)
    changes, _ = predicted_changes(runs, surrogate, mixtures)
    printed = printed_changes(setting, runs, mixtures)
    predicted, real = changes[runs.domains].iloc[1:], printed[runs.domains].iloc[1:]
    centred = changes[runs.domains], printed[runs.domains]
    ranks, values = [], []
    for name in real.index:
        rest = real.index != name
        ranks.append(rank_correlation(predicted[rest], real[rest]))
        values.append(pearsonr(np.ravel(predicted[rest]), np.ravel(real[rest])).statistic)
    with np.errstate(divide="ignore"):
        logs = -np.log(mixtures[runs.domains])
    alone = logs.iloc[1:] - logs.iloc[0]
    orders = (
        " < ".join(METHOD_LABELS[str(name)] for name in each[MEAN].sort_values().index)
        for each in (changes, printed)
    )
    return {
        "paper's table": setting.label,
        **runs.labels,
        "ratios": real.size,
        "rank correlation": (rank_correlation(predicted, real), min(ranks), max(ranks)),
        "Pearson": (
            float(pearsonr(np.ravel(predicted), np.ravel(real)).statistic),
            float(min(values)),
            float(max(values)),
        ),
        "rank correlation, centred": rank_correlation(*(e - e.mean() for e in centred)),
        "rank correlation of -log(weight)": rank_correlation(alone, real),
        "RMS difference": float(np.sqrt(((predicted - real) ** 2).to_numpy().mean())),
        "RMS of the paper's": float(np.sqrt((real**2).to_numpy().mean())),
        "predicted order of the mean": next(orders),
        "the paper's": next(orders),
    }


def agreements(fits: Fits) -> Result:
    """Compare predictions from the runs of each size with the paper's perplexity tables."""
    rows = [
        agreement(paper_settings()[name], runs, surrogate)
        for corpus, names in SETTINGS.items()
        for name in names
        for runs, surrogate in fits
        if runs.corpus == corpus
    ]
    return Result(
        "The paper's perplexity tables, predicted from others' runs",
        rows,
        "Log ratios of perplexity relative to Uniform (SlimPajama) or Human (the Pile), per "
        "mixture and domain. In parentheses: the range when one mixture is left out. Centred: "
        "relative to the mean over the mixtures of the table, baseline included, so that the "
        "noise of the baseline's run is not shared. -log(weight): predictions without any runs, "
        "from the domain's weight over the baseline's weight. RMS: in nats; the RMS of the paper's "
        "is the error of predicting no change. Orders of the mean: over the domains with a loss.",
    )


def cells(setting: Setting, fits: Fits) -> Result:
    """Print each ratio of one table of the paper, predicted from the runs nearest in size."""
    size = float(counts(pd.Series([setting.size]))[0])
    runs, surrogate = min(fits, key=lambda fit: abs(math.log(fit[0].size / size)))
    mixtures = paper_mixtures(setting, runs)
    changes, half = predicted_changes(runs, surrogate, mixtures)
    printed = printed_changes(setting, runs, mixtures)
    rows = []
    for text in [MEAN, *runs.domains]:
        row: dict[str, Any] = {"domain": text}
        for name in mixtures.index[1:]:
            label = METHOD_LABELS[name]
            row[label] = changes.loc[name, text], half.loc[name, text]
            row[f"{label}, paper"] = Signed(printed.loc[name, text])
        row["rank correlation"] = rank_correlation(changes[text], printed[text])
        rows.append(row)
    return Result(
        f"{setting.label}: predicted from {count_label(runs.size)} runs, and the paper's",
        rows,
        f"Log ratios of perplexity relative to {METHOD_LABELS[setting.baseline]}; ± is half of the "
        "90% interval of the expected loss. The rank correlation is over the "
        f"{len(mixtures)} mixtures. {far_note(runs, mixtures)}",
    )


def far_note(runs: Runs, mixtures: pd.DataFrame) -> str:
    """Name the mixtures that are farther from the runs than the runs from each other."""
    trained = runs.mixtures.to_numpy()
    reaches = {name: reach_of(row.to_numpy(), trained) for name, row in mixtures.iterrows()}
    far = [
        f"{METHOD_LABELS[str(name)]} ({reach.distance:.2f})"
        for name, reach in reaches.items()
        if reach.extrapolates
    ]
    return (
        f"Extrapolated, with the total variation distance to the nearest run: "
        f"{', '.join(far) or 'none'}. The weights of these are outside the range of the runs, or "
        f"the distance exceeds {next(iter(reaches.values())).usual:.2f}, which 95% of the runs do "
        "not exceed."
    )


def effects(fits: Fits) -> Result:
    """Predict what the paper's mixtures and the natural one do to each text of SlimPajama."""
    rows = []
    for runs, surrogate in fits:
        mixtures = paper_mixtures(paper_settings()["slimpajama-684m"], runs)
        natural = pd.Series(NATURAL)[list(runs.mixtures)]
        mixtures.loc["natural"] = natural / natural.sum()
        changes, half = predicted_changes(runs, surrogate, mixtures)
        others = [text for text in runs.losses if text not in runs.domains]
        texts = [*others, MEAN, *runs.domains]
        rows += [
            {
                "mixture": METHOD_LABELS[name],
                **runs.labels,
                **{text: (changes.loc[name, text], half.loc[name, text]) for text in texts},
            }
            for name in mixtures.index[1:]
        ]
    return Result(
        "Effect of each mixture on SlimPajama's domains and on text of no domain",
        sorted_by(rows, "mixture"),
        "Predicted loss less that with Uniform, in nats; ± is half of the 90% interval of the "
        f"expected loss. The largest size: {far_note(runs, mixtures)}",
    )


def sorted_by(rows: list[dict[str, Any]], *headings: str) -> list[dict[str, Any]]:
    """Bring rows with equal cells under ``headings`` together, in the order of the first ones."""
    order = [[row[heading] for heading in headings] for row in rows]
    return sorted(rows, key=lambda row: order.index([row[heading] for heading in headings]))


def targets_of(texts: Iterable[str], domains: Iterable[str]) -> dict[str, list[str]]:
    """Name of a target -> the texts whose mean loss is minimized."""
    texts, domains = list(texts), list(domains)
    others = [text for text in texts if text not in domains]
    return {MEAN: domains, **{text: [text] for text in [*others, *domains]}}


def distances_from_uniform(runs: Runs) -> Array:
    """Total variation distances [n] of the mixtures from Uniform."""
    distances: Array = np.abs(runs.mixtures - uniform_like(runs)).sum(axis=1).to_numpy() / 2
    return distances


def choices_at(
    source: Runs, surrogate: Surrogate, runs: Runs, own: Surrogate
) -> list[dict[str, Any]]:
    """Choose mixtures of ``runs`` by predictions from smaller runs, and price them by their losses.

    Args:
        source: the smaller runs.
        surrogate: the fit to ``source``.
        runs: larger runs; the mixture is one of theirs.
        own: the fit to ``runs``, which averages the noise of a run out.
    """
    mixtures = runs.mixtures[list(source.mixtures)]
    texts, names = list(source.losses), list(runs.losses)
    predicted = pd.DataFrame(surrogate.mean(mixtures.to_numpy()), columns=texts)
    held_out = predicted.copy()
    fitted_rows = {key: at for at, key in enumerate(keys(source.mixtures))}
    places = [fitted_rows.get(key, -1) for key in keys(mixtures)]
    is_fitted = np.array(places) >= 0
    held_out.loc[is_fitted] = surrogate.report.held_out[[at for at in places if at >= 0]]
    distances = distances_from_uniform(runs)
    near = int(distances.argmin())
    rows = []
    common = [text for text in texts if text in names]
    for name, target in targets_of(common, [t for t in common if t in runs.domains]).items():
        losses = runs.losses[target].mean(axis=1).to_numpy()
        by_fit, by_others = (each[target].mean(axis=1).to_numpy() for each in (predicted, held_out))
        chosen, unseen = int(by_fit.argmin()), int(by_others.argmin())
        largest = mixtures.iloc[chosen].nlargest(3)
        pair = runs.mixtures.iloc[[chosen, near]].to_numpy()
        used_losses = [names.index(text) for text in target]
        draws = own.sample(pair, NUM_DRAWS, 0)[..., used_losses].mean(axis=2)
        low, high = np.quantile(draws[:, 1] - draws[:, 0], [0.05, 0.95])
        expected = own.mean(pair)[:, used_losses].mean(axis=1)
        rows.append(
            {
                "target": name,
                **runs.labels,
                "trained at both sizes": int(is_fitted.sum()),
                "gain": Signed(losses[near] - losses[chosen]),
                "expected gain": (float(expected[1] - expected[0]), float(high - low) / 2),
                "gain of the best run": losses[near] - losses.min(),
                "regret": losses[chosen] - losses.min(),
                "rank among the runs": int((losses < losses[chosen]).sum()) + 1,
                "rank correlation": with_interval(rank_correlation(by_fit, losses), len(losses)),
                "cross-validated": with_interval(rank_correlation(by_others, losses), len(losses)),
                "gain, cross-validated": Signed(losses[near] - losses[unseen]),
                "largest weights": ", ".join(f"{d} {w:.2f}" for d, w in largest.items()),
            }
        )
    return rows


def keys(mixtures: pd.DataFrame) -> list[tuple[float, ...]]:
    """Rounded weights of each mixture, which identify it at all sizes."""
    return [tuple(row) for row in mixtures.round(3).to_numpy()]


def choices(corpus: str, fits: Fits) -> Result:
    """Choose mixtures from the smallest runs of ``corpus`` and price them at the other sizes."""
    (source, surrogate), *larger = fits
    rows = [row for runs, fit in larger for row in choices_at(source, surrogate, runs, fit)]
    near = ", ".join(
        f"{distances_from_uniform(runs).min():.3f} ({count_label(runs.size)})" for runs, _ in larger
    )
    return Result(
        f"{corpus}: mixtures chosen from {count_label(source.size)} runs, at larger sizes",
        sorted_by(rows, "target"),
        f"A surrogate of the {len(source.mixtures)} runs of {count_label(source.size)} predicts "
        "the loss of each mixture that was trained at the larger size, and the mixture with the "
        "lowest prediction is chosen. Gain: the measured loss of the mixture nearest to Uniform "
        "less that of the chosen one, in nats. Expected gain: the same by a fit to the larger "
        "runs; ± is half of its 90% interval. Regret: the measured loss of the chosen mixture less "
        "the lowest of the runs. Cross-validated: mixtures that are among the smaller runs are "
        "predicted by fits without them (5 folds). Intervals of rank correlations are 90%. Total "
        "variation distance of the nearest mixture from Uniform: "
        f"{near}.",
    )


def headroom(all_runs: list[Runs]) -> Result:
    """How far the mixture nearest to Uniform is from the best of the runs, for each target."""
    rows = []
    for runs in all_runs:
        distances = distances_from_uniform(runs)
        near = int(distances.argmin())
        for name, texts in targets_of(runs.losses, runs.domains).items():
            losses = runs.losses[texts].mean(axis=1).to_numpy()
            best = int(losses.argmin())
            rows.append(
                {
                    "corpus": runs.corpus,
                    "target": name,
                    **runs.labels,
                    "nearest to Uniform less best": losses[near] - losses[best],
                    "its rank": int((losses < losses[near]).sum()) + 1,
                    "standard deviation of the runs": float(losses.std(ddof=1)),
                    "distance of the nearest": float(distances[near]),
                    "distance of the best": float(distances[best]),
                    "rank correlation of distance and loss": with_interval(
                        rank_correlation(distances, losses), len(losses)
                    ),
                }
            )
    return Result(
        "Headroom over the mixture nearest to Uniform",
        sorted_by(rows, "corpus", "target"),
        "Measured losses in nats. The best is the best of the runs of this size, so the difference "
        "includes the luck of one run in so many. Distances are total variation distances from "
        "Uniform. Intervals are 90%.",
    )


def results(fits: Fits) -> list[Result]:
    """Compute all tables."""
    all_runs = [runs for runs, _ in fits]
    found = [used(all_runs), agreements(fits)]
    for corpus, names in SETTINGS.items():
        own = [(runs, surrogate) for runs, surrogate in fits if runs.corpus == corpus]
        if own:
            found += [cells(paper_settings()[name], own) for name in names]
        if own and corpus == "SlimPajama":
            found.append(effects(own))
        if len(own) > 1:
            found.append(choices(corpus, own))
    return [*found, headroom(all_runs)]


def text_of(cell: object) -> str:
    """Format a cell of a result."""
    if isinstance(cell, tuple):
        value, *others = cell
        if len(others) == 1:
            return f"{value:+.3f} ± {others[0]:.3f}"
        ends = "" if math.isnan(others[0]) else f" ({others[0]:.3f} to {others[1]:.3f})"
        return f"{value:.3f}{ends}"
    if isinstance(cell, float):
        return f"{cell:+.3f}" if isinstance(cell, Signed) else f"{cell:.3f}"
    return str(cell)


def formatted(result: Result) -> Table:
    """Format a result as a table."""
    headings = dict.fromkeys(heading for row in result.rows for heading in row)
    rows = [[text_of(row.get(heading, MISSING)) for heading in headings] for row in result.rows]
    return Table.of(result.title, headings, rows, notes=[result.note])


def as_json(cell: object) -> object:
    """Convert a cell: tuples become lists, and NaN becomes None."""
    if isinstance(cell, tuple):
        return [as_json(part) for part in cell]
    if isinstance(cell, float):
        return round(float(cell), 5) if math.isfinite(cell) else None
    return cell


def write(found: list[Result], output: Path, made: Mapping[str, Any]) -> None:
    """Write the results as JSON, and as Markdown next to it."""
    tables = [
        {
            "title": result.title,
            "note": result.note,
            "rows": [{key: as_json(cell) for key, cell in row.items()} for row in result.rows],
        }
        for result in found
    ]
    write_json(output, {**made, "tables": tables})
    where = "\n".join(f"- {key}: {markdown(str(value))}" for key, value in made.items())
    pages = [markdown_table(formatted(result)) for result in found]
    with replacing(output.with_suffix(".md")) as temporary:
        temporary.write_bytes(("\n\n".join(["# Public runs", where, *pages]) + "\n").encode())


def main() -> None:
    """Print and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--validation", type=Path, required=True, help="folder of public results")
    parser.add_argument("--output", type=Path, default=RESULTS / "public-runs.json")
    arguments = parser.parse_args()
    on, start = machine(), time.perf_counter()
    try:
        fits = fit_all(read_runs(arguments.validation))
        found = results(fits)
        seconds = round(time.perf_counter() - start, 1)
        made = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": on,
            "command": COMMAND,
            "wall_seconds": seconds,
        }
        print("\n\n\n".join(terminal_table(formatted(result)) for result in found))
        write(found, arguments.output, made)
    except UserError as error:
        parser.exit(2, f"error: {error}\n")
    runs = sum(len(runs.mixtures) for runs, _ in fits)
    print(
        f"{len(found)} tables from {runs} runs in {seconds} s, written to {arguments.output} and "
        f"{arguments.output.with_suffix('.md')}"
    )


if __name__ == "__main__":
    main()
