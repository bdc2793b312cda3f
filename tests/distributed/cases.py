"""Layouts, options and result paths of the sections that ranks.py runs and the tests check.

This module does not import torch: the process that runs pytest reads the results with numpy.
"""

from __future__ import annotations

import dataclasses
import math
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from megatron_chameleon.blend.options import DataOptions, DocumentBoundaryOptions, Permutation
from megatron_chameleon.methods.online.options import OnlineOptions
from megatron_chameleon.model.options import ArchitectureOptions
from megatron_chameleon.parallel.options import (
    ParallelOptions,
    RecomputeOptions,
    TrainingParallelOptions,
)
from megatron_chameleon.training.options import (
    CheckpointingOptions,
    DryFirstStep,
    GuardOptions,
    Optimizer,
    OptimizerOptions,
    PretrainOptions,
    ReloadOptions,
    TargetOptions,
    ValidationOptions,
)
from tests.families import FAMILIES
from tests.small_corpus import VOCAB_SIZE

TRAIN_ITERS, SAVE_INTERVAL = 12, 6
COUNTED_STEP = 3
"""Step of a run, counted from its start or resume, whose communication is counted."""
PROXY_ITERS, PROXY_SAVE_INTERVAL = 6, 3
"""Steps of the proxies of DoReMi and DoGE."""
MAX_RANKS = 4
# The order in which float32 numbers are added depends on the layout and the processor. The
# tolerance of losses is absolute, since losses are at most about the logarithm of the vocabulary
# size; the tolerance of gradient norms is relative. A real error changes some loss by more than
# SMALLEST_ERROR.
EPSILON = float(np.finfo(np.float32).eps)
LOSS_ROUNDING, NORM_ROUNDING = 16 * EPSILON * math.log(VOCAB_SIZE), 128 * EPSILON
SMALLEST_ERROR = 1e-3
assert SMALLEST_ERROR > 50 * LOSS_ROUNDING


@dataclasses.dataclass(frozen=True)
class Case:
    """A parallel layout, its number of ranks, and the options in which runs differ."""

    ranks: int
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)
    boundaries: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)
    micro_batch_size: int = 2
    """Samples per micro-batch. Layouts dominated by communication use 4, which still leaves two
    micro-batches per batch."""
    bf16: bool = False
    permutation: Permutation = "megatron"
    """Sample order. If it is not 'megatron', the mixture weights change twice during the run."""
    dry_first_step: DryFirstStep = "auto"
    model: str = "nano"
    """Name of a preset, or of a family in tests/families.py."""
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    optimizer: Optimizer = "adam"
    mup_base_hidden_size: int | None = None
    loss_weights: str | None = None


Again = dict[str, tuple[str, Case]]
"""Runs that resume a copy of another run from its middle: name -> (other run, layout)."""

VIRTUAL: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
}
FULL = RecomputeOptions("full")
BLOCK = RecomputeOptions("full", recompute_method="block", recompute_num_layers=3)
SELECTIVE = RecomputeOptions("selective")


def case(ranks: int, micro_batch_size: int = 2, **parallel: Any) -> Case:
    """Return a case with ``tp`` and ``pp`` degrees and further TrainingParallelOptions."""
    degrees = {
        "tensor_model_parallel_size": parallel.pop("tp", 1),
        "pipeline_model_parallel_size": parallel.pop("pp", 1),
    }
    options = TrainingParallelOptions(**{**degrees, **parallel})
    return Case(ranks, options, micro_batch_size=micro_batch_size)


def of_model(model: str, case: Case, **changes: Any) -> Case:
    """Return ``case`` with another model and further changes."""
    return dataclasses.replace(case, model=model, **changes)


OVERLAPPED: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
RUNS = {
    "one": case(1),
    "one-sharded": case(1, use_distributed_optimizer=True),
    "tp2": case(2, 4, tp=2),
    "sp2": case(2, 4, tp=2, sequence_parallel=True),
    "sp2-block": case(2, 4, tp=2, sequence_parallel=True, recompute=BLOCK),
    "pp2": case(2, pp=2),
    "vpp2": case(2, **VIRTUAL),
    "dp2": case(2),
    "dp2-sharded": case(2, use_distributed_optimizer=True),
    "dp2-overlapped": case(2, **OVERLAPPED),
    "tp2-pp2": case(4, 4, tp=2, pp=2),
    "tp2-sp-dp2-overlapped-selective": case(
        4, tp=2, sequence_parallel=True, **OVERLAPPED, recompute=SELECTIVE
    ),
    "vpp2-dp2-overlapped-full": case(4, **VIRTUAL, **OVERLAPPED, recompute=FULL),
}
"""Uninterrupted runs."""
ONE, TP2, SP2, PP2, VPP2, DP2 = (RUNS[n] for n in ("one", "tp2", "sp2", "pp2", "vpp2", "dp2"))
DP2_SHARDED, TP2_PP2 = RUNS["dp2-sharded"], RUNS["tp2-pp2"]

OTHER_FAMILIES = tuple(family for family in FAMILIES if family != "gpt2")
"""Families besides GPT-2, whose models the other runs train."""
FAMILY_LAYOUTS = (
    "one",
    "tp2-pp2",
    "tp2-sp-dp2-overlapped-selective",
    "vpp2-dp2-overlapped-full",
)
"""Layouts that together use every kind of parallelism, of recomputation and of optimizer."""
RUNS_FAMILIES = {
    f"{name}-{family}": of_model(family, RUNS[name])
    for family in OTHER_FAMILIES
    # The proxies of DoReMi are models of Qwen2, and train in further layouts.
    for name in (("one", "sp2") if family == "qwen2" else FAMILY_LAYOUTS)
}

RUNS_BF16 = {
    f"{name}-bf16": of_model("qwen3", RUNS[name], bf16=True)
    for name in ("one", "vpp2-dp2-overlapped-full")
}
"""Runs in bfloat16 with main weights in float32."""

APART = DocumentBoundaryOptions(
    reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
)
RUNS_APART = {
    f"{name}-apart": dataclasses.replace(RUNS[name], boundaries=APART, micro_batch_size=size)
    for name, size in {"one": 2, "pp2": 2, "dp2-sharded": 1}.items()
}
"""Runs that separate documents. The number of losses differs among micro-batches and ranks."""

RUNS_CHANGING = {
    "one-changing": Case(1, permutation="epoch"),
    "dp2-changing": Case(2, permutation="epoch"),
}
"""Runs whose mixture weights change once before and once after the checkpoint in the middle."""
RUNS_DROPOUT = {
    f"{name}-dropout": dataclasses.replace(RUNS[name], micro_batch_size=4, hidden_dropout=0.2)
    for name in ("one", "tp2")
}
"""Runs with dropout of hidden states, whose masks the tensor-parallel ranks share."""
RELEASE = Version(version("megatron-core")).release
# Muon and muP need releases of megatron-core for Python 3.12; Muon also needs a package.
HAS_MUON = RELEASE >= (0, 18) and find_spec("emerging_optimizers") is not None
MUON_LAYOUTS = ("one", "dp2", "pp2", "tp2") if HAS_MUON else ()
RUNS_MUON = {
    f"{name}-muon": dataclasses.replace(RUNS[name], optimizer="muon", micro_batch_size=4)
    for name in MUON_LAYOUTS
}
MUP_LAYOUTS = ("one", "tp2-pp2", "dp2-overlapped") if RELEASE >= (0, 19) else ()
RUNS_MUP = {
    f"{name}-mup": dataclasses.replace(RUNS[name], mup_base_hidden_size=16) for name in MUP_LAYOUTS
}
RUNS_WEIGHTED = {
    f"{name}-weighted": dataclasses.replace(
        RUNS[name], boundaries=APART, loss_weights="news=0.25,code=3"
    )
    for name in ("one", "sp2", "vpp2", "dp2")
}
"""Runs with --loss-weights, in which the number of losses differs among micro-batches."""
DROPOUTS = "sp2-dropouts"
"""A run with every dropout: under sequence parallelism, all masks differ between the ranks."""
UNINTERRUPTED = {
    **RUNS,
    **RUNS_BF16,
    **RUNS_APART,
    **RUNS_CHANGING,
    **RUNS_DROPOUT,
    **RUNS_WEIGHTED,
    **RUNS_MUON,
    **RUNS_MUP,
    DROPOUTS: dataclasses.replace(SP2, hidden_dropout=0.2, attention_dropout=0.2),
    **RUNS_FAMILIES,
}

DRY_RUN = "dp2-sharded-dry"
"""A run of DP2_SHARDED whose first step is preceded by a dry run."""

RESUMED: Again = {
    f"{origin}-to-{name}": (origin, UNINTERRUPTED[name])
    for origin, name in (
        ("tp2", "pp2"),
        ("dp2-sharded", "one-sharded"),
        ("tp2-pp2", "one"),
        ("sp2", "sp2"),
        ("tp2-dropout", "one-dropout"),
        *(("tp2-pp2-mup", "one-mup") for _ in MUP_LAYOUTS[:1]),
        *((f"{name}-muon", f"{name}-muon") for name in MUON_LAYOUTS if name in ("dp2", "tp2")),
        (DROPOUTS, DROPOUTS),
        ("vpp2-dp2-overlapped-full", "vpp2-dp2-overlapped-full"),
        ("tp2-pp2-llama", "one-llama"),
        ("vpp2-dp2-overlapped-full-llama", "tp2-sp-dp2-overlapped-selective-llama"),
        ("tp2-sp-dp2-overlapped-selective-qwen3", "vpp2-dp2-overlapped-full-qwen3"),
    )
} | {
    "one-changing-to-dp2": ("one-changing", RUNS_CHANGING["dp2-changing"]),
    "dp2-sharded-to-dp2-sharded": (
        "dp2-sharded",
        dataclasses.replace(DP2_SHARDED, dry_first_step="on"),
    ),
}

TRACED, RETRACED = "one-changing", "one-changing-to-dp2"
"""A run of one rank, and its resumption on two ranks, which record the batches that they read."""

# Runs with validation and a target, in which one rank has a NaN gradient in two steps.
BAD = {f"{name}-bad": RUNS[name] for name in ("one", "vpp2", "dp2")}
"""Until its first NaN gradient, each run equals the run of the same name without "-bad"."""
EVAL_INTERVAL = 4
BAD_STEPS = (6, 7)
"""Steps with a NaN gradient; a checkpoint is due at the first of these steps."""


def one_rank(name: str) -> str:
    """Return the one-rank run with the same losses as run ``name``."""
    if name in RUNS:
        return "one"
    family, suffix = name.split("-")[0], name.rpartition("-")[2]
    kinds = ("bf16", "apart", "changing", "dropout", "weighted", "muon", "mup", "bad")
    if suffix in (*kinds, *OTHER_FAMILIES):
        return f"one-{suffix}"
    return "doremi-one-masked" if suffix == "masked" else f"{family}-one"


# Runs in which the disk of one rank is full during a save.
SAVING_INTERVAL = 3
FULL_FROM, FULL_UNTIL = 6, 9
"""The disk is full from step FULL_FROM to the step before FULL_UNTIL, so that one save fails."""


@dataclasses.dataclass(frozen=True)
class SavingCase:
    """A run with a full disk on one rank; ``origin`` is the same run without this fault."""

    origin: str
    async_save: bool
    full_rank: int


SAVING = {
    "dp2-sharded-async-full": SavingCase("dp2-sharded", async_save=True, full_rank=1),
    "pp2-full": SavingCase("pp2", async_save=False, full_rank=0),
}


ONLINE = {
    "online-one": of_model("llama", ONE),
    "online-sp2": of_model("llama", SP2),
    # Each domain has only one batch of windows, which rank 0 embeds; it must not wait for rank 1.
    "online-dp2-overlapped": of_model("llama", RUNS["dp2-overlapped"], micro_batch_size=4),
    # ODM reads the same all-reduced losses as ADO.
    "ado-one": ONE,
    "ado-pp2": PP2,
    "aioli-one": ONE,
    "aioli-vpp2": VPP2,
}
ONLINE_AGAIN: Again = {"online-one-to-vpp2": ("online-one", of_model("llama", VPP2))}
RELOADED = {"reload-one": ONE, "reload-dp2": DP2}
"""Runs with --reload-mixture, whose file only rank 0 may read."""
ONLINE_LAYER = 3
"""A layer of the last pipeline stage or, with interleaved stages, of the first rank's second
chunk."""
ONLINE_INTERVAL = 4
ONLINE_OPTIONS = {
    "online": OnlineOptions(  # the windows do not divide evenly among ranks or batches
        online="chameleon",
        online_interval=ONLINE_INTERVAL,
        online_windows=3,
        online_layer=ONLINE_LAYER,
        online_recipe="scaled",
    ),
    "ado": OnlineOptions(
        online="ado",
        online_interval=ONLINE_INTERVAL,
        online_smoothing=0.5,
        online_warmup_iters=0,
    ),
    "aioli": OnlineOptions(  # the mixture is also perturbed in steps 2 to 4 and 6 to 8
        online="aioli",
        online_interval=ONLINE_INTERVAL,
        online_windows=3,
        aioli_steps=1,
        aioli_sweeps=1,
    ),
}
"""First part of a run's name -> options that change the mixture after steps 4 and 8."""

MASKED = DocumentBoundaryOptions(eod_mask_loss=True)
DOREMI = {
    **{
        f"doremi-{name}": of_model("qwen2", RUNS[name])
        for name in ("one", "vpp2", "dp2-overlapped")
    },
    # Document masks make the number of losses differ among micro-batches and ranks.
    "doremi-one-masked": of_model("qwen2", ONE, boundaries=MASKED),
    "doremi-dp2-masked": of_model("qwen2", DP2, boundaries=MASKED, micro_batch_size=1),
}
"""Layouts of DoReMi's proxy runs."""
DOREMI_AGAIN: Again = {"doremi-vpp2-to-sp2": ("doremi-vpp2", of_model("qwen2", SP2))}

DOGE = {
    "doge-one": of_model("qwen3", ONE),
    "doge-pp2": of_model("qwen3", PP2),
    "doge-tp2-dp2-sharded": of_model("qwen3", case(4, tp=2, use_distributed_optimizer=True)),
    # One of the four ranks has none of the three held-out samples of a step.
    "doge-dp4": of_model("qwen3", case(4)),
}
NO_GAIN = "without-gain"
DOGE_AGAIN: Again = {"doge-one-to-tp2": ("doge-one", of_model("qwen3", TP2))}

DISCOVERING = {f"discover-{name}": RUNS[name] for name in ("one", "dp2")}
EMBEDDING = {f"bert-{name}": RUNS[name] for name in ("one", "dp2")}
"""Layouts that embed with a BERT of transformers, which has another tokenizer than the corpus."""
PEAKS = {
    "peak-sp2": of_model("qwen3", SP2),
    "peak-pp2": of_model("llama", PP2),
    "peak-dp2-sharded": DP2_SHARDED,
}
"""Layouts whose peak memory is measured on every rank."""

NARROW = "tp2-narrow"
"""TP2 whose embedding is padded to an even number of rows; other layouts pad it to 256 rows."""
NARROW_MULTIPLE = 2
REWRITTEN = {"vpp2": VPP2, NARROW: TP2}
"""Layouts that load the checkpoint converted from the Hugging Face folder, and save it again."""
TUNED = {"tuned-vpp2": VPP2, "tuned-tp2": TP2}
"""Runs that start from the Hugging Face folder, with rows added to its embedding."""
TUNED_FROM_CHECKPOINT = "tuned-from-checkpoint"
"""A run that starts from the converted checkpoint of the Hugging Face folder, without added
rows."""
ADDED_ROWS = 61


READ = "one-llama"
"""The run whose model is embedded with, evaluated, and converted to a Hugging Face folder and
back."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Layout and batch size that are used to embed and evaluate with the model of the run READ."""

    case: Case
    batch_size: int


READINGS = {
    "one": Reading(ONE, 32),
    "sp2": Reading(SP2, 32),
    "dp2-idle-rank": Reading(DP2, 64),  # a domain has one batch, so rank 1 has none
    "tp2-pp2": Reading(TP2_PP2, 24),
}
NUM_WINDOWS = 48
LAYERS = (1, 3)
"""Layers whose outputs every reading embeds, one each of the first and last pipeline stage."""
NORMED_LAYER = 1
"""The layer whose embeddings also pass the final norm, which is on the last pipeline stage."""
OVERLAP = 11

DOWNSTREAM = {
    "pp2-dp2": ParallelOptions(pipeline_model_parallel_size=2),
    "tp2-sp-pp2": ParallelOptions(2, 2, sequence_parallel=True),
}

# faults.py launches a run whose second rank is killed, a run that is stopped, and commands with
# user errors.
KILLED_RUN, STOPPED_RUN = "killed", "stopped"
KILLS = ("in-save", "in-async-save", "never")
STOPS = ("SIGUSR1", "SIGTERM", "--exit-duration-in-mins")
STOPPED_ITERS = 400
MISTAKES = {
    "heads": ("--model", "1.2b", "--run-dir", "{root}/runs/mistake"),
    "unwritable": ("--model", "nano", "--run-dir", "{root}/corpus/corpus.json/run"),
}
"""User errors. All ranks detect the first error; only rank 0 detects the second error."""
MORE_BYTES = 256 << 20

COMPILED = {
    "sp2-selective-qwen3": dataclasses.replace(SP2.parallel, recompute=SELECTIVE),
    "pp2-full-qwen2": dataclasses.replace(PP2.parallel, recompute=FULL),
    "vpp2-llama": VPP2.parallel,
}
"""Layouts whose layers are compiled; the name of a case ends with the family of its model."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Paths of inputs and results, below one folder."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def uneven_mixture(self) -> Path:
        """A mixture with unequal weights of the corpus's domains."""
        return self.root / "uneven.json"

    def model(self, name: str) -> str:
        """Value of ``--model`` for a preset or a family."""
        folder = self.root / "models" / name
        return str(folder) if folder.exists() else name

    def run(self, name: str) -> Path:
        return self.root / "runs" / name

    def huggingface(self, name: str) -> Path:
        """The Hugging Face folder converted from a run or from a checkpoint of REWRITTEN."""
        return self.root / "huggingface" / name

    def from_huggingface(self, name: str) -> Path:
        """The checkpoint that ``name`` saved after it loaded the converted Hugging Face folder."""
        return self.root / "from-huggingface" / name

    @property
    def megatron(self) -> Path:
        """Folder with a checkpoint of Megatron-LM, and the logits before and after reading it."""
        return self.root / "megatron"

    def mixture(self, reading: str, layer: int) -> Path:
        return self.root / "readings" / reading / f"layer-{layer}" / "mixture.json"

    def evaluation(self, reading: str, packing: str = "packed") -> Path:
        return self.root / "readings" / reading / f"{packing}.json"

    @property
    def reference(self) -> Path:
        """File with hidden states and losses of the plain model."""
        return self.root / "reference.npz"

    def peaks(self, section: str) -> Path:
        """File with the peak memory of each rank in bytes."""
        return self.root / "peaks" / f"{section}.json"

    def batches(self, section: str, data_rank: int) -> Path:
        """File with the windows that a data-parallel rank of a run in TRACED has read."""
        return self.root / "batches" / f"{section}-{data_rank}.json"

    @property
    def downstream(self) -> Path:
        """Folder with the checkpoint of a text model, the task data and the results."""
        return self.root / "downstream"

    def opened(self, run: str, rank: int) -> Path:
        """File with the names of the token files that a rank of a run opened before the steps."""
        return self.root / "opened" / run / f"{rank}.json"

    def communication(self, run: str, rank: int) -> Path:
        """File with the calls and bytes of each collective of a rank in COUNTED_STEP."""
        return self.root / "communication" / run / f"{rank}.json"

    def done(self, section: str) -> Path:
        """File that exists once the section is finished."""
        return self.root / "done" / section

    @property
    def log(self) -> Path:
        return self.root / "ranks.log"


def training_options(places: Places, name: str, case: Case) -> PretrainOptions:
    """Options of a run in one layout, with gradient clipping, weight decay and a warm-up."""
    data = DataOptions()
    if case.permutation != "megatron":
        # The checkpoint of SAVE_INTERVAL is within a ramp.
        last = SAVE_INTERVAL + 3
        changes = (f"4..{last}={places.uneven_mixture}", f"{last}=uniform")
        data = DataOptions(mixture_change=(changes,), permutation=case.permutation)
    return PretrainOptions(
        corpus=places.corpus,
        run_dir=places.run(name),
        model=places.model(case.model),
        architecture=ArchitectureOptions(
            use_mup=case.mup_base_hidden_size is not None,
            mup_base_hidden_size=case.mup_base_hidden_size,
        ),
        seq_length=32,
        train_iters=TRAIN_ITERS,
        global_batch_size=8,
        micro_batch_size=case.micro_batch_size,
        bf16=case.bf16,
        hidden_dropout=case.hidden_dropout,
        attention_dropout=case.attention_dropout,
        dry_first_step=case.dry_first_step,
        loss_weights=case.loss_weights,
        log_interval=1,
        save_interval=SAVE_INTERVAL,
        boundaries=case.boundaries,
        data=data,
        optimizer=OptimizerOptions(
            optimizer=case.optimizer,
            lr=3e-3,
            min_lr=1e-3,
            lr_warmup_iters=2,
            weight_decay=0.1,
            # The exact gradient of the keys' biases is zero. With a small epsilon, AdamW would
            # divide one rounding error by another, and make large updates that differ between
            # layouts.
            adam_eps=1e-4,
        ),
        parallel=case.parallel,
    )


def tuning_options(places: Places, name: str) -> PretrainOptions:
    """Options of a run that starts from trained weights instead of random weights."""
    is_folder = name in TUNED
    start = places.huggingface("one-padded") if is_folder else places.from_huggingface("one")
    return dataclasses.replace(
        training_options(places, name, TUNED[name] if is_folder else ONE),
        model=None,
        seed=99,
        train_iters=3,
        pretrained_checkpoint=start,
    )


def bad_options(places: Places, name: str) -> PretrainOptions:
    return dataclasses.replace(
        training_options(places, name, BAD[name]),
        guards=GuardOptions(max_consecutive_skipped_steps=3),
        validation=ValidationOptions(eval_interval=EVAL_INTERVAL, eval_iters=3),
        target=TargetOptions("news=3,code"),
        checkpointing=CheckpointingOptions(async_save=name != "one-bad"),
    )


def saving_options(places: Places, name: str, case: Case, *, async_save: bool) -> PretrainOptions:
    return dataclasses.replace(
        training_options(places, name, case),
        save_interval=SAVING_INTERVAL,
        checkpointing=CheckpointingOptions(async_save=async_save, keep_last_checkpoints=3),
    )


def online_options(places: Places, name: str, case: Case) -> PretrainOptions:
    return dataclasses.replace(
        training_options(places, name, case),
        data=DataOptions(permutation="epoch"),
        online=ONLINE_OPTIONS[name.partition("-")[0]],
    )


def reload_options(places: Places, name: str, case: Case) -> PretrainOptions:
    return dataclasses.replace(
        training_options(places, name, case),
        data=DataOptions(permutation="epoch"),
        reload=ReloadOptions(places.uneven_mixture, reload_interval=ONLINE_INTERVAL),
    )


def reading_layout(case: Case) -> ParallelOptions:
    """Return the layout options that evaluation and embedding support, too."""
    fields = dataclasses.fields(ParallelOptions)
    return ParallelOptions(**{field.name: getattr(case.parallel, field.name) for field in fields})
