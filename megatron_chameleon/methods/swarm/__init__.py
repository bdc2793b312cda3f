"""Options of a swarm of small proxies, and of the methods that fit its losses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_chameleon.artifacts.swarm import METRICS_NAME, RATIOS_NAME
from megatron_chameleon.blend.options import Permutation
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import TaskOptions
from megatron_chameleon.interchange.options import FormatName
from megatron_chameleon.methods.options import TrainingMethodOptions
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.ranges import (
    BatchSize,
    BelowOne,
    CheckedOptions,
    Count,
    LargeCount,
    Minutes,
    NonNegative,
    Positive,
    Repetitions,
    Seed,
)
from megatron_chameleon.training.options import OptimizerOptions, StoppingOptions


@dataclasses.dataclass(frozen=True)
class SwarmOptions(CheckedOptions):
    """A swarm: one small proxy per mixture, several trained concurrently on each device.

    Members share all settings; they differ in mixture, initial weights and sample order. torchrun's
    ranks split the members among themselves.
    """

    model: str = "regmix-1m"
    """Name of the members' model (RegMix: regmix-1m), or folder of a Hugging Face config.json;
    the error for an unknown name lists all names."""
    architecture: ArchitectureOptions = dataclasses.field(default_factory=ArchitectureOptions)
    rounds: Count = 1
    """Train the members in this many rounds of about equal size. The mixtures of the first round
    are sampled; those of each later round are sampled mixtures that a surrogate, fitted to the
    losses of the earlier rounds, predicts to lower the target most (Thompson sampling)."""
    train_iters: Count = 1000
    """Optimizer steps of each member (RegMix: 1000)."""
    seq_length: Count = 2048
    """Tokens per sample (RegMix: 2048)."""
    global_batch_size: BatchSize = 512
    """Sequences per step and member (RegMix: 512)."""
    target_tokens: LargeCount | None = None
    """Number of training tokens of the target run, whose epochs each member then has: each domain's
    training text is cut to a member's tokens divided by this number, with the same documents for
    all members. Default: members use all text, and repeat small domains less than the target
    run."""
    micro_batch_size: BatchSize | None = None
    """Sequences per forward pass; default: computed from --seq-length and the device's memory. Must
    divide --global-batch-size."""
    members_at_once: Count | None = None
    """Members trained concurrently on each device, each in its own process; default: as many as
    memory and CPU cores allow."""
    seed: Seed = 1234
    """Seed of all members; each derives its initial weights and sample order from it."""
    permutation: Permutation = "feistel"
    """Sample order within a domain, as in pretrain_gpt; 'feistel' stores no order in
    memory."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    deterministic: bool = False
    """Use only bit-reproducible algorithms, some of which are slower on a GPU. On a CPU, all
    algorithms are reproducible."""
    lr: Positive = 4e-4
    """Peak learning rate (RegMix: 4e-4)."""
    min_lr: NonNegative = 4e-5
    """Final learning rate of --lr-decay-style cosine (assumed: a tenth of --lr)."""
    lr_decay_style: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: 'constant' (RegMix), or 'cosine', which decays to --min-lr
    at the last step."""
    lr_warmup_iters: int = 100
    """Steps of linear warm-up (RegMix: 100)."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, applied to matrices only (RegMix's code: 0.1, applied to all
    parameters)."""
    adam_beta1: BelowOne = 0.9
    """Adam's decay rate of the first moment (RegMix's code: 0.9)."""
    adam_beta2: BelowOne = 0.95
    """Adam's decay rate of the second moment (RegMix's code: 0.95)."""
    adam_eps: NonNegative = 1e-8
    """Adam's epsilon, added to the denominator of the update."""
    clip_grad: NonNegative = 1.0
    """Maximum gradient norm; 0 disables clipping (RegMix's code: 1.0)."""
    eval_interval: int = 0
    """Steps between measurements of the held-out losses; 0 measures only after the last step, which
    is always measured."""
    eval_tokens: LargeCount = 131072
    """Maximum held-out tokens per domain and measurement, in windows spread over the valid
    split."""
    save_interval: int = 100
    """Steps between checkpoints of a member in progress, from which an interrupted swarm resumes;
    0 writes a checkpoint only on a stop request."""
    log_interval: Count = 10
    """Steps between entries in a member's log and metrics."""
    downstream: TaskOptions = dataclasses.field(default_factory=TaskOptions)
    max_loss: Positive | None = None
    """A member counts as diverged if its held-out loss (nats per token), weighted by its own
    mixture, exceeds this value; default: 1.5 ln(V), where ln(V) is the loss of uniform guessing
    over V tokens."""
    distributed_timeout_minutes: Minutes = 600
    """Maximum minutes that a rank waits for the other ranks before it fails."""
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)

    def __post_init__(self) -> None:
        """Raise UserError for values out of range, or that exclude each other."""
        super().__post_init__()
        if self.eval_tokens < self.seq_length:
            raise UserError(
                f"--eval-tokens {self.eval_tokens}: must be >= --seq-length {self.seq_length}"
            )
        if self.micro_batch_size and self.global_batch_size % self.micro_batch_size:
            raise UserError(
                f"--micro-batch-size {self.micro_batch_size} does not divide --global-batch-size "
                f"{self.global_batch_size}; choose a divisor, or omit --micro-batch-size"
            )
        self.optimizer.check_warmup(self.train_iters)

    @property
    def optimizer(self) -> OptimizerOptions:
        """Options of a member's AdamW. A constant rate is a cosine decay to the peak rate."""
        shared = {field.name for field in dataclasses.fields(OptimizerOptions)}
        fields = [field.name for field in dataclasses.fields(self) if field.name in shared]
        values = {name: getattr(self, name) for name in fields}
        if self.lr_decay_style == "constant":
            values["min_lr"] = self.lr
        return OptimizerOptions(**values)

    @property
    def tokens(self) -> int:
        """Number of tokens that each member is trained on."""
        return self.train_iters * self.global_batch_size * self.seq_length

    @property
    def measured_steps(self) -> list[int]:
        """Steps after which held-out losses are measured, always including the last one."""
        interval = self.eval_interval or self.train_iters
        return [*range(interval, self.train_iters, interval), self.train_iters]


@dataclasses.dataclass(frozen=True)
class MixtureSamplingOptions(CheckedOptions):
    """Distribution of the proxies' mixtures; for up to 17 domains, the defaults are RegMix's."""

    mixture_seed: Seed = 42
    """Seed of the sampled mixtures."""
    prior_exponent: float = 0.5
    """The mean mixture is proportional to the domains' token shares, raised to this power (RegMix:
    0.5; 1 keeps the shares, 0 is uniform)."""
    min_strength: Positive = 0.1
    """Smallest concentration of the Dirichlet distributions: small values give mixtures of few
    domains (as in RegMix)."""
    max_strength: Positive = 5.0
    """Largest concentration (RegMix: 5)."""
    strength_domains: Count = 17
    """Number of domains for which both concentrations are meant (RegMix: 17). With more domains,
    they are multiplied by the square of (domains / this number), so that a mixture contains most
    domains instead of a few. A number >= that of the domains keeps both as they are."""
    max_upweighting: Positive = 15.0
    """Maximum weight of a domain as a multiple of its token share (RegMix: 15)."""
    smallest_weight: NonNegative = 2e-4
    """Step of the weights: smaller weights are set to 0, and all weights are multiples of the step
    (RegMix: 2e-4)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitOptions(TrainingMethodOptions):
    """Options of a method that fits the losses of proxies trained on many mixtures."""

    num_proxies: Repetitions
    """Proxies to train, each on its own mixture."""
    ratios: Path | None = None
    """CSV table of the mixtures of other runs, to fit these runs instead of training proxies. A
    row contains a run's name (column run, run_id, index or name) and its share of each domain, as
    in the files of RegMix and Olmix. Requires --metrics."""
    metrics: Path | None = None
    """CSV table of the results of the runs in --ratios, with the same run names, and one column per
    loss or other metric to be minimized."""
    swarm_dir: Path | None = None
    """Folder of a swarm of swarm generate, to fit the losses that swarm collect has written there,
    instead of training proxies."""
    target: str | None = None
    """Losses to minimize, such as a,b or a=2,b=1 with their shares: domains (also held-out ones),
    --tasks, or columns of --metrics; or text that is not in the corpus, as NAME=PATH or
    NAME=PATH=SHARE in the format of preprocess_data --input, on which all proxies are measured.
    Default: the mean over --tasks, also those of --swarm-dir, or without tasks, the mean of all
    losses but those of held-out domains."""
    target_text_key: str = "text"
    """Key, or column, of the text in the files of --target."""
    freeze: Path | None = None
    """A mixture.json whose domains keep their ratios: the fit searches over this mixture as one
    domain, called frozen, and the other domains of the corpus. The result is a mixture of all
    domains. Runs of --ratios must have these ratios."""
    sampling: MixtureSamplingOptions = dataclasses.field(default_factory=MixtureSamplingOptions)
    swarm: SwarmOptions = dataclasses.field(default_factory=SwarmOptions)

    def __post_init__(self) -> None:
        """Raise UserError for a single table, or for training options if tables are passed."""
        super().__post_init__()
        if (self.ratios is None) != (self.metrics is None):
            raise UserError("--ratios and --metrics must be used together; pass both tables")
        if self.target is None:
            self.reject_changed(["target_text_key"], "has no effect without --target")
        if self.swarm_dir is not None:
            self.reject_changed(["ratios", "metrics"], "--swarm-dir has these tables")
        if self.tables is not None:
            flag = "--ratios" if self.swarm_dir is None else "--swarm-dir"
            unused = ["num_proxies", "work_dir", "seed_noise", "sampling", "swarm"]
            self.reject_changed(unused, f"nothing is trained with {flag}")
        if self.freeze is not None:
            self.reject_changed(["seed_noise"], "no gain is predicted with --freeze")

    @property
    def tables(self) -> tuple[Path, Path] | None:
        """Tables of the mixtures and losses of existing runs; None to train proxies."""
        if self.swarm_dir is not None:
            return self.swarm_dir / RATIOS_NAME, self.swarm_dir / METRICS_NAME
        if self.ratios is None or self.metrics is None:
            return None
        return self.ratios, self.metrics

    @property
    def objective(self) -> str | None:
        """``--target``, or ``--tasks``; None stands for the mean of all losses."""
        return self.target or ",".join(self.swarm.downstream.tasks) or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions(CheckedOptions):
    """Sample the mixtures of a swarm, and write a folder for each member.

    The mixtures are those that compute_mixture samples with the same options; it accepts a
    generated swarm in WORK_DIR/swarm. A larger --num-proxies adds members to an existing swarm.
    """

    corpus: Path
    """Folder written by preprocess_data or import_corpus."""
    swarm_dir: Path
    """Folder of the swarm. Member 12 has the folder members/00012, with its mixture.json."""
    num_proxies: Repetitions
    """Members, each with its own mixture."""
    freeze: Path | None = None
    """A mixture.json whose domains keep their ratios in all members: the swarm samples mixtures of
    this mixture and the other domains of the corpus. Pass it to compute_mixture, too."""
    format: FormatName | None = None
    """Also write each mixture in this format of convert_mixture, with the files of the corpus."""
    sampling: MixtureSamplingOptions = dataclasses.field(default_factory=MixtureSamplingOptions)
    swarm: SwarmOptions = dataclasses.field(default_factory=SwarmOptions)

    def __post_init__(self) -> None:
        """Raise UserError for several rounds."""
        super().__post_init__()
        reason = "the mixtures of later rounds depend on losses; compute_mixture trains them"
        self.swarm.reject_changed(["rounds"], reason)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(CheckedOptions):
    """Train members of a generated swarm, with the options recorded in it.

    Finished members are skipped, and interrupted members resume. A member's losses do not depend on
    which process or machine trains it.
    """

    corpus: Path
    """The corpus of the swarm, or a copy of it."""
    swarm_dir: Path
    """Folder of the swarm, which all machines that train members share."""
    members: str | None = None
    """Train only the members FIRST:LAST that exist, or only this member; the first one is 0. Jobs
    that run concurrently must train different members. Default: all members."""
    ray: bool = False
    """Train each member as a task of the Ray cluster at $RAY_ADDRESS or on this machine; Ray is
    started if there is none. A member whose worker or machine dies is resumed elsewhere."""
    members_at_once: Count | None = None
    """Members trained concurrently on each device; default: as many as memory and CPU cores allow.
    With --ray, members that share a GPU (default: 1); on a CPU, each member has one core."""
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)

    def __post_init__(self) -> None:
        """Raise UserError for an invalid range, or a time limit with --ray."""
        super().__post_init__()
        _ = self.member_range  # raises for an invalid value
        if self.ray:
            self.stopping.reject_changed(["exit_duration_in_mins"], "not available with --ray")

    @property
    def member_range(self) -> tuple[int, int] | None:
        """First and last member; None for all members."""
        if self.members is None:
            return None
        first, colon, last = self.members.partition(":")
        bounds = (first, last if colon else first)
        if not all(each.isdecimal() for each in bounds) or int(bounds[0]) > int(bounds[1]):
            raise UserError(
                f"--members {self.members}: must be FIRST:LAST with 0 <= FIRST <= LAST, or one "
                "member"
            )
        return int(bounds[0]), int(bounds[1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectOptions(CheckedOptions):
    """Write the tables ratios.csv and metrics.csv of a swarm, which compute_mixture can fit."""

    swarm_dir: Path
    """Folder of the swarm."""
    losses: Path | None = None
    """CSV table of the held-out losses that another trainer measured, such as a W&B export of its
    runs: a row per run, whose name (column run, run_id, index or name) is that of the member's
    folder, such as 00012, or ends with it, as in swarm-00012. If there is a column State, only
    finished runs are read. Default: the losses that swarm run measured."""
    column: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction] = ()
    """NAME=COLUMN reads the loss on the domain or task NAME from a column of --losses. The option
    can be repeated, and accepts several values; only these columns are then read. Default: for
    each domain the column with its name, which may have affixes, such as eval/NAME/loss; never a
    training loss, such as train/NAME/loss."""

    def __post_init__(self) -> None:
        """Raise UserError for columns without a table."""
        super().__post_init__()
        if self.losses is None:
            self.reject_changed(["column"], "requires --losses")
