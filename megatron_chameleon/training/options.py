"""Options of tools/pretrain_gpt.py and tools/estimate_memory.py."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.ranges import (
    BatchSize,
    BelowOne,
    CheckedOptions,
    Count,
    LargeCount,
    NonNegative,
    Positive,
    Seed,
    SeveralRepetitions,
)


@dataclasses.dataclass(frozen=True)
class StoppingOptions(CheckedOptions):
    """When a run saves a checkpoint and exits with status 0, to be resumed later.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1, sent to any rank, do so at any time.
    tools/compute_mixture.py then exits with status 75, or 0 under torchrun.
    """

    exit_duration_in_mins: Positive | None = None
    """Save and exit after this many minutes, counted from the start of the command."""


@dataclasses.dataclass(frozen=True)
class CheckpointingOptions(CheckedOptions):
    """How checkpoints are written, and how many are kept."""

    async_save: bool = False
    """Write checkpoints in background processes during training, except the last one of a run.
    Takes host memory for a second copy of the state meanwhile."""
    keep_last_checkpoints: int = 5
    """Checkpoints that are kept; older ones are deleted once a newer one is complete. 0 keeps all.
    With 1, nothing is left to go back to should that one be damaged."""


@dataclasses.dataclass(frozen=True)
class GuardOptions(CheckedOptions):
    """When a step is skipped: its update is left out, while data and learning rate go on."""

    max_consecutive_skipped_steps: Count = 10
    """Steps skipped in a row that end the run, also where it was stopped and continued in between.
    A loss or a gradient that is not finite skips a step; so does a spike, by --spike-factor."""
    spike_factor: NonNegative = 0.0
    """Standard deviations above the mean of the last --spike-window steps that are a spike, in the
    loss or in the gradient's norm; 0 takes nothing for a spike (OLMo 2 trains with 6)."""
    spike_window: SeveralRepetitions = 128
    """Steps behind the bound of --spike-factor; there is none before half of them are done, since
    the start or since the mixture changed."""

    def __post_init__(self) -> None:
        """Raise UserError for a window that nothing uses."""
        super().__post_init__()
        if self.spike_factor == 0:
            self.reject_changed(["spike_window"], "has no effect without --spike-factor")


@dataclasses.dataclass(frozen=True)
class LoggingOptions(CheckedOptions):
    """Where metrics are logged, in addition to metrics.jsonl and the terminal."""

    tensorboard: bool = True
    """Write them for TensorBoard too, to the folder 'tensorboard' of the run."""
    wandb_project: str | None = None
    """Send them to this project of Weights & Biases too. Where WANDB_API_KEY is set they are sent
    without it, to WANDB_PROJECT."""
    wandb_exp_name: str | None = None
    """What Weights & Biases calls the run; the name of its folder unless given."""

    def __post_init__(self) -> None:
        """Raise UserError for a name that nothing uses."""
        super().__post_init__()
        if not self.uses_wandb:
            why = "has no effect without --wandb-project or WANDB_API_KEY"
            self.reject_changed(["wandb_exp_name"], why)

    @property
    def uses_wandb(self) -> bool:
        """Whether metrics are sent to Weights & Biases, where it is installed."""
        return self.wandb_project is not None or bool(os.environ.get("WANDB_API_KEY"))


@dataclasses.dataclass(frozen=True)
class OnlineOptions(CheckedOptions):
    """Chameleon's weights, recomputed during training from the model's own embeddings."""

    online_interval: Count | None = None
    """Steps between two recomputations of the mixture, the run's own until the first. The mixture
    stays as it is unless given. Needs --permutation epoch or feistel."""
    online_windows: Count = 256
    """Windows of the training text per domain, at most, each of up to --seq-length tokens; the same
    ones every time."""
    online_layer: int | None = None
    """Hidden states after this many layers are averaged, before the final norm; the middle unless
    given."""
    online_recipe: Literal["reference", "paper", "scaled"] = "reference"
    """From embeddings to weights, as --recipe of tools/compute_mixture.py."""
    online_smoothing: BelowOne = 0.5
    """Share of the weights in use that stays at each recomputation; 0 keeps nothing of them
    (assumed: the paper leaves weights that change to later work)."""

    def __post_init__(self) -> None:
        """Raise UserError for settings of a recomputation that never happens."""
        super().__post_init__()
        if self.online_interval is None:
            settings = ("online_windows", "online_layer", "online_recipe", "online_smoothing")
            self.reject_changed(settings, "has no effect without --online-interval")


@dataclasses.dataclass(frozen=True)
class ProfilingOptions(CheckedOptions):
    """Which steps torch's profiler records on the first rank."""

    profile: bool = False
    """Write a trace of some steps to the folder 'profile' of the run; chrome://tracing and Perfetto
    show it."""
    profile_step_start: int = 10
    """Steps done when the trace begins."""
    profile_step_end: int = 12
    """Steps done when it ends."""

    def __post_init__(self) -> None:
        """Raise UserError for steps of a trace that is not written."""
        super().__post_init__()
        if not self.profile:
            steps = ("profile_step_start", "profile_step_end")
            self.reject_changed(steps, "has no effect without --profile")


@dataclasses.dataclass(frozen=True)
class ValidationOptions(CheckedOptions):
    """How often, and on how much, the loss is measured on the valid split of every domain."""

    eval_interval: int = 1000
    """Steps between two validations; 0 validates never."""
    eval_iters: Count = 100
    """Global batches that one validation reads, at most; domains have equal parts of them."""
    eval_tokens: LargeCount | None = None
    """Maximum tokens per domain that one validation predicts; replaces --eval-iters."""
    eval_last_step: bool = False
    """Validate after the last step too where --eval-interval does not divide --train-iters."""


DryFirstStep = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(CheckedOptions):
    """AdamW with linear warm-up and cosine decay."""

    lr: Positive = 5e-4
    """Peak learning rate (paper, proxies: 5e-4; 684M and 1.2B: 1.5e-4)."""
    min_lr: NonNegative = 1e-4
    """Learning rate at the end of the cosine (paper, proxies: 1e-4; 684M and 1.2B: 5e-5)."""
    lr_warmup_iters: int = 500
    """Steps of linear warm-up (assumed: the paper does not say)."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, on matrices only (paper)."""
    adam_beta1: BelowOne = 0.9
    """First-moment decay (assumed)."""
    adam_beta2: BelowOne = 0.95
    """Second-moment decay (assumed)."""
    adam_eps: NonNegative = 1e-8
    """Added to the denominator of the update."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 clips nothing (paper: 1.0)."""

    def __post_init__(self) -> None:
        """Raise UserError for a schedule that would rise."""
        super().__post_init__()
        if self.lr < self.min_lr:
            raise UserError(f"--lr {self.lr} --min-lr {self.min_lr}: --lr must be >= --min-lr")

    def check_warmup(self, train_iters: int) -> None:
        """Raise UserError unless warm-up ends before the last step."""
        if self.lr_warmup_iters >= train_iters:
            raise UserError(
                f"--lr-warmup-iters {self.lr_warmup_iters}: must be < --train-iters {train_iters}"
            )


@dataclasses.dataclass(frozen=True)
class PretrainOptions(CheckedOptions):
    """Train a GPT on a corpus with a mixture of its domains.

    Run the same command again to resume an interrupted run.
    """

    run_dir: Path
    """Folder of this run: run.json, metrics.jsonl and checkpoints go there."""
    corpus: Path | None = None
    """Folder written by tools/preprocess_data.py; or give --data-path."""
    model_size: str | None = None
    """Name of a model size; a wrong one lists them all. Unless given, it is that of
    --pretrained-checkpoint, or 82m."""
    mixture: str | None = None
    """'uniform' (which is what a corpus is drawn by without it), or the path of a mixture.json."""
    seq_length: Count = 1024
    """Tokens per sample (the paper's cost figures imply 1024)."""
    train_iters: Count = 2000
    """Optimizer steps (paper: 2000 for the Chameleon proxy, 10000 for the other proxies)."""
    global_batch_size: BatchSize = 128
    """Sequences per step, over all ranks (paper: 128; Pile: 512)."""
    micro_batch_size: BatchSize = 8
    """Sequences per forward pass and rank."""
    seed: Seed = 1234
    """Of the initial weights and of the order of samples."""
    pretrained_checkpoint: Path | None = None
    """Start from these trained weights, a run folder (its latest checkpoint), one checkpoint folder
    or a Hugging Face GPT-2 folder, instead of random ones: for fine-tuning. Optimizer and schedule
    start from scratch."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    compile_layers: bool = False
    """Compile the transformer layers with torch.compile, on a GPU: the first step takes about a
    minute longer and later ones are shorter. Losses change by rounding alone."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time, also on a GPU, where some are slower;
    on the CPU all are such."""
    dry_first_step: DryFirstStep = "auto"
    """Before the first step, take the memory that a step takes, on random tokens and without a
    trace, so that a run that is too large ends at once; auto does where there is a GPU."""
    log_interval: Count = 10
    """Steps between two lines of log and metrics."""
    save_interval: Count = 500
    """Steps between two checkpoints; the last step always writes one."""
    overwrite: bool = False
    """Start from scratch; the old contents of run_dir are deleted once the new run has started."""
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    online: OnlineOptions = dataclasses.field(default_factory=OnlineOptions)
    boundaries: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)
    checkpointing: CheckpointingOptions = dataclasses.field(default_factory=CheckpointingOptions)
    guards: GuardOptions = dataclasses.field(default_factory=GuardOptions)
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)
    validation: ValidationOptions = dataclasses.field(default_factory=ValidationOptions)
    logging: LoggingOptions = dataclasses.field(default_factory=LoggingOptions)
    profiling: ProfilingOptions = dataclasses.field(default_factory=ProfilingOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        self.optimizer.check_warmup(self.train_iters)
        self._check_steps()
        self._check_data()

    def _check_steps(self) -> None:
        """Check that steps at which something happens are steps of the run."""
        last = self.train_iters
        evaluated, online = self.validation.eval_interval, self.online.online_interval
        amounts = ["eval_iters", "eval_tokens", "eval_last_step"]
        if evaluated == 0:
            self.validation.reject_changed(amounts, "has no effect with --eval-interval 0")
        elif evaluated > last:
            why = f"--train-iters {last} end before the first validation"
            self.validation.reject_changed(["eval_interval", *amounts], why)
        tokens = self.validation.eval_tokens
        if tokens is not None:
            self.validation.reject_changed(["eval_iters"], "has no effect with --eval-tokens")
            if tokens < self.seq_length:
                raise UserError(f"--eval-tokens {tokens}: below --seq-length {self.seq_length}")
        start, end = self.profiling.profile_step_start, self.profiling.profile_step_end
        if self.profiling.profile and not start < end <= last:
            raise UserError(
                f"--profile-step-start {start} --profile-step-end {end}: the first must be below "
                f"the second, and the second at most --train-iters {last}"
            )
        if online is not None and online >= last:
            raise UserError(f"--online-interval {online}: must be < --train-iters {last}")

    def _check_data(self) -> None:
        """Check the source of tokens, and that each option of it has an effect."""
        if (self.corpus is None) == (self.data.data_path is None):
            raise UserError("pass either --corpus or --data-path")
        if self.corpus is not None:
            of_data_path = ("split", "tokenizer_model", "tiktoken_pattern", "eod_token")
            self.data.reject_changed(
                of_data_path, f"only for --data-path, not --corpus {self.corpus}"
            )
        else:
            self.data.reject_changed(["verify_corpus"], "needs --corpus, which has hashes")
            self.reject_changed(["mixture"], "--data-path has its own weights")
            if self.data.tokenizer_model is None:
                raise UserError("--data-path needs --tokenizer-model, which made its tokens")
        if self.data.permutation != "megatron":
            why = f"--permutation {self.data.permutation} has no indices to keep"
            self.data.reject_changed(["data_cache_path"], why)


@dataclasses.dataclass(frozen=True)
class EstimateMemoryOptions(CheckedOptions):
    """Print what each rank of a training run would hold, without starting anything.

    The flags are those of tools/pretrain_gpt.py, with what it reads from elsewhere.
    """

    model_size: str = "82m"
    """Name of a model size; a wrong one lists them all."""
    vocab_size: Count = 50257
    """Tokens of the tokenizer; padding is added here."""
    seq_length: Count = 1024
    """Tokens per sample."""
    global_batch_size: BatchSize = 128
    """Sequences per step, over all ranks."""
    micro_batch_size: BatchSize = 8
    """Sequences per forward pass and rank."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    world_size: Count = 1
    """Ranks of the run, over all nodes."""
    device_memory_gb: Positive | None = None
    """Memory of each device in GB (10^9 bytes). Given, the command says whether the run fits, and
    leaves with status 1 if it does not."""
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)
