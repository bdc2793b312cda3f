"""Chameleon: domain weights from kernel ridge leverage scores of domain embeddings.

Xie, Tonin, Cevher: Chameleon, ICML 2025.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.online import Default, OnlineMethod
from megatron_chameleon.methods.options import OutputOptions
from megatron_chameleon.methods.sweep import Axis, SweptMethod, Values
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.ranges import (
    CheckedOptions,
    Count,
    InsideUnit,
    Positive,
    Seed,
    SeveralRepetitions,
)

if TYPE_CHECKING:
    from megatron_chameleon.mixture import Recipe


@dataclasses.dataclass(frozen=True)
class EmbeddingOptions(CheckedOptions):
    """Embedding of text windows with a proxy."""

    layer: int | None = None
    """Use hidden states after this many layers; default: (L + 1) // 2 of L layers."""
    window_length: Count | None = None
    """Tokens per window, by default 512, or the proxy's sequence length if it is shorter. Windows
    within documents have at most this many tokens, by default the proxy's sequence length, but at
    most 4096 for rotary positions and for Hugging Face models. Rotary positions allow more
    tokens."""
    embedding_batch_size: Count = 32
    """Windows per forward pass and rank; the weights do not depend on this number."""


@dataclasses.dataclass(frozen=True)
class ExtractionOptions(EmbeddingOptions):
    """Sampling and embedding of text windows. One embedding store has one set of these options."""

    final_norm: bool = False
    """Apply the proxy's final norm to the hidden states before averaging them. The authors'
    code does not apply it."""
    num_windows: Count = 4096
    """Windows sampled per domain (paper: 4k)."""
    within_documents: bool = False
    """Sample windows within documents, which are shorter in short documents. By default, all
    windows have --window-length tokens and cross document boundaries, as in the authors' code."""
    extraction_seed: Seed = 0
    """Random seed of the sampled windows."""
    embedding_dtype: Literal["float32", "bfloat16"] = "float32"
    """The proxy's compute precision. 'bfloat16' is faster on devices that support it, but less
    exact. Means over tokens and windows are always computed in float32."""


@dataclasses.dataclass(frozen=True)
class WeightingOptions(CheckedOptions):
    """Computation of weights from domain embeddings."""

    recipe: Literal["reference", "paper", "scaled"] = "reference"
    """Default settings: 'reference' follows the authors' code, 'paper' follows the paper's
    equations, and 'scaled' suits many domains."""
    ridge: Positive | None = None
    """Ridge regularization of the leverage scores; default: the recipe's."""
    temperature: Positive | None = None
    """Softmax temperature; default: the recipe's."""
    center: bool | None = None
    """Subtract the mean of the domain embeddings; default: the recipe's choice."""
    normalize: bool | None = None
    """Divide the scores by their sum; default: the recipe's choice."""
    shrink: bool = False
    """Shrink the weights towards Uniform if the domains' embeddings differ in few directions only,
    as with an undertrained proxy. This rule is not in the paper; without it, a warning reports by
    how much it would shrink the weights."""
    bootstrap_resamples: SeveralRepetitions = 1000
    """Number of bootstrap resamples of the windows, for the confidence intervals."""
    confidence: InsideUnit = 0.95
    """Confidence level of the intervals."""
    precision: Positive = 0.01
    """Desired half width of the intervals. The command prints how many windows this half width
    requires."""

    def resolve(self) -> Recipe:
        """Return the named recipe, with the user-supplied hyperparameters.

        Raises:
            UserError: for mutually exclusive hyperparameters.
        """
        from megatron_chameleon.mixture.chameleon import resolve_recipe

        try:
            return resolve_recipe(
                self.recipe,
                center=self.center,
                normalize=self.normalize,
                ridge=self.ridge,
                # A user-supplied ridge or temperature is an absolute value, even if the recipe's is
                # relative.
                ridge_relative=None if self.ridge is None else False,
                temperature_pretrain=self.temperature,
                temperature_finetune=self.temperature,
                temperature_relative=None if self.temperature is None else False,
            )
        except ValueError as error:
            raise UserError(f"--recipe {self.recipe}: {error}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChameleonOptions(OutputOptions):
    """Embed every domain with a proxy model and turn leverage scores into domain weights.

    The domains are those of a corpus (--corpus), or raw text (--input NAME=PATH ...), of which only
    a sample is read and tokenized.
    """

    corpus: Path | None = None
    """Folder written by preprocess_data or import_corpus. Pass either --corpus or
    --input; --text-key and the other source and tokenizer options apply only to --input."""
    source: SourceOptions = dataclasses.field(default_factory=lambda: SourceOptions(()))
    tokenizer: TokenizerChoice = dataclasses.field(default_factory=TokenizerChoice)
    domains: str | None = None
    """Domains to weigh, such as a,b,c; all other domains get weight 0. Default: all domains."""
    checkpoint: Path
    """Proxy model: a run folder (its latest checkpoint), a checkpoint folder (also of Megatron-LM),
    a Hugging Face folder, or a model OWNER/NAME on the Hugging Face hub."""
    mode: Literal["pretrain", "finetune"] = "pretrain"
    """'pretrain' upweights broad domains; 'finetune' upweights distinct domains."""
    store: Path | None = None
    """Embedding store to reuse and extend. Default: the folder 'embeddings' next to the output, or
    'embeddings-HASH' if that folder has embeddings of another proxy."""
    keep: Path | None = None
    """A mixture.json whose domains keep the ratios of their weights. Each new domain gets the
    weight that it would have in a mixture of all domains."""
    target: str | None = None
    """What the mixture is for: domains such as a,b, or a=2,b=1 with their shares, held-out domains
    of the corpus, and texts such as NAME=PATH or NAME=PATH=2, in the format of --input. Held-out
    domains and texts are embedded like the domains, and the domains nearest to them gain weight.
    The target changes the weights most with a small ridge in pretraining, and a large one in
    fine-tuning."""
    target_strength: InsideUnit | None = None
    """Strength of --target, between 0 and 1: near 0, the target has no effect; near 1, the target
    alone determines the prior of the domains. Default: 0.5."""
    explain: bool = False
    """Print the scores and nearest domains of each domain, and the effect of each
    hyperparameter."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a Hugging Face model. Code that you have not read can do
    anything that you can."""
    extraction: ExtractionOptions = dataclasses.field(default_factory=ExtractionOptions)
    weighting: WeightingOptions = dataclasses.field(default_factory=WeightingOptions)
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        if (self.corpus is None) == (not self.source.input):
            raise UserError("pass either --corpus, or --input NAME=PATH for each domain")
        if self.corpus is not None:
            only_text = "applies only to --input"
            if self.target is None:
                self.source.reject_changed(
                    ["text_key", "max_malformed_share", "max_document_bytes"], only_text
                )
            self.reject_changed(["tokenizer"], only_text)
        else:
            reason = "requires token counts, which --input does not have; preprocess the text"
            self.reject_changed(["token_budget"], reason)
        if self.target is None:
            self.reject_changed(["target_strength"], "has no effect without --target")


def run(options: ChameleonOptions) -> None:
    """Embed the domains and write the mixture."""
    from megatron_chameleon.methods.chameleon.compute import compute_mixture

    compute_mixture(options)


@dataclasses.dataclass(frozen=True)
class OnlineChameleonOptions(CheckedOptions):
    """Flags of ``--online chameleon``."""

    online_layer: int | None = None
    """Average the hidden states after this many layers, without the final norm (chameleon). By
    default, after (layers + 1) // 2."""
    online_recipe: Literal["reference", "paper", "scaled"] | None = None
    """How weights are computed from embeddings (chameleon, default reference); see --recipe of
    compute_mixture."""
    online_shrink: bool = False
    """Shrink weights towards Uniform if the domains' embeddings differ in few directions only, as
    early in training (chameleon; see --shrink of compute_mixture)."""


ONLINE = OnlineMethod(
    name="chameleon",
    follows="the model's own embeddings of windows of each domain",
    hook="megatron_chameleon.methods.chameleon.hook:OnlineChameleon",
    options=OnlineChameleonOptions,
    defaults={
        "online_interval": Default(500),
        "online_smoothing": Default(0.5, "of mixtures"),
        "online_windows": Default(
            256,
            "of training text, which every update embeds, each of --seq-length tokens but at most "
            "512",
        ),
        "online_layer": Default(None),
        "online_recipe": Default("reference"),
        "online_shrink": Default(False),
    },
)


def swept_values(options: Any) -> Values:
    """Return the windows and the ridge at the centre of a sweep; a relative ridge is left out."""
    recipe = options.weighting.resolve()
    values: Values = {"num_windows": options.extraction.num_windows}
    return values if recipe.ridge_relative else {**values, "ridge": recipe.ridge}


SWEEP = SweptMethod(
    name="chameleon",
    point="megatron_chameleon.methods.chameleon.sweep:chameleon_point",
    groups={"extraction": ExtractionOptions, "weighting": WeightingOptions},
    axes={
        "ridge": Axis(
            tuple[Positive, ...],
            "Values of --ridge (paper: 1 10 100). These values need no additional training or "
            "embedding.",
            "ridge {:g}",
        ),
        "num_windows": Axis(
            tuple[Count, ...], "Values of --num-windows (paper: 2k 4k 8k).", "{:,} windows"
        ),
    },
    centre=swept_values,
    has_mode=True,
)
METHOD = Method(
    name="chameleon",
    options=ChameleonOptions,
    compute=run,
    summary="inverse leverage scores of the domain embeddings",
    needs="a proxy (--checkpoint): a run on a uniform mixture, or any Hugging Face model",
    cost="training of one proxy, if there is none; then forward passes over each new domain",
    good_for="changing sets of domains; fine-tuning (--mode finetune)",
    source="Xie, Tonin, Cevher: Chameleon, ICML 2025",
)
