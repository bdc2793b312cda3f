"""What the columns of a table of runs are called: keys, and domains without what was put around."""

from __future__ import annotations

import re
from collections.abc import Sequence

KEYS = ("run", "run_id", "index", "name")
"""Columns that say which run a row is of, the surest first."""
# train_the_pile_arxiv, metric/the_pile_arxiv_val_loss, valid_arxiv/loss ...
_BEFORE = re.compile(r"^(metrics?|eval|train|training|valid|validation|val|test)[_/:.\- ]", re.I)
_AFTER = re.compile(r"[_/:.\- ](train|valid|validation|val|test|loss|lm[_ ]loss)$", re.I)
_SEPARATORS = "_/:.- "


def is_key(column: str) -> bool:
    """Whether ``column`` names runs; a column without a name is a table's own numbering."""
    return column.strip().lower() in KEYS or column.strip() in ("", "Unnamed: 0")


def plain_names(columns: Sequence[str]) -> list[str]:
    """``columns`` without words such as train_ and _loss, and the data set's name before them all.

    Where two would be called the same, and where nothing was put around them, all stay as they are.
    """
    names = [_without_words(column.strip()) for column in columns]
    if names == list(columns):
        return names
    shared = _shared_beginning(names)
    shorter = [name[len(shared) :] for name in names]
    if len(set(shorter)) == len(shorter):
        return shorter
    return names if len(set(names)) == len(names) else list(columns)


def matched(names: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Each of ``names`` -> the one of ``known`` that it means; those that mean none are left out.

    A name is first looked for as it is, then without regard to case, words such as train_ and the
    sort of separator, and last with the data set's name left out on either side.
    """
    found = {name: name for name in names if name in set(known)}
    for simplified in (_simplified, _simplified_plain):
        theirs = _unique(known, simplified(known))
        ours = _unique(names, simplified(names))
        for key, name in ours.items():
            if name not in found and key in theirs and theirs[key] not in found.values():
                found[name] = theirs[key]
    return {name: found[name] for name in names if name in found}


def _without_words(column: str) -> str:
    before = ""
    while before != column:
        before = column
        column = _AFTER.sub("", _BEFORE.sub("", column))
    return column


def _shared_beginning(names: Sequence[str]) -> str:
    """What all ``names`` begin with, up to and with its last separator."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    while length and first[length - 1] not in _SEPARATORS:
        length -= 1
    return first[:length]


def _simplified(names: Sequence[str]) -> list[str]:
    return [re.sub(f"[{re.escape(_SEPARATORS)}]+", "_", _without_words(n)).lower() for n in names]


def _simplified_plain(names: Sequence[str]) -> list[str]:
    simplified = _simplified(names)
    shared = _shared_beginning(simplified)
    return [name[len(shared) :] for name in simplified]


def _unique(names: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Key -> name, for the keys that only one name has."""
    return {key: name for key, name in zip(keys, names, strict=True) if list(keys).count(key) == 1}
