"""Known weights: from the command line, a file, or a column of a table in Chameleon's paper."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.options import ChosenDomainsOptions
from megatron_chameleon.ranges import flag_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManualOptions(ChosenDomainsOptions):
    """Validate known weights against the corpus, and write them as a mixture."""

    weights: str | None = None
    """Weights such as a=0.3,b=0.7, or a file that contains weights: a mixture (.json), or a table
    (.csv) with the columns domain and weight. The weights are normalized to sum to 1."""
    tokens: str | None = None
    """Training tokens per domain, such as web=10e9,code=2e9. Their sum is the token budget of the
    mixture."""
    epochs: str | None = None
    """Epochs of each domain's training text, such as web=1,wiki=3; domains that are not named are
    not sampled. The sum of their tokens is the token budget of the mixture."""
    published: str | None = None
    """A column of Chameleon's tables, such as slimpajama/doremi; the error for an unknown name
    lists all names."""
    rename: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """OLD=NEW assigns the weight of OLD to domain NEW of the corpus; if several OLD have the same
    NEW, their weights are added. OLD= drops the weight of OLD. The option can be repeated, and
    accepts several values."""

    @property
    def renames(self) -> list[str]:
        """Return the values of all occurrences of ``--rename``."""
        return [rename for group in self.rename for rename in group]

    def __post_init__(self) -> None:
        """Raise UserError unless there is exactly one source of weights."""
        if self.tokens is not None or self.epochs is not None:
            flag = flag_of("epochs" if self.tokens is None else "tokens")
            self.reject_changed(["token_budget", "max_epochs"], f"{flag} sets the amounts of text")
        super().__post_init__()
        sources = ("weights", "tokens", "epochs", "published")
        given = [flag_of(name) for name in sources if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} are mutually exclusive: pass one of them")
        if not given:
            raise UserError(
                "--method manual requires --weights a=0.3,b=0.7, --weights FILE, "
                "--tokens a=10e9,b=2e9, --epochs a=1,b=3 or --published NAME"
            )


def run(options: ManualOptions) -> None:
    """Write known weights as a mixture."""
    from megatron_chameleon.methods.manual.compute import compute_manual

    compute_manual(options)


METHOD = Method(
    name="manual",
    options=ManualOptions,
    compute=run,
    summary="known weights: from the command line, a file, or a table in Chameleon's paper",
    needs="the weights (--weights or --published), or amounts of text (--tokens or --epochs)",
    cost="nothing; for a mixture file, the cost recorded in it",
    good_for="mixtures computed elsewhere, and those of the paper (--published slimpajama/doremi)",
    source="",
)
