"""Read and write training runs on many mixtures as two CSV tables: mixtures and losses.

Tables of RegMix (``index,train_<domain>...`` and ``index,valid_<domain>...``) and of Olmix
(``run`` or ``run_id``, ``name``, then domains or metrics) are supported.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.errors import UserError

Array = npt.NDArray[np.float64]
# Published shares are rounded to three digits, so many sums are off by some thousandths.
SUM_TOLERANCE = 0.01
MOST_SHOWN = 5
NO_NUMBER = ("", "nan", "na", "n/a", "none", "null", "inf", "-inf", "+inf", "infinity")
KEYS = ("run", "run_id", "index", "name")
"""Columns that identify the run of a row, the most reliable first."""
# train_the_pile_arxiv, metric/the_pile_arxiv_val_loss, valid_arxiv/loss ...
_BEFORE = re.compile(r"^(metrics?|eval|train|training|valid|validation|val|test)[_/:.\- ]", re.I)
_AFTER = re.compile(r"[_/:.\- ](train|valid|validation|val|test|loss|lm[_ ]loss)$", re.I)
_SEPARATORS = "_/:.- "


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
        losses: [n, m] float64, finite.
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

    def __post_init__(self) -> None:
        assert self.mixtures.shape == (len(self.keys), len(self.domains))
        assert self.losses.shape == (len(self.keys), len(self.metrics))


@dataclasses.dataclass(frozen=True)
class _Table:
    """A CSV file: its header, and each row with its line in the file."""

    path: Path
    header: list[str]
    rows: list[tuple[int, list[str]]]

    @property
    def columns(self) -> list[int]:
        """Positions of the columns that hold data."""
        return [place for place, name in enumerate(self.header) if not is_key(name)]

    def keys(self) -> dict[str, int]:
        """Lower-case name of each key column -> its position."""
        return {
            name.strip().lower(): place for place, name in enumerate(self.header) if is_key(name)
        }


def read_mixture_runs(ratios: Path, metrics: Path) -> MixtureRuns:
    """Read the runs that are in both tables, in the order of ``ratios``.

    Rows are matched by a column that both have: run, run_id, index or name. Left out with a
    :class:`MixtureRunsWarning`: runs that only one of the tables has, metrics without any number,
    and runs that lack one of the others. Sums up to 0.01 off 1 are divided out.

    Raises:
        UserError: naming the file, the line and the fix.
    """
    shares, losses = _read(ratios), _read(metrics)
    key = _common_key(shares, losses)
    rows, results = _by_key(shares, key), _by_key(losses, key)
    common = [name for name in rows if name in results]
    if not common:
        raise UserError(
            f"{ratios} and {metrics} have no run in common: of their columns '{key}' no value is "
            "in both; pass tables of the same runs"
        )
    _warn_unmatched(ratios, [name for name in rows if name not in results], metrics)
    _warn_unmatched(metrics, [name for name in results if name not in rows], ratios)
    mixtures = _mixtures(shares, [rows[name] for name in common])
    values = _values(losses, [results[name] for name in common])
    return _usable(common, shares, mixtures, losses, values)


def write_mixture_runs(runs: MixtureRuns, ratios: Path, metrics: Path) -> None:
    """Write ``runs`` as two tables in RegMix's form, each under a temporary name first."""
    _write(ratios, "train", runs.keys, runs.domains, runs.mixtures)
    _write(metrics, "valid", runs.keys, runs.metrics, runs.losses)


def _write(path: Path, word: str, keys: Sequence[str], names: Sequence[str], data: Array) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", *(f"{word}_{name}" for name in names)])
    for key, row in zip(keys, data.tolist(), strict=True):
        writer.writerow([key, *row])
    with replacing(path) as temporary:
        temporary.write_text(text.getvalue(), encoding="utf-8")


def _read(path: Path) -> _Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            header = next(reader, [])
            rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; pass a CSV table with a row per run") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path}: {error}; pass a CSV table in UTF-8") from error
    table = _Table(path, header, rows)
    if not table.columns or not rows:
        raise UserError(f"{path} holds no runs: expected a header and a row per run")
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(
                f"{path}:{line}: {len(row)} values for the {len(header)} columns of the header; "
                "repair the line"
            )
    doubled = [name for name in header if header.count(name) > 1]
    if doubled:
        raise UserError(f"{path}: column '{doubled[0]}' is repeated; remove one")
    return table


def _common_key(one: _Table, other: _Table) -> str:
    ours, theirs = one.keys(), other.keys()
    for name in (*KEYS, "", "unnamed: 0"):
        if name in ours and name in theirs:
            return name
    raise UserError(
        f"{one.path} and {other.path} share no column that identifies the run; add to both "
        f"one of {', '.join(KEYS)}"
    )


def _by_key(table: _Table, key: str) -> dict[str, tuple[int, list[str]]]:
    """Run -> its line and row."""
    place, found = table.keys()[key], dict[str, tuple[int, list[str]]]()
    for line, row in table.rows:
        name = row[place].strip()
        if name in found:
            raise UserError(
                f"{table.path}:{line}: run '{name}' repeats line {found[name][0]}; "
                "leave one of them out"
            )
        found[name] = (line, row)
    return found


def _mixtures(table: _Table, rows: Sequence[tuple[int, list[str]]]) -> Array:
    """[n, k] shares, divided by their sums."""
    shares = np.array([[_number(table, line, row, c) for c in table.columns] for line, row in rows])
    for (line, row), values in zip(rows, shares, strict=True):
        bad = [c for c, v in zip(table.columns, values, strict=True) if not 0 <= v < math.inf]
        if bad:
            raise UserError(
                f"{table.path}:{line}: '{row[bad[0]]}' of {table.header[bad[0]]} is not a "
                "share: must be finite and >= 0"
            )
        if abs(values.sum() - 1) > SUM_TOLERANCE:
            raise UserError(
                f"{table.path}:{line}: the shares sum to {values.sum():.6g}, not 1; expected "
                "shares of the tokens of a run, and no other columns than those and the run's name"
            )
    _warn_sums(table, np.abs(shares.sum(axis=1) - 1))
    result: Array = shares / shares.sum(axis=1, keepdims=True)
    return result


def _values(table: _Table, rows: Sequence[tuple[int, list[str]]]) -> Array:
    """[n, m] metrics; NaN where the value is missing or not finite."""
    found = np.array([[_number(table, line, row, c) for c in table.columns] for line, row in rows])
    return np.where(np.isfinite(found), found, np.nan)


def _number(table: _Table, line: int, row: Sequence[str], column: int) -> float:
    text = row[column].strip()
    try:
        return math.nan if text.lower() in NO_NUMBER else float(text)
    except ValueError:
        raise UserError(
            f"{table.path}:{line}: '{text}' of {table.header[column]} is not a number; "
            "repair it, or remove the column"
        ) from None


def _usable(
    keys: list[str], shares: _Table, mixtures: Array, metrics: _Table, values: Array
) -> MixtureRuns:
    """Drop metrics without any value, then runs with a missing value."""
    there = np.any(np.isfinite(values), axis=0)
    names = [metrics.header[place] for place in metrics.columns]
    empty = [name for name, any_number in zip(names, there, strict=True) if not any_number]
    if empty:
        _warn(f"{metrics.path}: no number in {_shown(empty)}: left out")
    if not there.any():
        raise UserError(f"{metrics.path} has no number for any run of {shares.path}")
    whole = np.all(np.isfinite(values[:, there]), axis=1)
    lacking = [key for key, is_whole in zip(keys, whole, strict=True) if not is_whole]
    if lacking:
        _warn(
            f"{metrics.path}: {len(lacking)} of {len(keys)} runs lack a metric and are left out: "
            f"{_shown(lacking)}"
        )
    if not whole.any():
        raise UserError(
            f"{metrics.path}: no run has a number for all metrics; leave out columns that have gaps"
        )
    domain_columns = [shares.header[place] for place in shares.columns]
    metric_columns = [name for name, t in zip(names, there, strict=True) if t]
    return MixtureRuns(
        keys=[key for key, is_whole in zip(keys, whole, strict=True) if is_whole],
        domains=plain_names(domain_columns),
        mixtures=mixtures[whole],
        metrics=plain_names(metric_columns),
        losses=values[whole][:, there],
        domain_columns=domain_columns,
        metric_columns=metric_columns,
    )


def _warn_unmatched(path: Path, names: Sequence[str], other: Path) -> None:
    if names:
        _warn(f"{path}: {len(names)} runs are not in {other} and are left out: {_shown(names)}")


def _warn_sums(table: _Table, off: Array) -> None:
    rounded = 1e-6
    if (off > rounded).any():
        _warn(
            f"{table.path}: the shares of {int((off > rounded).sum())} runs sum to 1 only within "
            f"{off.max():.2g}; each is divided by its sum"
        )


def _shown(names: Sequence[str]) -> str:
    more = len(names) - MOST_SHOWN
    return ", ".join(names[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _warn(message: str) -> None:
    warnings.warn(message, MixtureRunsWarning, stacklevel=3)


def is_key(column: str) -> bool:
    """Whether ``column`` identifies runs; a column without a name is a data frame's index."""
    return column.strip().lower() in KEYS or column.strip() in ("", "Unnamed: 0")


def plain_names(columns: Sequence[str]) -> list[str]:
    """``columns`` without affixes such as train_ and _loss, and without a common prefix.

    Unchanged if no column has an affix, or if two would get the same name.
    """
    names = [_without_affixes(column.strip()) for column in columns]
    if names == list(columns):
        return names
    shared = _common_prefix(names)
    shorter = [name[len(shared) :] for name in names]
    if len(set(shorter)) == len(shorter):
        return shorter
    return names if len(set(names)) == len(names) else list(columns)


def matched(names: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Match ``names`` to ``known``; names without a match are left out.

    A name is compared literally, then without case, affixes and the kind of separator, and last
    without the common prefix of either side.
    """
    found = {name: name for name in names if name in set(known)}
    for simplified in (_simplified, _simplified_plain):
        theirs = _unique(known, simplified(known))
        ours = _unique(names, simplified(names))
        for key, name in ours.items():
            if name not in found and key in theirs and theirs[key] not in found.values():
                found[name] = theirs[key]
    return {name: found[name] for name in names if name in found}


def _without_affixes(column: str) -> str:
    before = ""
    while before != column:
        before = column
        column = _AFTER.sub("", _BEFORE.sub("", column))
    return column


def _common_prefix(names: Sequence[str]) -> str:
    """The common prefix of ``names``, up to and with its last separator."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    while length and first[length - 1] not in _SEPARATORS:
        length -= 1
    return first[:length]


def _simplified(names: Sequence[str]) -> list[str]:
    return [re.sub(f"[{re.escape(_SEPARATORS)}]+", "_", _without_affixes(n)).lower() for n in names]


def _simplified_plain(names: Sequence[str]) -> list[str]:
    simplified = _simplified(names)
    shared = _common_prefix(simplified)
    return [name[len(shared) :] for name in simplified]


def _unique(names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Key -> name, for the keys that only one name has."""
    return {key: name for key, name in zip(keys, names, strict=True) if list(keys).count(key) == 1}
