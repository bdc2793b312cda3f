"""A domain without training text can be given no tokens to train on, and has no embedding."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError


def check_text(corpus: Corpus, names: Iterable[str], purpose: str) -> None:
    """Refuse domains without training text.

    Args:
        corpus: whose domains ``names`` are.
        names: the domains that need text.
        purpose: what for, as in "to embed".

    Raises:
        UserError: for the first of them that has none.
    """
    for name in names:
        if corpus.domains[name].train.tokens == 0:
            raise UserError(
                f"domain '{name}' of {corpus.root} has no training tokens {purpose}; leave it out "
                "(--domains), give it text, or preprocess again without it"
            )
