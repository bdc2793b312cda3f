"""Options of pretrain_gpt and plan_run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.parallel.releases import require_release
from megatron_chameleon.ranges import (
    BatchSize,
    BelowOne,
    CheckedOptions,
    Count,
    LargeCount,
    NonNegative,
    Positive,
    PositiveShare,
    Seed,
    SeveralRepetitions,
)


@dataclasses.dataclass(frozen=True)
class StoppingOptions(CheckedOptions):
    """When to stop a run early, after saving a checkpoint to resume from; the exit status is 0.

    SIGTERM, SIGINT (Ctrl-C), SIGHUP, SIGUSR1 or SIGUSR2, sent to any rank, stops the run in this
    way at any time. compute_mixture exits with status 75 if it was stopped, but with 0 under
    torchrun.
    """

    exit_duration_in_mins: Positive | None = None
    """Save and exit this many minutes after the start of the command."""


@dataclasses.dataclass(frozen=True)
class CheckpointingOptions(CheckedOptions):
    """How checkpoints are written, and how many are kept."""

    async_save: bool = False
    """Write checkpoints in background processes during training, except a run's last checkpoint.
    This option needs host memory for a second copy of the state."""
    keep_last_checkpoints: int = 5
    """Number of checkpoints to keep; older ones are deleted when a newer one is complete. 0 keeps
    all checkpoints; 1 leaves no older checkpoint to resume from if the last checkpoint is
    damaged."""
    keep_steps: tuple[Count, ...] = ()
    """Also save a checkpoint after each of these steps. A command with this option does not delete
    these checkpoints."""


@dataclasses.dataclass(frozen=True)
class GuardOptions(CheckedOptions):
    """When to skip a step: data and learning rate advance, but the model is not updated."""

    max_consecutive_skipped_steps: Count = 10
    """Stop after this many consecutive skipped steps, counted across resumes. A step is skipped if
    its loss or gradient norm is NaN, infinite or a spike (--spike-factor)."""
    spike_factor: NonNegative = 0.0
    """A loss or gradient norm is a spike if it exceeds the mean of the last --spike-window steps by
    this many standard deviations; 0 disables the check (OLMo 2 uses 6)."""
    spike_window: SeveralRepetitions = 128
    """Number of steps whose mean and standard deviation --spike-factor uses. The check begins after
    half as many steps, counted from the start or the last mixture change."""

    def __post_init__(self) -> None:
        """Raise UserError for --spike-window without --spike-factor."""
        super().__post_init__()
        if self.spike_factor == 0:
            self.reject_changed(["spike_window"], "has no effect without --spike-factor")


@dataclasses.dataclass(frozen=True)
class LoggingOptions(CheckedOptions):
    """Where metrics are logged, in addition to metrics.jsonl and the terminal."""

    tensorboard: bool = True
    """Also write TensorBoard event files, to the folder 'tensorboard' of the run."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project. The default is $WANDB_PROJECT if WANDB_API_KEY is
    set."""
    wandb_exp_name: str | None = None
    """Name of the Weights & Biases run; by default the name of the run folder."""
    mlflow_experiment: str | None = None
    """Also log to this MLflow experiment, which is created if needed, at $MLFLOW_TRACKING_URI. The
    MLflow run has the name of the run folder."""

    def __post_init__(self) -> None:
        """Raise UserError for --wandb-exp-name without Weights & Biases."""
        super().__post_init__()
        if not self.uses_wandb:
            why = "has no effect without --wandb-project or WANDB_API_KEY"
            self.reject_changed(["wandb_exp_name"], why)

    @property
    def uses_wandb(self) -> bool:
        """Whether metrics are logged to Weights & Biases, if it is installed."""
        return self.wandb_project is not None or bool(os.environ.get("WANDB_API_KEY"))


@dataclasses.dataclass(frozen=True)
class OnlineOptions(CheckedOptions):
    """Online mixing. The methods and their flags are in methods/online/options.py."""

    online: str | None = None
    """Method that changes the mixture during training; by default, the mixture is constant."""

    def check_run(self, train_iters: int, target: str | None) -> None:
        """Raise UserError for options that do not suit a run of ``train_iters`` steps.

        Args:
            train_iters: number of steps of the run.
            target: value of ``--target``.
        """


@dataclasses.dataclass(frozen=True)
class ReloadOptions(CheckedOptions):
    """Weights that another program changes during the run."""

    reload_mixture: Path | None = None
    """A mixture.json that is read again during training. If its weights have changed, all ranks
    sample with the new weights from the next step on, and run.json records the change. A file that
    is missing, damaged or lacks a domain leaves the weights unchanged, with a warning. Needs
    --permutation epoch or feistel."""
    reload_interval: Count = 100
    """Steps between two reads of --reload-mixture. On a GPU, training waits for each read."""

    def __post_init__(self) -> None:
        """Raise UserError for --reload-interval without --reload-mixture."""
        super().__post_init__()
        if self.reload_mixture is None:
            self.reject_changed(["reload_interval"], "has no effect without --reload-mixture")


@dataclasses.dataclass(frozen=True)
class ProfilingOptions(CheckedOptions):
    """The steps that torch's profiler records on rank 0."""

    profile: bool = False
    """Write a trace of some steps to the folder 'profile' of the run, for chrome://tracing or
    Perfetto."""
    profile_step_start: int = 10
    """Number of steps done when the trace begins."""
    profile_step_end: int = 12
    """Number of steps done when the trace ends."""

    def __post_init__(self) -> None:
        """Raise UserError for steps without --profile, or if they do not end after they start."""
        super().__post_init__()
        if not self.profile:
            steps = ("profile_step_start", "profile_step_end")
            self.reject_changed(steps, "has no effect without --profile")
        elif self.profile_step_start >= self.profile_step_end:
            raise UserError(
                f"--profile-step-start {self.profile_step_start}: must be < --profile-step-end "
                f"{self.profile_step_end}"
            )


@dataclasses.dataclass(frozen=True)
class ValidationOptions(CheckedOptions):
    """When, and on how many tokens, the loss on the valid split of every domain is measured."""

    eval_interval: int = 1000
    """Steps between two validations; 0 disables validation."""
    eval_iters: Count = 100
    """Maximum number of global batches in one validation, divided equally among the domains."""
    eval_tokens: LargeCount | None = None
    """Maximum number of tokens per domain in one validation; replaces --eval-iters."""
    eval_last_step: bool = False
    """Also validate after the last step if --eval-interval does not divide --train-iters."""
    eval_first_step: bool = False
    """Also validate before the first step of a run, for example to measure the pretrained
    checkpoint before fine-tuning; logged as step 0."""

    def __post_init__(self) -> None:
        """Raise UserError for options that have no effect together."""
        super().__post_init__()
        if self.eval_interval == 0:
            amounts = ["eval_iters", "eval_tokens", "eval_last_step", "eval_first_step"]
            self.reject_changed(amounts, "has no effect with --eval-interval 0")
        if self.eval_tokens is not None:
            self.reject_changed(["eval_iters"], "has no effect with --eval-tokens")


@dataclasses.dataclass(frozen=True)
class TargetOptions(CheckedOptions):
    """What the mixture is for: the loss of a target is measured at every validation."""

    target: str | None = None
    """Domains, also held-out ones, with shares, as in a,b or a=2,b=1; or text that is not in the
    corpus, as NAME=PATH or NAME=PATH=SHARE. The target's loss is the sum of shares times losses.
    Only --online aioli changes the training for it: its mixture lowers this loss.
    Default: the target that --mixture records (--method mixmin), if it has domains of this corpus
    only."""
    target_text_key: str = "text"
    """Key, or column, of the text in the files of --target."""
    keep_best: bool = True
    """Keep the checkpoint with the lowest target loss: after a validation with a new lowest loss, a
    checkpoint is written, and kept until there is a better one. The negative form requires a
    target."""

    def __post_init__(self) -> None:
        """Raise UserError for --target-text-key without --target."""
        super().__post_init__()
        if self.target is None:
            self.reject_changed(["target_text_key"], "has no effect without --target")


Optimizer = Literal["adam", "muon"]
DocumentAttention = Literal["dense", "flex"]
DryFirstStep = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True)
class OptimizerOptions(CheckedOptions):
    """AdamW or Muon with linear warm-up and cosine decay."""

    optimizer: Optimizer = "adam"
    """AdamW for all weights, or Muon for the layers' matrices and AdamW for the rest (Jordan et al.
    2024, "Muon: An optimizer for hidden layers in neural networks"). Muon needs megatron-core 0.18
    or newer and the extra muon, and has no --use-distributed-optimizer."""
    lr: Positive = 5e-4
    """Peak learning rate (paper: 5e-4 for proxies, 1.5e-4 for the 684M and 1.2B models)."""
    min_lr: NonNegative = 1e-4
    """Learning rate at the end of the cosine (paper: 1e-4 for proxies, 5e-5 for the 684M and 1.2B
    models)."""
    lr_warmup_iters: int = 500
    """Steps of linear warm-up (assumed value: the paper states none)."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay (from the paper), applied to matrices only."""
    adam_beta1: BelowOne = 0.9
    """First-moment decay (assumed)."""
    adam_beta2: BelowOne = 0.95
    """Second-moment decay (assumed)."""
    adam_eps: NonNegative = 1e-8
    """Number added to the denominator of Adam's update."""
    muon_momentum: BelowOne = 0.95
    """Momentum of Muon."""
    clip_grad: NonNegative = 1.0
    """Maximum global gradient norm; 0 disables clipping (paper: 1.0)."""

    def __post_init__(self) -> None:
        """Raise UserError if --min-lr exceeds --lr, or an option has no effect."""
        super().__post_init__()
        if self.optimizer != "muon":
            self.reject_changed(["muon_momentum"], "needs --optimizer muon")
        if self.lr < self.min_lr:
            raise UserError(f"--lr {self.lr} --min-lr {self.min_lr}: --lr must be >= --min-lr")

    def check_warmup(self, train_iters: int) -> None:
        """Raise UserError unless warm-up ends before the last step."""
        if self.lr_warmup_iters >= train_iters:
            raise UserError(
                f"--lr-warmup-iters {self.lr_warmup_iters}: must be < --train-iters {train_iters}"
            )


def check_muon() -> None:
    """Check that megatron-core and emerging-optimizers have Muon.

    Raises:
        UserError: if one of them is too old or missing.
    """
    flag, install = "--optimizer muon", "pip install 'megatron-chameleon[muon]'"
    require_release(flag, "0.18")
    require_release(flag, "0.3", "emerging-optimizers", install)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(CheckedOptions):
    """Model, batch and parallel layout, which determine the memory of a training run."""

    model: str | None = None
    """Name of a model, or folder of a Hugging Face config.json; an unknown name prints all names.
    Vocabulary and sequence length are those of the run. Default: the model of
    --pretrained-checkpoint, or 82m."""
    architecture: ArchitectureOptions = dataclasses.field(default_factory=ArchitectureOptions)
    seq_length: Count = 1024
    """Tokens per sample (assumed: 1024; the paper does not state it)."""
    global_batch_size: BatchSize = 128
    """Sequences per step, over all ranks (paper: 128, but 512 for the Pile)."""
    micro_batch_size: BatchSize = 8
    """Sequences per forward pass of a rank."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    hidden_dropout: BelowOne = 0.0
    """Dropout rate of embeddings and of the outputs of attention and MLP (assumed: 0; GPT-2 has
    0.1)."""
    attention_dropout: BelowOne = 0.0
    """Dropout rate of attention probabilities (assumed: 0; GPT-2 has 0.1)."""
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions(ModelOptions):
    """Options of every training run, whether of a base model or of a method's proxy model."""

    train_iters: Count = 2000
    """Number of optimizer steps (paper: 2000 for Chameleon's proxy, 10000 for other proxies)."""
    target_tokens: LargeCount | None = None
    """For a proxy: number of training tokens of the target run, whose epochs the proxy then has.
    Each domain's training text is cut to the proxy's tokens divided by this number. Default: the
    proxy uses all text, and repeats small domains less than the target run."""
    seed: Seed = 1234
    """Seed of the initial weights and the sample order."""
    compile_layers: bool = False
    """Compile the transformer layers with torch.compile, on a GPU. The first step takes about a
    minute longer; losses differ by rounding only."""
    deterministic: bool = False
    """Use deterministic algorithms, some of which are slower on a GPU; the CPU is always
    deterministic."""
    dry_first_step: DryFirstStep = "auto"
    """Before training, run a step on random tokens without an update, so that a run that does not
    fit in memory fails at once; auto does so on a GPU."""
    log_interval: Count = 10
    """Steps between two log lines."""
    save_interval: Count = 500
    """Steps between two checkpoints; a checkpoint is always written after the last step."""
    boundaries: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)
    document_attention: DocumentAttention = "dense"
    """How a GPU separates the documents of --reset-attention-mask. dense: with a mask of every pair
    of tokens. flex: with torch's flex attention, which needs no such mask and skips masked blocks;
    its kernels are compiled at the first step. Losses differ by rounding only. A CPU always uses
    the dense mask."""
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    checkpointing: CheckpointingOptions = dataclasses.field(default_factory=CheckpointingOptions)
    guards: GuardOptions = dataclasses.field(default_factory=GuardOptions)
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)
    validation: ValidationOptions = dataclasses.field(default_factory=ValidationOptions)
    logging: LoggingOptions = dataclasses.field(default_factory=LoggingOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        if not self.boundaries.reset_attention_mask:
            without = "has no effect without --reset-attention-mask"
            self.reject_changed(["document_attention"], without)
        if self.document_attention == "flex":
            why = "is not supported with --document-attention flex"
            self.reject_changed(["attention_dropout"], why)
        if self.compile_layers:
            why = "is not supported with --compile-layers"
            self.reject_changed(["hidden_dropout", "attention_dropout"], why)
        if self.optimizer.optimizer == "muon" and self.parallel.use_distributed_optimizer:
            raise UserError(
                "--optimizer muon and --use-distributed-optimizer exclude each other: Muon needs "
                "whole matrices; leave out one of them"
            )
        if self.compile_layers and self.parallel.overlap_param_gather:
            raise UserError(
                "--compile-layers and --overlap-param-gather exclude each other: gathering "
                "parameters within a layer cannot be compiled; leave out one of them"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens that the run is trained on."""
        return self.train_iters * self.global_batch_size * self.seq_length

    @property
    def validates(self) -> bool:
        """Whether the run has a validation."""
        return 0 < self.validation.eval_interval <= self.train_iters

    def check_steps(self) -> None:
        """Raise UserError for options that do not fit the number of steps."""
        last, validation = self.train_iters, self.validation
        self.optimizer.check_warmup(last)
        if validation.eval_interval > last:
            validation.reject_changed(
                ["eval_interval", "eval_iters", "eval_tokens", "eval_last_step", "eval_first_step"],
                f"--train-iters {last} ends before the first validation",
            )
        if validation.eval_tokens is not None and validation.eval_tokens < self.seq_length:
            raise UserError(
                f"--eval-tokens {validation.eval_tokens}: must be >= --seq-length {self.seq_length}"
            )


MaxRepetitionAction = Literal["warn", "redistribute", "stop"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureInputOptions(CheckedOptions):
    """Corpus and weights of a run."""

    corpus: Path | None = None
    """Folder written by preprocess_data; alternatively, pass --data-path."""
    mixture: str | None = None
    """Path of a mixture.json, or 'uniform' (default)."""
    max_repetition_action: MaxRepetitionAction = "warn"
    """What to do if the run would repeat a domain more often than max_repetition of --mixture
    permits. warn: print a warning. redistribute: lower the weights of these domains before the
    first step, so that they stay within the limit over the whole run, and raise the other weights
    in proportion. stop: exit with status 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunInputOptions(MixtureInputOptions):
    """Input files and folder of a run.

    These options are in a base class so that --help lists them first.
    """

    run_dir: Path
    """Folder of this run, to which run.json, metrics.jsonl and checkpoints are written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainOptions(TrainingOptions, RunInputOptions):
    """Train a GPT on a corpus with a mixture of its domains.

    Run the same command again to resume an interrupted run.
    """

    pretrained_checkpoint: Path | None = None
    """Weights to fine-tune: a run folder (its latest checkpoint), a checkpoint folder (also of
    Megatron-LM), or a Hugging Face folder or hub name (GPT-2, Llama, Mistral without sliding
    window, Qwen2, Qwen3). Optimizer and schedule start from scratch."""
    overwrite: bool = False
    """Start from scratch; the contents of --run-dir are deleted once the new run has started."""
    loss_weights: str | None = None
    """Weights of the domains' token losses, such as a=1,b=2; a domain that is not named has weight
    1. A mixture q with loss weights w/q has the expected gradient of the mixture w. The logged
    losses are not weighted. The gradient, which --clip-grad limits, is scaled by the mean weight of
    the sampled tokens."""
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    target: TargetOptions = dataclasses.field(default_factory=TargetOptions)
    online: OnlineOptions = dataclasses.field(default_factory=OnlineOptions)
    reload: ReloadOptions = dataclasses.field(default_factory=ReloadOptions)
    profiling: ProfilingOptions = dataclasses.field(default_factory=ProfilingOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other or have no effect."""
        super().__post_init__()
        self.check_steps()
        last = self.train_iters
        if self.target.target is not None and not self.validates:
            raise UserError(
                f"--target {self.target.target}: its loss is measured by validations; pass an "
                f"--eval-interval from 1 to {last}"
            )
        if self.profiling.profile and self.profiling.profile_step_end > last:
            raise UserError(
                f"--profile-step-end {self.profiling.profile_step_end}: must be <= --train-iters "
                f"{last}"
            )
        self.online.check_run(last, self.target.target)
        if self.online.online or self.reload.reload_mixture is not None:
            changes = "--reload-mixture" if self.reload.reload_mixture else "--online"
            why = f"cannot limit the epochs of weights that {changes} computes during training"
            self.reject_changed(["max_repetition_action"], why)
        if self.reload.reload_mixture is not None:
            if self.online.online:
                raise UserError(
                    f"--reload-mixture and --online {self.online.online} both change the mixture; "
                    "leave out one of them"
                )
            if self.reload.reload_interval >= last:
                raise UserError(
                    f"--reload-interval {self.reload.reload_interval}: must be < --train-iters "
                    f"{last}; pass a smaller interval"
                )
        if self.pretrained_checkpoint is not None and self.model is None:
            why = f"the model is that of --pretrained-checkpoint {self.pretrained_checkpoint}"
            self.reject_changed(["architecture"], why)
        sources = (self.corpus, self.data.data_path, self.data.data_args_path)
        if sum(source is not None for source in sources) != 1:
            raise UserError("pass one of --corpus, --data-path and --data-args-path")
        if self.corpus is not None:
            of_data_path = ("split", "tokenizer_model", "tiktoken_pattern", "eod_token")
            self.data.reject_changed(
                of_data_path, f"applies to --data-path, not to --corpus {self.corpus}"
            )
        else:
            self.data.reject_changed(
                ["verify_corpus"], "needs --corpus, since --data-path has no hashes"
            )
            weights = ["mixture", "max_repetition_action"]
            self.reject_changed(weights, "--data-path sets the weights")
            if self.data.tokenizer_model is None:
                raise UserError("--data-path needs --tokenizer-model, the tokenizer of its tokens")
        if self.data.permutation != "megatron":
            why = f"--permutation {self.data.permutation} has no indices to cache"
            self.data.reject_changed(["data_cache_path"], why)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRunOptions(TrainingOptions, MixtureInputOptions):
    """Predict memory, communication and time of a training run, without starting it.

    The flags are those of pretrain_gpt without most of its inputs, plus flags for the machines.
    With --corpus, the epochs of each domain are predicted, too. All flags of training are checked,
    but document masks (--reset-attention-mask) and --deterministic do not change the predicted time
    and memory.
    """

    train_tokens: LargeCount | None = None
    """Number of training tokens, rounded up to whole steps; replaces --train-iters."""
    vocab_size: Count = 50257
    """Number of tokens of the tokenizer, without padding; with --corpus, that of its tokenizer."""
    num_domains: Count = 1
    """Number of domains with a valid split; only --eval-tokens depends on it. With --corpus, that
    of the corpus."""
    world_size: Count = 1
    """Number of ranks, over all nodes."""
    devices_per_node: Count = 8
    """Number of ranks on each node."""
    device_memory_gb: Positive | None = None
    """Memory of each device in GB (10^9 bytes), to report whether the run fits; if the run does not
    fit, the exit status is 1."""
    tokens_per_second: Positive | None = None
    """Training speed of one device in tokens/s, measured on one device without recomputation, or on
    several devices without their communication."""
    mfu: PositiveShare | None = None
    """Model FLOPs utilization of one device, instead of --tokens-per-second."""
    peak_tflops: Positive = 989.0
    """Peak speed of a device in TFLOP/s, for --mfu and for the predicted MFU; default: dense bf16
    of an H100 SXM."""
    intra_node_bandwidth: Positive | None = None
    """Bandwidth between devices of a node in GB/s (10^9 bytes/s) per device and direction, for
    example 450 for NVLink of an H100."""
    inter_node_bandwidth: Positive | None = None
    """Bandwidth between nodes in GB/s per device and direction, for example 50 for a network card
    of 400 Gbit/s per device."""
    disk_bandwidth: Positive | None = None
    """Bandwidth in GB/s at which all ranks together write and read checkpoints."""
    start_up_seconds: NonNegative = 60.0
    """Time from the start of the command to the first step, without compilation and reading a
    checkpoint (assumed value)."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        """Raise UserError for options that contradict each other."""
        super().__post_init__()
        if self.train_tokens is None:
            self.check_steps()
        else:
            self.reject_changed(["train_iters"], "--train-tokens sets the number of steps")
        if self.mfu is not None:
            self.reject_changed(["tokens_per_second"], "--mfu sets the speed")
        elif self.tokens_per_second is None:
            without = "has no effect without --tokens-per-second or --mfu"
            self.reject_changed(["peak_tflops", "start_up_seconds"], without)
        if self.validation.eval_tokens is None:
            self.reject_changed(["num_domains"], "has no effect without --eval-tokens")
        if self.corpus is None:
            self.reject_changed(["mixture", "max_repetition_action"], "needs --corpus")
        else:
            self.reject_changed(["vocab_size", "num_domains"], f"is that of --corpus {self.corpus}")

    def with_steps(self) -> PlanRunOptions:
        """Return options that have ``train_iters`` instead of ``train_tokens``."""
        if self.train_tokens is None:
            return self
        steps = -(-self.train_tokens // (self.global_batch_size * self.seq_length))
        return dataclasses.replace(self, train_iters=steps, train_tokens=None)
