"""Weights that are known already: a person's own, those of a file, or a paper's printed ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro

from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.mixture import ChosenDomainsOptions

if TYPE_CHECKING:
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.methods.common.model_free import Assigned


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManualOptions(ChosenDomainsOptions):
    """Take given weights, check them against the corpus, and write them as a mixture."""

    weights: str | None = None
    """a=0.3,b=0.7, or a file: a mixture (.json), or a table (.csv) with the columns domain and
    weight. They are divided by their sum."""
    published: str | None = None
    """A column of Chameleon's tables, such as slimpajama/doremi; a wrong name lists them all."""
    rename: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """OLD=NEW: what the weights call OLD is NEW in the corpus; several OLD of one NEW add up, and
    OLD= leaves it out. May be given several times, or be several."""

    @property
    def renames(self) -> list[str]:
        """What ``--rename`` was given, over all its uses."""
        return [rename for group in self.rename for rename in group]


def compute(options: ManualOptions) -> None:
    """Write the weights that were given."""
    from megatron_chameleon.methods.common.model_free import write_model_free

    write_model_free(METHOD.name, options, lambda corpus, names: assign(options, corpus, names))


def assign(options: ManualOptions, corpus: Corpus, names: list[str]) -> Assigned:
    """The given weights on ``names``.

    Raises:
        UserError: for weights that cannot be read or do not fit the corpus.
    """
    from megatron_chameleon.methods.common.model_free import Assigned
    from megatron_chameleon.methods.given.matching import matched
    from megatron_chameleon.methods.given.reading import read_given

    given = read_given(options.weights, options.published, options.output)
    weights, told = matched(given, options.renames, corpus.names, names)
    return Assigned(
        weights,
        heading=f"Given by {given.where}",
        parameters={**given.parameters, "rename": options.renames},
        inputs=given.inputs,
        closing=told,
        paper_flops=given.paper_flops,
        inherited=given.cost,
    )


METHOD = Method(
    name="manual",
    options=ManualOptions,
    compute=compute,
    summary="weights that are given: in a line, a file, or a paper's printed column",
    needs="the weights (--weights or --published)",
    cost="nothing here; of a mixture's file, what that has cost",
    good_for="a mixture from elsewhere, and the paper's own (--published slimpajama/doremi)",
    source="",
)
"""Somebody knew."""
