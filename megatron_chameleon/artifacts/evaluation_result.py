"""Held-out loss per domain, and its evaluation protocol.

Tokens of one document are correlated, and so are windows of one document; documents are assumed to
be independent. A mean loss is then a ratio of two sums over documents, with the standard error of a
ratio (Cochran, Sampling Techniques, 3rd edition, 1977, equation 6.13 without the finite-population
correction). Let S_c be the sum of the losses in cluster c of C clusters, n_c the size of cluster c,
and m = sum(S_c) / sum(n_c) the mean loss. Then

    SE(m)^2 = C / (C - 1) * sum((S_c - m n_c)^2) / sum(n_c)^2
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from megatron_chameleon.artifacts.corpus import Split, table_label
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import Count, FileRecord, Positive, differences
from megatron_chameleon.artifacts.target import TargetShares
from megatron_chameleon.errors import UserError

Packing = Literal["packed", "documents"]
FirstToken = Literal["after-eod", "not-scored"]
_FIRST_TOKENS: dict[FirstToken, str] = {
    "after-eod": "its first token predicted from an end-of-document token",
    "not-scored": "its first token not scored",
}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How held-out text is split into windows. Results of different protocols are not comparable.

    Attributes:
        split: the evaluated split of the corpus.
        window_length: maximum tokens per window.
        packing: "packed": documents are concatenated, an end-of-document token after each, and
            windows cross their boundaries, as in training. "documents": each document is scored
            separately.
        end_of_document: whether predictions of end-of-document tokens are scored.
        max_tokens: maximum predicted tokens per domain, in whole windows spread evenly over the
            split; None means all.
        overlap: tokens of the previous window that a window repeats as context, without scoring
            them again.
        first_token: how the first token of the split (of each document, for packing "documents")
            is scored: predicted from an end-of-document token, or not at all.
    """

    split: Split
    window_length: Positive
    packing: Packing = "packed"
    end_of_document: bool = True
    max_tokens: Positive | None = None
    overlap: Count = 0
    first_token: FirstToken = "not-scored"

    def describe(self) -> str:
        """Describe the protocol, as a phrase that follows the word "on" in messages."""
        windows = f"windows of {self.window_length} tokens"
        if self.packing == "documents":
            parts = [f"each document separately in {windows}", _FIRST_TOKENS[self.first_token]]
        else:
            parts = [f"in packed {windows}"]
        if self.overlap:
            parts.append(f"with {self.overlap} tokens of the previous window as context")
        if self.max_tokens:
            parts.append(f"at most {self.max_tokens:,} tokens per domain")
        if not self.end_of_document:
            parts.append("end-of-document tokens not scored")
        return ", ".join([f"the {self.split} split", *parts])


# Maximum number of clusters of a domain. This many clusters suffice to estimate a standard error to
# within 4%, whereas a domain may have millions of documents.
MAX_CLUSTERS = 256


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Sums over the clusters of a domain, in the order of the text.

    A cluster is one document, or a group of consecutive documents if there are more than
    ``MAX_CLUSTERS``. All results of one protocol on one corpus have the same clusters.

    Attributes:
        losses: [c] negative log-likelihoods, in nats.
        tokens: [c] predicted tokens, each at least 1.
        text_bytes: [c] bytes of the text of these tokens; None if unknown.
    """

    losses: list[float]
    tokens: list[Positive]
    text_bytes: list[Count] | None = None

    def __post_init__(self) -> None:
        if {len(self.tokens), len(self.text_bytes or self.tokens)} != {len(self.losses)}:
            raise ValueError("losses, tokens and text_bytes have different lengths")


def ratio_standard_error(sums: Sequence[float], sizes: Sequence[float]) -> float | None:
    """Standard error of sum(sums) / sum(sizes), both [c]; None for fewer than two clusters."""
    numerators, denominators = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    count, total = len(numerators), float(denominators.sum())
    if count < 2 or total == 0:
        return None
    residuals = numerators - numerators.sum() / total * denominators
    return math.sqrt(count / (count - 1) * float(residuals @ residuals)) / total


def error_of_mean(errors: Iterable[float | None]) -> float | None:
    """Standard error of a mean of independent values.

    Args:
        errors: standard error of each value; if any of these is None, the result is None.
    """
    known = list(errors)
    squares = [error**2 for error in known if error is not None]
    if not known or len(squares) < len(known):
        return None
    return math.sqrt(math.fsum(squares)) / len(known)


def error_of_sum(weights: Mapping[str, float], errors: Mapping[str, float | None]) -> float | None:
    """Standard error of a weighted sum of independent values; None if one of them is None."""
    products = [
        None if (error := errors[name]) is None else weight * error
        for name, weight in weights.items()
    ]
    error = error_of_mean(products)
    return None if error is None else error * len(products)


@dataclasses.dataclass(frozen=True)
class DomainLoss:
    """Mean negative log-likelihood, in nats per token, over ``tokens`` predicted tokens.

    Attributes:
        loss: loss of the model.
        tokens: predicted tokens.
        unigram_loss: baseline without context: loss of the domain's training token frequencies
            (add-one smoothed) on the same tokens. Held-out domains have no training tokens, so
            their baseline is the uniform distribution.
        text_bytes: UTF-8 bytes of the predicted text; None if unknown.
        clusters: sums per cluster for the standard errors; None if not recorded.
    """

    loss: float
    tokens: Positive
    unigram_loss: float
    text_bytes: Count | None = None
    clusters: Clusters | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return _exp(self.loss)

    @property
    def unigram_perplexity(self) -> float:
        """Perplexity of the unigram model on the same tokens."""
        return _exp(self.unigram_loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of loss per byte of text, independent of the tokenizer."""
        if not self.text_bytes:
            return None
        return self.loss * self.tokens / (math.log(2) * self.text_bytes)

    @property
    def loss_error(self) -> float | None:
        """Standard error of ``loss``."""
        c = self.clusters
        return None if c is None else ratio_standard_error(c.losses, c.tokens)

    @property
    def perplexity_error(self) -> float | None:
        """Standard error of ``perplexity``, to first order in the standard error of the loss."""
        error = self.loss_error
        return None if error is None else self.perplexity * error

    @property
    def bits_per_byte_error(self) -> float | None:
        """Standard error of ``bits_per_byte``."""
        c = self.clusters
        if c is None or c.text_bytes is None:
            return None
        error = ratio_standard_error(c.losses, c.text_bytes)
        return None if error is None else error / math.log(2)


@dataclasses.dataclass(frozen=True)
class TargetLoss(TargetShares):
    """A target, and the share-weighted loss of its domains and texts.

    Attributes:
        loss: nats per token.
        error: standard error of ``loss``; None if that of a domain is unknown.
    """

    loss: float
    error: float | None

    @classmethod
    def of(cls, target: TargetShares, domains: Mapping[str, DomainLoss]) -> TargetLoss:
        """Compute the loss from those of ``domains``, whose errors are independent.

        Raises:
            UserError: if a domain of the target has no loss.
        """
        if missing := target.shares.keys() - domains.keys():
            raise UserError(
                f"the target's domain '{min(missing)}' has nothing to predict in this split; pass "
                "a --target of other domains, or another --split"
            )
        loss = target.loss_of({name: domain.loss for name, domain in domains.items()})
        errors = {name: domains[name].loss_error for name in target.shares}
        return cls(target.value, target.shares, loss, error_of_sum(target.shares, errors))

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return _exp(self.loss)

    @property
    def perplexity_error(self) -> float | None:
        """Standard error of ``perplexity``, to first order in the standard error of the loss."""
        return None if self.error is None else self.perplexity * self.error


@dataclasses.dataclass(frozen=True)
class EvaluationResult(FileRecord):
    """Held-out perplexity per domain of one checkpoint.

    Attributes:
        domains: domain -> loss, in the order of the corpus; held-out domains and the texts of the
            target come last.
        left_out: domains to train on that have no tokens to predict in the split.
        held_out: those of ``domains`` that the corpus holds out from training, and the texts of the
            target. They are not in the averages.
        target: the target and its loss; None without a target.
    """

    KIND = "evaluation"
    FORMAT_VERSION = 2  # version 2 added packing to the protocol, clusters, and bytes
    MADE_BY = "megatron-chameleon evaluate perplexity writes it"

    checkpoint: str
    checkpoint_hash: str
    corpus_hash: str
    step: int
    protocol: Protocol
    domains: Annotated[dict[str, DomainLoss], Field(min_length=1)]
    provenance: Provenance
    cost: Cost
    left_out: list[str] = dataclasses.field(default_factory=list)
    held_out: list[str] = dataclasses.field(default_factory=list)
    target: TargetLoss | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless a domain that is not held out has a loss."""
        if not self.training_domains or not set(self.held_out) <= set(self.domains):
            raise ValueError("held_out must name some, but not all, of domains")

    @functools.cached_property
    def training_domains(self) -> Mapping[str, DomainLoss]:
        """Domain -> loss of the domains to train on, which the averages are taken over."""
        return {name: d for name, d in self.domains.items() if name not in self.held_out}

    def label(self, name: str) -> str:
        """Name of a domain in tables: held-out domains are marked."""
        return table_label(name, self.held_out)

    @property
    def mean_perplexity(self) -> float:
        """Mean perplexity of the domains to train on, as in the paper's tables."""
        domains = self.training_domains
        return math.fsum(d.perplexity for d in domains.values()) / len(domains)

    @property
    def mean_perplexity_error(self) -> float | None:
        """Standard error of the mean perplexity; the domains' errors are independent."""
        return error_of_mean(d.perplexity_error for d in self.training_domains.values())


def require_comparable(results: dict[str, EvaluationResult]) -> None:
    """Check that results have the same corpus and protocol.

    Raises:
        UserError: naming two results that differ.
    """
    (first_name, first), *others = results.items()
    for name, result in others:
        if result.corpus_hash != first.corpus_hash:
            raise UserError(
                f"'{name}' and '{first_name}' were evaluated on different corpora; "
                "evaluate both on the same one"
            )
        if found := differences(result.protocol, first.protocol):
            listed = ", ".join(f"{field} {a} and {b}" for field, (a, b) in found.items())
            raise UserError(
                f"'{name}' and '{first_name}' were evaluated with different protocols ({listed}); "
                "evaluate both with the same one"
            )


def _exp(loss: float) -> float:
    """exp(loss), infinite on overflow (a loss above 709)."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf
