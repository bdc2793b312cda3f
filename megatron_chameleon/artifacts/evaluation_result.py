"""Held-out loss per domain, its evaluation protocol, and paired differences of two models."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Annotated, Literal

from pydantic import Field

from megatron_chameleon.artifacts.clusters import Clusters, error_of_mean, ratio_standard_error
from megatron_chameleon.artifacts.corpus import Split
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import Count, FileRecord, Positive
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
        split: of the corpus.
        window_length: maximum tokens per window.
        packing: "packed": documents are concatenated, an end-of-document token after each, and
            windows cross their boundaries, as in training. "documents": each is scored separately.
        end_of_document: whether predictions of end-of-document tokens are scored.
        max_tokens: maximum predicted tokens per domain, in whole windows spread evenly over the
            split; None is all.
        overlap: tokens of the previous window that a window repeats as context, without scoring
            them again.
        first_token: of the split, or of each document with "documents": predicted from an
            end-of-document token, or not scored.
    """

    split: Split
    window_length: Positive
    packing: Packing = "packed"
    end_of_document: bool = True
    max_tokens: Positive | None = None
    overlap: Count = 0
    first_token: FirstToken = "not-scored"

    def describe(self) -> str:
        """Description for users, to follow "on"."""
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

    def differences(self, other: Protocol) -> str:
        """Fields that differ, with both values: "overlap 0 and 16, ..."."""
        both = zip(
            dataclasses.asdict(self).items(), dataclasses.asdict(other).values(), strict=True
        )
        return ", ".join(f"{name} {a} and {b}" for (name, a), b in both if a != b)


@dataclasses.dataclass(frozen=True)
class DomainLoss:
    """Mean negative log-likelihood, in nats per token, over ``tokens`` predicted tokens.

    Attributes:
        loss: of the model.
        tokens: predicted tokens.
        unigram_loss: of the domain's training token frequencies (add-one smoothed) on the same
            tokens, a baseline without context.
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
        """Standard error of ``perplexity``, to first order in that of the loss."""
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
class EvaluationResult(FileRecord):
    """Held-out perplexity per domain of one checkpoint.

    ``left_out`` lists the domains of the corpus with nothing to predict in the split.
    """

    KIND = "evaluation"
    FORMAT_VERSION = 2  # 2: packing in the protocol; clusters and bytes
    MADE_BY = "tools/evaluate.py perplexity writes it"

    checkpoint: str
    checkpoint_hash: str
    corpus_hash: str
    step: int
    protocol: Protocol
    domains: Annotated[dict[str, DomainLoss], Field(min_length=1)]
    provenance: Provenance
    cost: Cost
    left_out: list[str] = dataclasses.field(default_factory=list)

    @property
    def mean_perplexity(self) -> float:
        """Mean of the domains' perplexities, as in the paper's tables."""
        return math.fsum(d.perplexity for d in self.domains.values()) / len(self.domains)

    @property
    def mean_perplexity_error(self) -> float | None:
        """Its standard error over held-out text; errors of domains are independent."""
        return error_of_mean(d.perplexity_error for d in self.domains.values())


def require_comparable(results: dict[str, EvaluationResult]) -> None:
    """Check that results have the same corpus and protocol.

    Raises:
        UserError: naming two that differ.
    """
    (first_name, first), *others = results.items()
    for name, result in others:
        if result.corpus_hash != first.corpus_hash:
            raise UserError(
                f"'{name}' and '{first_name}' were evaluated on different corpora; "
                "evaluate both on the same one"
            )
        if result.protocol != first.protocol:
            raise UserError(
                f"'{name}' and '{first_name}' were evaluated with different protocols "
                f"({result.protocol.differences(first.protocol)}); evaluate both with the same one"
            )


def _exp(loss: float) -> float:
    """exp(loss), infinite on overflow (a loss above 709)."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf


@dataclasses.dataclass(frozen=True)
class Difference:
    """Paired difference of two models' held-out figures, with its standard error, None if unknown.

    Both models predict the same tokens, so that the difficulty of the text cancels in the error.
    The results have the same protocol, corpus and domains (:func:`require_comparable`).
    """

    value: float
    error: float | None


def loss_difference(first: DomainLoss, second: DomainLoss) -> Difference:
    """Mean loss of ``first`` minus that of ``second``, in nats per token."""
    return Difference(first.loss - second.loss, _paired_error(first, second, 1.0, 1.0))


def mean_perplexity_difference(first: EvaluationResult, second: EvaluationResult) -> Difference:
    """Mean perplexity of ``first`` minus that of ``second``.

    To first order, the standard error of a perplexity p = exp(m) is p SE(m); that of p - q is the
    error of the ratio with the sums p S_c - q T_c, for the models' loss sums S_c, T_c of cluster c.
    """
    pairs = [(domain, second.domains[name]) for name, domain in first.domains.items()]
    errors = [_paired_error(a, b, a.perplexity, b.perplexity) for a, b in pairs]
    return Difference(first.mean_perplexity - second.mean_perplexity, error_of_mean(errors))


def _paired_error(
    first: DomainLoss, second: DomainLoss, first_scale: float, second_scale: float
) -> float | None:
    """Standard error of ``first_scale * first.loss - second_scale * second.loss``."""
    a, b = first.clusters, second.clusters
    scales = (first_scale, second_scale)
    if a is None or b is None or a.tokens != b.tokens or not all(map(math.isfinite, scales)):
        return None
    sums = [first_scale * x - second_scale * y for x, y in zip(a.losses, b.losses, strict=True)]
    return ratio_standard_error(sums, a.tokens)
