"""An evaluation on disk: per-domain held-out loss, with the protocol that gave it."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

from megatron_chameleon.artifacts.corpus import Split
from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import read_record, write_record
from megatron_chameleon.errors import UserError

FORMAT_VERSION = 1
MADE_BY = "tools/evaluate.py perplexity writes it"


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How held-out text is cut up. Results of different protocols are not comparable.

    Attributes:
        split: the split of the corpus.
        window_length: tokens predicted from one window.
        packing: "packed": documents follow one another, an end-of-document token after each, and
            windows cross their boundaries, as in training.
        end_of_document: whether the prediction of end-of-document tokens counts.
        max_tokens: predicted tokens per domain, at most, in whole windows spread evenly over the
            split; None is all.
    """

    split: Split
    window_length: int
    packing: str = "packed"
    end_of_document: bool = True
    max_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class DomainLoss:
    """Mean negative log-likelihood, in nats per token, over ``tokens`` predicted tokens.

    ``unigram_loss`` is that of the domain's own training token frequencies (add-one smoothed) on
    the same tokens: what one gets without looking at any context.
    """

    loss: float
    tokens: int
    unigram_loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss): the model is as unsure as among so many equally likely tokens."""
        return _exp(self.loss)

    @property
    def unigram_perplexity(self) -> float:
        """Perplexity of the unigram model on the same tokens."""
        return _exp(self.unigram_loss)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Held-out perplexity per domain of one checkpoint."""

    checkpoint: str
    checkpoint_hash: str
    corpus_hash: str
    step: int
    protocol: Protocol
    domains: dict[str, DomainLoss]
    provenance: Provenance
    cost: Cost

    @classmethod
    def load(cls, path: Path) -> EvaluationResult:
        """Read ``path``. Raises UserError naming the file and the field."""
        return read_record(path, cls, kind="evaluation", version=FORMAT_VERSION, made_by=MADE_BY)

    def save(self, path: Path) -> None:
        """Write the result to ``path``."""
        write_record(path, self, kind="evaluation", version=FORMAT_VERSION)

    @property
    def mean_perplexity(self) -> float:
        """The average of the domains' perplexities, as in the paper's tables."""
        return math.fsum(d.perplexity for d in self.domains.values()) / len(self.domains)


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
                f"({result.protocol} and {first.protocol}); evaluate both by one"
            )


def _exp(loss: float) -> float:
    """exp(loss), infinite where it is more than a float holds (a loss above 709)."""
    return math.exp(loss) if loss < math.log(sys.float_info.max) else math.inf
