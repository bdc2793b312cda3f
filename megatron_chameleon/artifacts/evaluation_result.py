"""An evaluation on disk: per-domain held-out loss, with the protocol that gave it."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatron_chameleon.artifacts.clusters import Clusters, error_of_mean, ratio_standard_error
from megatron_chameleon.artifacts.corpus import Split
from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import Count, Positive, read_record, write_record
from megatron_chameleon.errors import UserError

KIND = "evaluation"
FORMAT_VERSION = 2  # 2: the protocol says how documents are cut; with clusters and bytes
MADE_BY = "tools/evaluate.py perplexity writes it"

Packing = Literal["packed", "documents"]
FirstToken = Literal["after-eod", "not-scored"]
_FIRST_TOKENS: dict[FirstToken, str] = {
    "after-eod": "its first token predicted from an end-of-document token",
    "not-scored": "its first token not scored",
}


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How held-out text is cut up. Results of different protocols are not comparable.

    Attributes:
        split: the split of the corpus.
        window_length: tokens that go into the model at once, at most.
        packing: "packed": documents follow one another, an end-of-document token after each, and
            windows cross their boundaries, as in training. "documents": every document by itself.
        end_of_document: whether the prediction of end-of-document tokens counts.
        max_tokens: predicted tokens per domain, at most, in whole windows spread evenly over the
            split; None is all.
        overlap: tokens that a window takes over from the one before as context, and does not score
            again.
        first_token: of the split, or of every document where these go in by themselves: predicted
            from an end-of-document token alone, or not scored.
    """

    split: Split
    window_length: Positive
    packing: Packing = "packed"
    end_of_document: bool = True
    max_tokens: Positive | None = None
    overlap: Count = 0
    first_token: FirstToken = "not-scored"

    def describe(self) -> str:
        """In words, to follow 'on'."""
        windows = f"windows of {self.window_length} tokens"
        if self.packing == "documents":
            parts = [f"every document by itself in {windows}", _FIRST_TOKENS[self.first_token]]
        else:
            parts = [f"in packed {windows}"]
        if self.overlap:
            parts.append(f"with {self.overlap} tokens of the window before as context")
        if self.max_tokens:
            parts.append(f"at most {self.max_tokens:,} tokens a domain")
        if not self.end_of_document:
            parts.append("end-of-document tokens left out")
        return ", ".join([f"the {self.split} split", *parts])

    def differences(self, other: Protocol) -> str:
        """The fields in which ``other`` differs, with both values: 'overlap 0 and 16, ...'."""
        both = zip(
            dataclasses.asdict(self).items(), dataclasses.asdict(other).values(), strict=True
        )
        return ", ".join(f"{name} {a} and {b}" for (name, a), b in both if a != b)


@dataclasses.dataclass(frozen=True)
class DomainLoss:
    """Mean negative log-likelihood, in nats per token, over ``tokens`` predicted tokens.

    Attributes:
        loss: of the model.
        tokens: that it predicted.
        unigram_loss: of the domain's own training token frequencies (add-one smoothed) on the same
            tokens: what one gets without looking at any context.
        text_bytes: UTF-8 bytes of text that these tokens stand for; None where nobody knows.
        clusters: sums by which the standard errors are known; None where nobody kept them.
    """

    loss: float
    tokens: Positive
    unigram_loss: float
    text_bytes: Count | None = None
    clusters: Clusters | None = None

    @property
    def perplexity(self) -> float:
        """exp(loss): the model is as unsure as among so many equally likely tokens."""
        return _exp(self.loss)

    @property
    def unigram_perplexity(self) -> float:
        """Perplexity of the unigram model on the same tokens."""
        return _exp(self.unigram_loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of loss by byte of text, which does not depend on the tokenizer."""
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
class EvaluationResult:
    """Held-out perplexity per domain of one checkpoint.

    ``left_out`` are the domains of the corpus that have nothing to predict in the split.
    """

    checkpoint: str
    checkpoint_hash: str
    corpus_hash: str
    step: int
    protocol: Protocol
    domains: Annotated[dict[str, DomainLoss], Field(min_length=1)]
    provenance: Provenance
    cost: Cost
    left_out: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> EvaluationResult:
        """Read ``path``. Raises UserError naming the file and the field."""
        return read_record(path, cls, kind=KIND, version=FORMAT_VERSION, made_by=MADE_BY)

    def save(self, path: Path) -> None:
        """Write the result to ``path``."""
        write_record(path, self, kind=KIND, version=FORMAT_VERSION)

    @property
    def mean_perplexity(self) -> float:
        """The average of the domains' perplexities, as in the paper's tables."""
        return math.fsum(d.perplexity for d in self.domains.values()) / len(self.domains)

    @property
    def mean_perplexity_error(self) -> float | None:
        """Its standard error over held-out text, the domains' errors being independent."""
        return error_of_mean(d.perplexity_error for d in self.domains.values())


def require_comparable(results: dict[str, EvaluationResult]) -> None:
    """Refuse to put results of different protocols or corpora side by side.

    Raises:
        UserError: naming the two that differ.
    """
    (first_name, first), *others = results.items()
    for name, result in others:
        if result.corpus_hash != first.corpus_hash:
            raise UserError(
                f"'{name}' and '{first_name}' were evaluated on different corpora; "
                "evaluate both on one"
            )
        if result.protocol != first.protocol:
            raise UserError(
                f"'{name}' and '{first_name}' were evaluated by different protocols "
                f"({result.protocol.differences(first.protocol)}); evaluate both by one"
            )


def _exp(loss: float) -> float:
    """exp(loss), infinite where it is more than a float holds (a loss above 709)."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf
