"""The held-out text of a corpus by one protocol, with what is known of it without a model."""

from __future__ import annotations

import warnings

from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import HeldOutText, held_out_text
from megatron_chameleon.evaluation.plan import EvaluationPlan
from megatron_chameleon.evaluation.scored_text import ClusterMap, ScoredText, scored_text
from megatron_chameleon.evaluation.token_sizes import TokenSizes, token_sizes
from megatron_chameleon.parallel.layout import Layout, from_main


class HeldOutCorpus:
    """Opened once for all checkpoints that are evaluated on it. Every rank makes one.

    A domain without anything to predict is left out, with a warning; averages are over the others.

    Args:
        plan: of one of the evaluations; the others have its corpus and protocol.
        layout: of the ranks.

    Attributes:
        texts: domain -> its windows, in the corpus's order.
        clusters: domain -> the clusters of its tokens.
        left_out: domains of the corpus without anything to predict.

    Raises:
        UserError: if no domain has anything to predict.
    """

    def __init__(self, plan: EvaluationPlan, layout: Layout) -> None:
        self.texts: dict[str, HeldOutText] = {}
        self.clusters: dict[str, ClusterMap] = {}
        self._plan = plan
        self._scored: dict[str, ScoredText] = {}
        self._sizes: TokenSizes | None = None
        for name in plan.corpus.names:
            tokens = open_tokens(plan.corpus, name, plan.protocol.split)
            text = held_out_text(tokens, plan.protocol, plan.corpus.tokenizer.eod_id)
            if text is not None:
                self.texts[name] = text
                self.clusters[name] = ClusterMap.of(tokens, text)
        self.left_out = [name for name in plan.corpus.names if name not in self.texts]
        self._tell(layout)

    @property
    def unknown_bytes(self) -> str:
        """On the first rank: why bytes of tokens are not known; nothing if they are."""
        return self._sizes.problem if self._sizes is not None else ""

    def scored(self, name: str) -> ScoredText:
        """What is scored of a domain, gone through when first asked for. Every rank calls this."""
        if name not in self._scored:
            self._scored[name] = from_main(lambda: self._go_through(name))
        return self._scored[name]

    def _go_through(self, name: str) -> ScoredText:
        corpus, split = self._plan.corpus, self._plan.protocol.split
        if self._sizes is None:
            self._sizes = token_sizes(corpus, self._plan.checkpoint)
        text, clusters = self.texts[name], self.clusters[name]
        return scored_text(corpus, name, split, text, clusters, self._sizes.sizes)

    def _tell(self, layout: Layout) -> None:
        corpus, split = self._plan.corpus, self._plan.protocol.split
        way_out = "preprocess again with a larger share for it (--split)"
        if not self.texts:
            raise UserError(
                f"{corpus.root}: no domain has anything to predict in its {split} split; {way_out}"
            )
        if self.left_out and layout.is_main:
            warnings.warn(
                f"nothing to predict in the {split} split of {', '.join(self.left_out)}: left out "
                f"of the averages; {way_out} to have it in",
                stacklevel=3,
            )
