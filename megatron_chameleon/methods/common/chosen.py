"""Which of a corpus's domains a mixture is of."""

from __future__ import annotations

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.table import listed


def chosen_domains(given: str | None, corpus: Corpus, flag: str = "--domains") -> list[str]:
    """The domains that ``given``, of ``flag``, names, in the corpus's order; all if it is None.

    Raises:
        UserError: for a name that the corpus does not have.
    """
    if given is None:
        return corpus.names
    asked = [name.strip() for name in given.split(",") if name.strip()]
    there = set(corpus.names)
    unknown = [name for name in asked if name not in there]
    if unknown or not asked:
        problem = f"there is no domain '{unknown[0]}'" if unknown else "it names no domain"
        raise UserError(
            f"{flag} {given}: {problem}; those of {corpus.root} are {listed(corpus.names)}"
        )
    chosen = set(asked)
    return [name for name in corpus.names if name in chosen]
