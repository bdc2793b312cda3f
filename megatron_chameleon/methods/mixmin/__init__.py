"""MixMin: weights for a target, from the likelihood of its text under models of the domains.

Thudi et al., arXiv 2502.10510.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.evaluation.options import TaskOptions
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.options import (
    PriorOptions,
    ProxyOptions,
    SeedNoiseOptions,
    WorkFolderOptions,
)
from megatron_chameleon.ranges import (
    CheckedOptions,
    Count,
    InsideUnit,
    LargeCount,
    Seed,
    SeveralRepetitions,
)

NGRAM = "ngram"


@dataclasses.dataclass(frozen=True)
class ExpertTokenizer(CheckedOptions):
    """Tokenizer of raw text."""

    tokenizer_model: Path | None = None
    """Tokenizer of --input and of the target: a tokenizer.json, a tiktoken file, a SentencePiece
    .model, or a folder that holds one of them. Default: the corpus's tokenizer, or the bytes of the
    text with --input."""
    tiktoken_pattern: str | None = None
    """The pattern that splits text into words, for a tiktoken file."""
    eod_token: str | None = None
    """The tokenizer's end-of-document token; default: <|endoftext|>."""


@dataclasses.dataclass(frozen=True)
class ExpertOptions(CheckedOptions):
    """Models of the domains, and the text that they are fitted to."""

    ngram_order: Count | None = None
    """Number of tokens in the longest n-grams; default: 3, or 6 if the tokens are bytes."""
    sample_tokens: LargeCount | None = None
    """Maximum tokens of each domain that its model is fitted to; default: 1,000,000, or 3,000,000
    bytes."""
    target_text_tokens: LargeCount | None = None
    """Maximum tokens of the target that are predicted; default: 131,072, or 524,288 bytes."""


@dataclasses.dataclass(frozen=True)
class EstimateOptions(PriorOptions):
    """Estimate of the weights, and its confidence."""

    min_weight: str | None = None
    """Smallest weight: one number for every domain, or NAME=WEIGHT,... for some (default: 0)."""
    max_weight: str | None = None
    """Largest weight: one number for every domain, or NAME=WEIGHT,... for some (default: 1)."""
    confidence: InsideUnit = 0.9
    """Confidence level of the intervals."""
    bootstrap_resamples: SeveralRepetitions = 200
    """Number of resamples of the target's documents, for the intervals of the weights."""
    estimate_seed: Seed = 0
    """Seed of the samples of text, the folds and the resamples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTaskOptions(TaskOptions):
    """Tasks that a target may name."""

    tasks: tuple[str, ...] = ()
    """lm-eval tasks that --target may name; their text is that of the gold answers after the
    questions. Without --target, the target is these tasks with equal shares."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DomainsAndTarget(CheckedOptions):
    """The domains to weigh, the target, and how the weights are estimated."""

    corpus: Path | None = None
    """Folder written by preprocess_data or import_corpus. Pass either --corpus or --input; the
    tokenizer options apply only to --input."""
    source: SourceOptions = dataclasses.field(default_factory=lambda: SourceOptions(()))
    tokenizer: ExpertTokenizer = dataclasses.field(default_factory=ExpertTokenizer)
    domains: str | None = None
    """Domains to weigh, such as a,b,c; all other domains get weight 0. Default: all domains."""
    target: str | None = None
    """What the mixture is for: domains such as a,b, or a=2,b=1 with their shares, and texts such as
    NAME=PATH or NAME=PATH=2, in the format of --input; and --tasks. Domains are represented by
    their validation text; they may be held out of training. Default: all domains with equal
    shares."""
    downstream: TargetTaskOptions = dataclasses.field(default_factory=TargetTaskOptions)
    store: Path | None = None
    """Folder that keeps the samples of --input; default: the folder 'samples' next to the
    output."""
    models: ExpertOptions = dataclasses.field(default_factory=ExpertOptions)
    estimate: EstimateOptions = dataclasses.field(default_factory=EstimateOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        if (self.corpus is None) == (not self.source.input):
            raise UserError("pass either --corpus, or --input NAME=PATH for each domain")
        if self.corpus is not None:
            self.reject_changed(["tokenizer", "store"], "applies only to --input")

    @property
    def samples_folder(self) -> Path:
        """Return ``--store``, or its default."""
        return self.store or Path("samples")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixminOptions(DomainsAndTarget, WorkFolderOptions):
    """Choose the weights under which the domains' models predict a target text best.

    The domains are those of a corpus (--corpus), or raw text (--input NAME=PATH ...), of which only
    a sample is read. The weights are shrunk towards --prior. By default the models are n-grams, so
    no model is trained, and no GPU is used. --headroom, instead of --method mixmin, only predicts
    the gains.
    """

    experts: tuple[str, ...] = (NGRAM,)
    """Models of the domains: 'ngram'; a name of --model, such as 60m, to train one model per domain
    of --corpus in --work-dir, if n-grams predict a gain; or NAME=PATH for each domain, trained
    models as in evaluate's --checkpoint."""
    training: ProxyOptions = dataclasses.field(default_factory=ProxyOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        self._check_experts()
        if self.corpus is None:
            reason = "requires token counts, which --input does not have; preprocess the text"
            self.reject_changed(["token_budget"], reason)

    @property
    def trains_experts(self) -> bool:
        """Whether a model is trained on each domain."""
        return self.experts != (NGRAM,) and "=" not in self.experts[0]

    def _check_experts(self) -> None:
        """Raise UserError for invalid experts, or options without effect on them."""
        if not self.experts or (len(self.experts) > 1 and not all("=" in e for e in self.experts)):
            raise UserError(
                f"--experts {' '.join(self.experts)}: pass ngram, one model name, or NAME=PATH for "
                "each domain"
            )
        if self.trains_experts:
            if self.training.model != self.experts[0]:
                self.training.reject_changed(["model"], f"the model is --experts {self.experts[0]}")
            if self.corpus is None:
                raise UserError(
                    f"--experts {self.experts[0]} trains on the tokens of a corpus; preprocess the "
                    "text and pass --corpus, or leave --experts out"
                )
        else:
            why = f"--experts {' '.join(self.experts)} trains nothing"
            names = [field.name for field in dataclasses.fields(self.training)]
            self.training.reject_changed([n for n in names if n != "parallel"], why)
            self.reject_changed(["work_dir"], why)
        if self.experts == (NGRAM,):
            self.training.reject_changed(["parallel"], "n-gram models use one process")
        else:
            sampling = ["ngram_order", "sample_tokens"]
            self.models.reject_changed(sampling, "applies only to --experts ngram")

    @property
    def samples_folder(self) -> Path:
        """Return ``--store``, or its default."""
        return self.store or self.output.parent / "samples"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadroomOptions(DomainsAndTarget, SeedNoiseOptions):
    """Predict what any mixture can gain for a target, before a proxy is trained.

    The gain of MixMin's weights over Uniform, the natural mixture and --prior is compared with the
    differences between seeds. No mixture is written.
    """

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        unused = ["accept_uncertain", "bootstrap_resamples"]
        self.estimate.reject_changed(unused, "--headroom writes no mixture")


def run(options: MixminOptions) -> int | None:
    """Fit or train the models, and write the mixture."""
    from megatron_chameleon.methods.mixmin.compute import compute_mixture

    return None if compute_mixture(options) else STOPPED_STATUS


METHOD = Method(
    name="mixmin",
    options=MixminOptions,
    compute=run,
    summary="the weights under which the domains' models predict a target text best",
    needs="text of the target (--target); no model and no GPU, or one model per domain (--experts)",
    cost="seconds of one CPU core: a sample of each domain is read once; with --experts SIZE, one "
    "small run per domain",
    good_for="a target: text like that the model will be used on; knowing whether a mixture can "
    "gain anything",
    source="Thudi et al.: MixMin, arXiv 2502.10510",
)


def compute_headroom(options: HeadroomOptions) -> None:
    """Print the predicted gains, and the runs needed to see them."""
    from megatron_chameleon.methods.mixmin.headroom import print_headroom

    print_headroom(options)
