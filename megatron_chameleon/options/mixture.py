"""Options of tools/compute_mixture.py that more than one method or tool has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.ranges import (
    Count,
    InsideUnit,
    LargeCount,
    Positive,
    Seed,
    SeveralRepetitions,
)


@dataclasses.dataclass(frozen=True)
class ExtractionOptions:
    """Which windows of text are embedded, and how. Hashed with the embedding store."""

    layer: int | None = None
    """Hidden states after this many layers; the middle unless given."""
    final_norm: bool = False
    """Apply the proxy's final layer norm to the hidden states before they are averaged; the
    authors' code does not."""
    num_windows: Count = 4096
    """Windows drawn per domain (paper: 4k)."""
    window_length: Count | None = None
    """Tokens per window, at most; the proxy's sequence length unless given."""
    cross_documents: bool = False
    """Let windows run over the ends of documents, as in the authors' code."""
    extraction_seed: Seed = 0
    """Of the draw of windows."""
    embedding_batch_size: Count = 32
    """Windows per forward pass and rank; does not change the result."""
    embedding_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the proxy computes in. 'bfloat16' is faster on devices that compute in it, and rounds;
    means over tokens and windows are taken in float32 either way."""


@dataclasses.dataclass(frozen=True)
class RecipeOptions:
    """From domain embeddings to weights."""

    recipe: Literal["reference", "paper", "scaled"] = "reference"
    """'reference': the authors' code; 'paper': the text's formulas; 'scaled': many domains."""
    ridge: Positive | None = None
    """Regularisation of the leverage scores, in place of the recipe's."""
    temperature: Positive | None = None
    """Softmax temperature, in place of the recipe's."""
    center: bool | None = None
    """Subtract the mean of the domain embeddings first, in place of the recipe's choice."""
    normalize: bool | None = None
    """Divide the scores by their sum, in place of the recipe's choice."""
    bootstrap_resamples: SeveralRepetitions = 1000
    """Resamples of the windows behind the intervals."""
    confidence: InsideUnit = 0.95
    """Coverage of the intervals."""
    precision: Positive = 0.01
    """Half width of an interval that would be enough: it is said how many windows that takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What every method is told: whose mixture it finds, and for how much training."""

    corpus: Path
    """Folder written by tools/preprocess_data.py."""
    output: Path
    """The mixture.json to write."""
    token_budget: LargeCount | None = None
    """Tokens of the training to come: the implied epochs per domain are then told and stored."""
    max_epochs: Positive | None = None
    """Go through no domain's training tokens more often within --token-budget. The mixture is then
    the nearest one that does not (smallest Kullback-Leibler divergence)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenDomainsOptions(MethodOptions):
    """Of a method that can weigh some of a corpus's domains alone."""

    domains: str | None = None
    """Weigh only these domains, a,b,c; the others get no weight. All of them unless given."""
