"""Read and write training runs on many mixtures as two CSV tables: mixtures and losses.

Tables of RegMix (``index,train_<domain>...`` and ``index,valid_<domain>...``) and of Olmix
(``run`` or ``run_id``, ``name``, then domains or metrics) are supported.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from megatron_chameleon.artifacts.files import flush_to_disk, replacing
from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import LARGEST_FLOAT32

Array = npt.NDArray[np.float64]
# Published shares are rounded to three digits, so many sums are off by some thousandths.
SUM_TOLERANCE = 0.01
NO_NUMBER = ("", "nan", "na", "n/a", "none", "null", "inf", "-inf", "+inf", "infinity")
KEYS = ("run", "run_id", "index", "name")
"""Columns that identify the run of a row, the most reliable first."""
# Affixes of column names such as train_the_pile_arxiv, metric/the_pile_arxiv_val_loss and
# valid_arxiv/loss.
_BEFORE = re.compile(r"^(metrics?|eval|train|training|valid|validation|val|test)[_/:.\- ]", re.I)
_AFTER = re.compile(r"[_/:.\- ](train|valid|validation|val|test|loss|lm[_ ]loss)$", re.I)
_TRAINING, _HELD_OUT = {"train", "training"}, {"eval", "valid", "validation", "val", "test"}


class MixtureRunsWarning(UserWarning):
    """Rows or columns of the tables were skipped."""


@dataclasses.dataclass(frozen=True, eq=False)
class MixtureRuns:
    """n runs, each on a different mixture.

    Attributes:
        keys: names of the runs.
        domains: the k domains of the mixtures.
        mixtures: [n, k] float64, rows that sum to 1.
        metrics: names of the m losses.
        losses: [n, m] float64; finite if read from a table, NaN where a run was not evaluated.
        domain_columns: column names of the domains in the table read; empty otherwise.
        metric_columns: column names of the metrics in the table read; empty otherwise.
    """

    keys: list[str]
    domains: list[str]
    mixtures: Array
    metrics: list[str]
    losses: Array
    domain_columns: list[str] = dataclasses.field(default_factory=list)
    metric_columns: list[str] = dataclasses.field(default_factory=list)


def read_mixture_runs(ratios: Path, metrics: Path) -> MixtureRuns:
    """Read the runs that are in both tables, in the order of ``ratios``.

    Rows are matched by a column that both have: run, run_id, index or name. Runs in one table only,
    metrics without any number, and runs that lack one of the remaining metrics are skipped with a
    :class:`MixtureRunsWarning`. Shares that sum to 1 within 0.01 are rescaled.

    Raises:
        UserError: naming the file, the run and the fix.
    """
    shares, losses = _read(ratios), _read(metrics)
    key = next((name for name in (*KEYS, "") if name in shares and name in losses), None)
    if key is None:
        raise UserError(
            f"{ratios} and {metrics} share no column that identifies the run; add to both one of "
            f"{', '.join(KEYS)}"
        )
    shares, losses = _by_run(ratios, shares, key), _by_run(metrics, losses, key)
    common = shares.index[shares.index.isin(losses.index)]
    if common.empty:
        raise UserError(
            f"{ratios} and {metrics} have no run in common: no value of column '{key}' is in both; "
            "pass tables of the same runs"
        )
    for path, table in ((ratios, shares), (metrics, losses)):
        _warn_left_out(
            f"{path}: the other table lacks runs", table.index[~table.index.isin(common)]
        )
    shares, losses = _numbers(ratios, shares.loc[common]), _numbers(metrics, losses.loc[common])
    is_empty = losses.isna().all()
    _warn_left_out(f"{metrics}: no number in columns", losses.columns[is_empty])
    losses = losses.loc[:, ~is_empty]
    complete = losses.notna().all(axis=1).to_numpy()
    _warn_left_out(f"{metrics}: runs lack a metric", losses.index[~complete])
    if losses.empty or not complete.any():
        raise UserError(
            f"{metrics}: no run of {ratios} has a number for all metrics; leave out columns that "
            "have gaps"
        )
    return MixtureRuns(
        keys=list(common[complete]),
        domains=plain_names(list(shares.columns)),
        mixtures=_mixtures(ratios, shares)[complete],
        metrics=plain_names(list(losses.columns)),
        losses=losses.to_numpy()[complete],
        domain_columns=list(shares.columns),
        metric_columns=list(losses.columns),
    )


def read_losses(path: Path, names: Sequence[str], columns: Mapping[str, str]) -> pd.DataFrame:
    """Read the losses of runs from a table that may have other rows and columns.

    The CSV export of the runs table of Weights & Biases, with columns Name and State, is supported.
    Rows whose State is not ``finished`` are left out with a :class:`MixtureRunsWarning`.

    Args:
        path: CSV table with a row per run.
        names: names of the losses; each must match one column, but for case, separators and
            affixes such as eval/ and /loss. Training losses, such as train/NAME/loss, never match.
        columns: name of a loss -> its column; if not empty, only these losses are read.

    Returns:
        A row per run, with the run's name as index, and a float64 column per name; NaN where the
        table has no finite number.

    Raises:
        UserError: for a table that cannot be read, a name that matches no or several columns, a
            column without a number, or a repeated run.
    """
    table = _read(path)
    key = next((name for name in (*KEYS, "") if name in table), None)
    if key is None:
        raise UserError(
            f"{path} has no column with the name of the run: pass a table with a row per run, and "
            f"its name in column {' or '.join(KEYS)}"
        )
    if state := next((name for name in table if name.strip().lower() == "state"), None):
        finished = table[state].str.strip().str.lower() == "finished"
        _warn_left_out(f"{path}: runs not finished", pd.Index(table[key][~finished]))
        table = table[finished]
    table = _by_run(path, table, key)
    chosen = dict(columns)
    for name, column in columns.items():
        if column not in table:
            raise UserError(f"{path}: --column {name}={column}: unknown column")
        if list(columns.values()).count(column) > 1:
            raise UserError(f"{path}: --column {name}={column}: another loss has this column")
    if not columns:
        matching = collections.defaultdict[str, list[str]](list)
        for column in table:
            matching[_simple_name(column)].append(column)
        known = collections.Counter(map(_simple_name, names))
        for name in names:
            found = matching[_simple_name(name)]
            held_out = [column for column in found if not is_training_loss(column)]
            if known[_simple_name(name)] > 1:
                problem = f"the name of '{name}' is too similar to that of another domain"
            elif len(held_out) > 1:
                problem = f"columns '{held_out[0]}' and '{held_out[1]}' both match '{name}'"
            elif found and not held_out:
                problem = f"'{found[0]}' is a training loss, and no held-out loss matches '{name}'"
            elif not found:
                problem = f"no column matches '{name}'"
            else:
                chosen[name] = held_out[0]
                continue
            raise UserError(
                f"{path}: {problem}; name the columns of all held-out losses: "
                f"--column '{name}=COLUMN' ..."
            )
    losses = _numbers(path, table[list(chosen.values())]).set_axis(list(chosen), axis=1)
    if empty := [name for name in chosen if losses[name].isna().all()]:
        raise UserError(f"{path}: column '{chosen[empty[0]]}' has no number; choose another column")
    return losses


def _read(path: Path) -> pd.DataFrame:
    """A CSV table as text; its key columns get lower-case names."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = [row for row in csv.reader(stream, strict=True) if any(map(str.strip, row))]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; pass a CSV table with a row per run") from None
    except (OSError, ValueError, csv.Error) as error:  # not UTF-8, or an open quote
        problem = " ".join(str(error).split())
        raise UserError(f"cannot read {path}: {problem}; pass a CSV table in UTF-8") from error
    header = rows[0] if rows else []
    for row in rows:
        if len(row) != len(header):
            raise UserError(
                f"{path}: the row that starts with '{row[0]}' has {len(row)} values, but the "
                f"header has {len(header)}; repair the row, or remove it"
            )
    if len(rows) < 2 or all(map(is_key, header)):
        raise UserError(f"{path} holds no runs: expected a header and a row per run")
    names = [name.strip().lower() if is_key(name) else name for name in header]
    names = ["" if name == "unnamed: 0" else name for name in names]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{path}: column '{repeated[0]}' is repeated; remove one")
    return pd.DataFrame(rows[1:], columns=names, dtype=str)


def _by_run(path: Path, table: pd.DataFrame, key: str) -> pd.DataFrame:
    """Return the data columns of ``table``, indexed by its column ``key``."""
    runs = table[key].str.strip()
    if runs.duplicated().any():
        raise UserError(f"{path}: run '{runs[runs.duplicated()].iloc[0]}' is repeated; remove one")
    return table.set_index(runs)[[name for name in table if not is_key(name)]]


def _numbers(path: Path, table: pd.DataFrame) -> pd.DataFrame:
    """Convert ``table`` to float64; missing and infinite values become NaN.

    Raises:
        UserError: for text that is no number, or a number of which a square could overflow.
    """
    numbers = {}
    for name, column in table.items():
        text = column.str.strip().str.lower()
        try:
            numbers[name] = text.mask(text.isin(NO_NUMBER)).astype(np.float64)
        except ValueError as error:
            raise UserError(f"{path}: {name}: {error}; repair it, or remove the column") from error
    found = pd.DataFrame(numbers, table.index).replace([math.inf, -math.inf], math.nan)
    for name, too_large in (found.abs() > LARGEST_FLOAT32).items():
        if too_large.any():
            run = too_large.index[too_large][0]
            raise UserError(
                f"{path}: run '{run}': {found[name][run]:g} of {name} is too large; repair it, or "
                "remove the run"
            )
    return found


def _mixtures(path: Path, shares: pd.DataFrame) -> Array:
    """Return the shares [n, k], each row divided by its sum."""
    values: Array = shares.to_numpy()
    bad = np.argwhere(~(values >= 0))
    if bad.size:
        row, column = bad[0]
        raise UserError(
            f"{path}: run '{shares.index[row]}': {values[row, column]} of {shares.columns[column]} "
            "is not a share: must be finite and >= 0"
        )
    off = np.abs(values.sum(axis=1) - 1)
    if (off > SUM_TOLERANCE).any():
        row = int(np.argmax(off > SUM_TOLERANCE))
        raise UserError(
            f"{path}: run '{shares.index[row]}': the shares sum to {values[row].sum():.6g}, not 1; "
            "expected a column for the run's name, and one for each domain with its share of tokens"
        )
    if rounded := int((off > 1e-6).sum()):
        warnings.warn(
            f"{path}: the shares of {rounded} runs sum to 1 only within {off.max():.2g}; each "
            "share is divided by the sum of its run",
            MixtureRunsWarning,
            stacklevel=3,
        )
    return values / values.sum(axis=1, keepdims=True)


def _warn_left_out(problem: str, names: pd.Index) -> None:
    if not names.empty:
        listed = ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
        message = f"{problem}: leaving out {len(names)}: {listed}"
        warnings.warn(message, MixtureRunsWarning, stacklevel=3)


def write_mixture_runs(runs: MixtureRuns, ratios: Path, metrics: Path) -> None:
    """Write ``runs`` as two tables in RegMix's form; if one cannot be written, neither changes."""
    for path in (ratios, metrics):
        if path.is_dir():
            raise UserError(f"{path} is a folder, and cannot be replaced by a table; remove it")
    with replacing(ratios) as new_ratios, replacing(metrics) as new_metrics:
        for path, table in zip((new_ratios, new_metrics), mixture_run_tables(runs), strict=True):
            path.write_bytes(table)
            flush_to_disk(path)


def mixture_run_tables(runs: MixtureRuns) -> tuple[bytes, bytes]:
    """Format ``runs`` as two CSV tables in RegMix's form: mixtures, and losses."""
    ratios = pd.DataFrame(runs.mixtures, runs.keys, [f"train_{name}" for name in runs.domains])
    metrics = pd.DataFrame(runs.losses, runs.keys, [f"valid_{name}" for name in runs.metrics])
    as_csv = {"index_label": "index", "lineterminator": "\n"}
    return ratios.to_csv(**as_csv).encode(), metrics.to_csv(**as_csv).encode()


def is_key(column: str) -> bool:
    """Whether ``column`` identifies runs; a column without a name is a data frame's index."""
    return column.strip().lower() in KEYS or column.strip() in ("", "Unnamed: 0")


def plain_names(columns: Sequence[str]) -> list[str]:
    """Strip an affix that all ``columns`` have, such as train_ or _loss, and a common prefix.

    An affix of some columns only, such as that of a domain called test_x, belongs to their names.
    Without an affix of all columns, or if two would get the same name, nothing is stripped.
    """
    stripped = [column.strip() for column in columns]
    names = _without_shared(_BEFORE, stripped)
    while (shorter := _without_shared(_AFTER, names)) != names:
        names = shorter
    prefix = _common_prefix(names) if names != stripped else ""
    for found in ([name.removeprefix(prefix) for name in names], names):
        if len(set(found)) == len(found) and all(found):
            return found
    return list(columns)


def matched(names: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Match ``names`` to ``known``; names without a match are left out.

    Names are compared exactly, then ignoring case, affixes and separators, and finally also without
    the common prefix of each list.
    """
    found = {name: name for name in names if name in known}
    for with_prefix in (True, False):
        theirs = _by_simple_name(known, with_prefix=with_prefix)
        for key, name in _by_simple_name(names, with_prefix=with_prefix).items():
            if name not in found and key in theirs and theirs[key] not in found.values():
                found[name] = theirs[key]
    return {name: found[name] for name in names if name in found}


def _by_simple_name(names: Sequence[str], *, with_prefix: bool) -> dict[str, str]:
    """Map each unique name, in lower case and without affixes, to the original name."""
    keys = [_simple_name(name) for name in names]
    prefix = "" if with_prefix else _common_prefix(keys)
    keys = [key.removeprefix(prefix) for key in keys]
    return {key: name for key, name in zip(keys, names, strict=True) if keys.count(key) == 1}


def _simple_name(name: str) -> str:
    return re.sub(r"[_/:.\- ]+", "_", _without_affixes(name)).lower()


def is_training_loss(column: str) -> bool:
    """Whether the affixes of ``column`` name the training text, and not also held-out text."""
    affixes = _words(column) - _words(_without_affixes(column))
    return bool(affixes.keys() & _TRAINING) and not affixes.keys() & _HELD_OUT


def _words(name: str) -> collections.Counter[str]:
    return collections.Counter(re.split(r"[_/:.\- ]+", name.lower()))


def _without_shared(affix: re.Pattern[str], names: list[str]) -> list[str]:
    """Strip a match of ``affix`` from all names if all have the same match."""
    found = {match and match[0].lower() for match in map(affix.search, names)}
    return names if len(found) > 1 or None in found else [affix.sub("", name) for name in names]


def _without_affixes(column: str) -> str:
    before = ""
    while before != column:
        before = column
        column = _AFTER.sub("", _BEFORE.sub("", column))
    return column


def _common_prefix(names: Sequence[str]) -> str:
    """The common prefix of ``names``, up to and including its last separator."""
    prefix = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071
    return prefix[: max(map(prefix.rfind, "_/:.- ")) + 1]
