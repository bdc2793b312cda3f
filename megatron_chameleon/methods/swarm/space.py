"""The domains over which a swarm samples mixtures and a fit searches: ``--freeze``.

A frozen mixture is one domain, whose text is sampled with fixed internal ratios. If domains are
added to a corpus, a small swarm over the frozen mixture and the new domains suffices, and the
ratios of the old domains are reused: mixture reuse (Chen et al. 2026, "Olmix: A Framework for Data
Mixing Throughout LM Development", arXiv 2602.12237).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Mixture
from megatron_chameleon.errors import UserError, format_names, quoted
from megatron_chameleon.mixture.checks import Array

LABEL = "frozen"
# Tables of runs may have rounded shares: this share of the frozen mixture's tokens, or of all
# tokens, may be sampled in other ratios.
RATIO_TOLERANCE = 0.05
SHARE_TOLERANCE = 0.005


@dataclasses.dataclass(frozen=True, eq=False)
class SearchSpace:
    """The r domains of a search, and what they are of the k domains of a corpus.

    Attributes:
        names: the frozen mixture (if any), then the other domains in the corpus's order.
        ratios: [r, k] share of each domain of the corpus in each domain of the search.
        old: [r, k] bool, the domains of the corpus that belong to each domain of the search.
        tokens: [k] training tokens of the corpus's domains.
        frozen: the frozen mixture; None without one.
    """

    names: list[str]
    ratios: Array
    old: np.ndarray
    tokens: Array
    frozen: Mixture | None = None

    @classmethod
    def of(cls, corpus: Corpus, freeze: Path | None) -> SearchSpace:
        """Return the domains of ``corpus``, of which those of the mixture ``freeze`` are one.

        Raises:
            UserError: if there is no training text, or if the mixture cannot be read, has another
                corpus's domains or all of them, or its domains, or the new ones, have no training
                text.
        """
        every = list(corpus.names)
        counts = np.array([corpus.train_tokens[name] for name in every], np.float64)
        if not counts.any():
            raise UserError(f"{corpus.root} has no training tokens; preprocess text into it")
        if freeze is None:
            return cls(every, np.eye(len(every)), np.eye(len(every), dtype=bool), counts)
        where = f"--freeze {freeze}"
        mixture, tokens = Mixture.load(freeze), corpus.train_tokens
        if unknown := [name for name in mixture.weights if name not in every]:
            raise UserError(
                f"{where}: {corpus.root} has no domain {quoted(unknown)} to train on; its domains "
                f"are {format_names(every)}"
            )
        if empty := [
            name for name, weight in mixture.weights.items() if weight and not tokens[name]
        ]:
            raise UserError(f"{where}: '{empty[0]}' of {corpus.root} has no training tokens")
        new = [name for name in every if name not in mixture.weights]
        if not any(tokens[name] for name in new):
            raise UserError(
                f"{where}: it has all domains of {corpus.root} that have training tokens; add a "
                "new domain to the corpus, or omit --freeze"
            )
        label = LABEL
        while label in corpus.all_domains:
            label += "_"
        weights = np.array([mixture.weights.get(name, 0.0) for name in every])
        rows = (
            [name in mixture.weights for name in every],
            *(np.array(every) == name for name in new),
        )
        old = np.array(rows, bool)
        ratios = np.concatenate([[weights / weights.sum()], old[1:].astype(np.float64)])
        return cls([label, *new], ratios, old, counts, mixture)

    @property
    def frozen_hash(self) -> str | None:
        """Hash of the frozen mixture; None without one."""
        return self.frozen.hash if self.frozen else None

    @property
    def token_shares(self) -> Array:
        """Share [r] of each domain in the training tokens."""
        return self.project(self.tokens / self.tokens.sum())

    def expand(self, weights: Array) -> Array:
        """Return the weights [..., k] of the corpus's domains, for weights [..., r]."""
        return weights @ self.ratios

    def project(self, weights: Array) -> Array:
        """Return the weights [..., r] with the frozen ratios that are nearest to ``weights``.

        The weight of the frozen mixture is that of its domains with a ratio above 0; the result
        sums to 1.

        Args:
            weights: [..., k] of the corpus's domains, summing to 1.

        Raises:
            UserError: if they have no weight but for domains whose frozen ratio is 0.
        """
        if self.frozen is None:
            return weights
        found: Array = weights @ (self.ratios > 0).T
        total = found.sum(axis=-1, keepdims=True)
        if not total.all():
            raise UserError(
                "--prior: all of its weight is on domains with weight 0 in the mixture of "
                "--freeze; pass another --prior"
            )
        return found / total

    def of_runs(self, keys: list[str], mixtures: Array) -> Array:
        """Return the weights [n, r] of the mixtures [n, k] of the runs ``keys``.

        Raises:
            UserError: if a run does not have the frozen ratios.
        """
        found = mixtures @ self.old.T
        # Half of the sum is the share of tokens in other domains than with the frozen ratios.
        off = np.abs(self.expand(found) - mixtures).sum(axis=1) / 2
        excess = off - np.maximum(RATIO_TOLERANCE * found[:, 0], SHARE_TOLERANCE)
        if self.frozen and excess.size and excess.max() > 0:
            raise UserError(
                f"run {keys[int(excess.argmax())]} does not sample the domains of --freeze in the "
                "ratios of this mixture; pass the mixture that swarm generate --freeze had, or "
                "omit --freeze"
            )
        return found

    def caps(self, caps: Array | None) -> Array | None:
        """Return the largest weights [r] for which no domain exceeds its cap [k], or None."""
        if caps is None:
            return None
        most = np.full(self.ratios.shape, np.inf)
        np.divide(np.broadcast_to(caps, most.shape), self.ratios, out=most, where=self.ratios > 0)
        return most.min(axis=1)
