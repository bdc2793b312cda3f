"""Chameleon: kernel ridge leverage scores of the domains' embeddings, inverted for pretraining.

Xie, Tonin, Cevher: Chameleon, ICML 2025.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.mixture import (
    ChosenDomainsOptions,
    ExtractionOptions,
    RecipeOptions,
)
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.ranges import InsideUnit


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChameleonOptions(ChosenDomainsOptions):
    """Embed every domain with a proxy model and turn leverage scores into sampling weights."""

    checkpoint: Path
    """Proxy model: a run folder (its latest checkpoint) or one checkpoint folder."""
    mode: Literal["pretrain", "finetune"] = "pretrain"
    """'pretrain' weights broad domains up, 'finetune' distinct ones."""
    store: Path | None = None
    """Embedding store to use and fill; 'embeddings' beside the output unless given."""
    keep: Path | None = None
    """A mixture whose domains keep their ratios to each other: only those that are not in it are
    placed, each with the share that it would have among all."""
    target: str | None = None
    """What the mixture is for: domains, a,b or with shares a=2,b=1, or a text (.txt, or .jsonl with
    documents under "text"), which is embedded as the domains are and counts those nearest to it.
    Pretraining feels it at a small ridge, fine-tuning at a large one."""
    target_strength: InsideUnit | None = None
    """From 0 (all domains alike) to 1 (--target alone), both excluded; 0.5 unless given."""
    explain: bool = False
    """Print what is behind the weights: how alike the domains are, their scores, and what each knob
    would do."""
    extraction: ExtractionOptions = dataclasses.field(default_factory=ExtractionOptions)
    weighting: RecipeOptions = dataclasses.field(default_factory=RecipeOptions)
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)


def compute(options: ChameleonOptions) -> None:
    """Embed the domains and weigh them."""
    from megatron_chameleon.methods.leverage.compute import compute_mixture

    compute_mixture(options)


METHOD = Method(
    name="chameleon",
    options=ChameleonOptions,
    compute=compute,
    summary="inverse leverage scores of the domains' embeddings",
    needs="a proxy trained by uniform weights (--checkpoint)",
    cost="the proxy, once; then forward passes over each new domain",
    good_for="domains that come and go; fine-tuning (--mode finetune)",
    source="Xie, Tonin, Cevher: Chameleon, ICML 2025",
)
