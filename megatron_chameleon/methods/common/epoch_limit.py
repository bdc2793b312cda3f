"""The weights of a mixture, none of which repeats its domain more often than is allowed."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, MixtureWarning, implied_epochs
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.mixture import CappedWeights, capped_weights
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.options.mixture import MethodOptions


@dataclasses.dataclass(frozen=True)
class EpochLimit:
    """At most ``max_epochs`` passes over a domain's training tokens in ``token_budget`` tokens.

    Without ``max_epochs`` there is no limit; without ``token_budget`` epochs are not told either.
    """

    tokens: Mapping[str, int]
    """Domain -> its training tokens."""
    token_budget: int | None
    max_epochs: float | None

    def check(self) -> None:
        """Raises UserError for numbers that mean nothing or leave the budget unfilled."""
        if self.token_budget is not None and self.token_budget < 1:
            raise UserError(f"--token-budget {self.token_budget}: give a whole number from 1 on")
        if self.max_epochs is None:
            return
        if not 0 < self.max_epochs < math.inf:
            raise UserError(f"--max-epochs {self.max_epochs}: give a finite number above 0")
        if self.token_budget is None:
            raise UserError("--max-epochs limits the epochs of a --token-budget: give that too")
        available = self.max_epochs * sum(self.tokens.values())
        if available < self.token_budget:
            raise UserError(
                f"--max-epochs {self.max_epochs:g}: so many epochs of all domains that get a "
                f"weight are {available:,.0f} tokens, fewer than the --token-budget of "
                f"{self.token_budget:,}; allow more, or train on fewer tokens"
            )

    def apply(self, weights: Array) -> CappedWeights:
        """The nearest weights within the limit.

        Args:
            weights: [num_domains] float64, in the order of ``tokens``.

        Raises:
            UserError: if the domains that have a weight cannot fill the budget.
        """
        if self.max_epochs is None or self.token_budget is None:
            return CappedWeights(weights, ())
        tokens = np.array(list(self.tokens.values()), np.float64)
        caps = tokens * (self.max_epochs / self.token_budget)
        try:
            return capped_weights(weights, caps)
        except ValueError as error:
            raise UserError(f"--max-epochs {self.max_epochs:g}: {error}") from error

    def fields(self, wanted: Array) -> dict[str, Any]:
        """The fields of a Mixture: its weights, their epochs, and what the limit did to them.

        Where the limit holds a domain, a warning says so.
        """
        names = list(self.tokens)
        limited = self.apply(wanted)
        weights = dict(zip(names, limited.weights.tolist(), strict=True))
        if self.token_budget is None:
            return {"weights": weights}
        epochs = implied_epochs(self.tokens, weights, self.token_budget)
        budget = {"weights": weights, "token_budget": self.token_budget, "epochs": epochs}
        if self.max_epochs is None:
            return budget
        unconstrained = dict(zip(names, wanted.tolist(), strict=True))
        capped = [names[position] for position in limited.binding]
        self._warn_of_capped(capped, unconstrained)
        return {
            **budget,
            "max_epochs": self.max_epochs,
            "unconstrained": unconstrained,
            "capped": capped,
        }

    def _warn_of_capped(self, capped: Sequence[str], wanted: Mapping[str, float]) -> None:
        if not capped:
            return
        assert self.token_budget is not None
        epochs = implied_epochs(self.tokens, wanted, self.token_budget)
        most = max(capped, key=lambda name: epochs[name])
        warnings.warn(
            f"--max-epochs {self.max_epochs:g} holds {listed(capped)} down, and the other domains "
            f"get more: without it '{most}' would be gone through {epochs[most]:.2f} times in "
            f"{self.token_budget:,} tokens",
            MixtureWarning,
            stacklevel=3,
        )


def limit_of(options: MethodOptions, corpus: Corpus, names: Sequence[str]) -> EpochLimit:
    """The limit of epochs that was asked for, over the domains ``names`` of ``corpus``."""
    available = corpus.train_tokens
    tokens = {name: available[name] for name in names}
    return EpochLimit(tokens, options.token_budget, options.max_epochs)
