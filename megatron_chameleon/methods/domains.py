"""Domain names in options and messages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError

MAX_NAMES = 10


def format_names(names: Sequence[str]) -> str:
    """Comma-separated names for a message: the first ten, and the number of the others."""
    shown = ", ".join(names[:MAX_NAMES])
    return f"{shown} and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else shown


def select_domains(selection: str | None, corpus: Corpus, flag: str = "--domains") -> list[str]:
    """The domains in the comma-separated value of ``flag``, in corpus order; all if it is None.

    Raises:
        UserError: for a name that is not in the corpus.
    """
    if selection is None:
        return corpus.names
    selected = [name.strip() for name in selection.split(",") if name.strip()]
    known = set(corpus.names)
    unknown = [name for name in selected if name not in known]
    if unknown or not selected:
        problem = f"unknown domain '{unknown[0]}'" if unknown else "no domain is named"
        raise UserError(
            f"{flag} {selection}: {problem}; {corpus.root} has {format_names(corpus.names)}"
        )
    chosen = set(selected)
    return [name for name in corpus.names if name in chosen]


def require_training_tokens(corpus: Corpus, names: Iterable[str], purpose: str) -> None:
    """Raise UserError for the first of ``names`` without training tokens.

    Args:
        corpus: the corpus of these domains.
        names: domains that need training tokens.
        purpose: the use of the tokens, as in "to embed".
    """
    for name in names:
        if corpus.domains[name].train.tokens == 0:
            raise UserError(
                f"domain '{name}' of {corpus.root} has no training tokens {purpose}; leave it out "
                "(--domains), or preprocess the corpus again with text for it or without it"
            )


def parse_share(item: str, target: str, names: Sequence[str]) -> tuple[str, float]:
    """Split an item of ``--target``, ``a`` or ``a=2``, into its name and its share (default 1).

    Args:
        item: one of the comma-separated items of ``target``.
        target: the whole value of ``--target``.
        names: known names, which may contain an equals sign.

    Raises:
        UserError: for a share that is not finite and > 0.
    """
    if item in names or "=" not in item:
        return item, 1.0
    name, _, number = item.rpartition("=")
    try:
        share = float(number)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise UserError(
            f"--target {target}: share '{number.strip()}' of '{name.strip()}' must be finite, > 0"
        )
    return name.strip(), share
