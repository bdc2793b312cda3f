"""What the ranks run and the tests look at: layouts, options and where each result lies.

No torch here: the process that runs pytest reads the results with numpy alone.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.options.data import DataOptions, Permutation
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from megatron_chameleon.options.parallel import ParallelOptions, TrainingParallelOptions
from megatron_chameleon.options.recompute import RecomputeOptions
from megatron_chameleon.options.training import (
    DocumentBoundaryOptions,
    DryFirstStep,
    OptimizerOptions,
    PretrainOptions,
)
from tests.small_corpus import VOCAB_SIZE

TRAIN_ITERS, SAVE_INTERVAL = 12, 6
MOST_RANKS = 4
# Layouts and processors add the same float32 numbers in different orders. These tolerances are in
# units of the last place: absolute for a loss, which is at most about that of a uniform guess, and
# relative for a gradient's norm. An error changes some loss by more than LEAST_DIFFERENCE.
EPSILON = float(np.finfo(np.float32).eps)
LOSS_ROUNDING, NORM_ROUNDING = 16 * EPSILON * math.log(VOCAB_SIZE), 128 * EPSILON
LEAST_DIFFERENCE = 1e-3
assert LEAST_DIFFERENCE > 50 * LOSS_ROUNDING


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, the ranks it takes, and what else is not as in the other runs."""

    ranks: int
    parallel: TrainingParallelOptions = dataclasses.field(default_factory=TrainingParallelOptions)
    boundaries: DocumentBoundaryOptions = dataclasses.field(default_factory=DocumentBoundaryOptions)
    micro_batch_size: int = 2
    """4 where ranks send each other most, which takes the time; that still makes two of a batch."""
    bf16: bool = False
    permutation: Permutation = "megatron"
    """In the orders that allow it, the weights change twice."""
    dry_first_step: DryFirstStep = "auto"


VIRTUAL: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
}


def interleaved(**more: Any) -> TrainingParallelOptions:
    """Two ranks of two virtual pipeline stages each, and what else is given."""
    return TrainingParallelOptions(**VIRTUAL, **more)


def overlapped(**more: Any) -> TrainingParallelOptions:
    """A sharded optimizer whose communication overlaps both passes, and what else is given."""
    return TrainingParallelOptions(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        **more,
    )


ONE = Case(1)
ONE_SHARDED = Case(1, TrainingParallelOptions(use_distributed_optimizer=True))
TP2 = Case(2, TrainingParallelOptions(tensor_model_parallel_size=2))
SP2 = Case(
    2,
    TrainingParallelOptions(tensor_model_parallel_size=2, sequence_parallel=True),
    micro_batch_size=4,
)
PP2 = Case(2, TrainingParallelOptions(pipeline_model_parallel_size=2))
DP2 = Case(2)
DP2_SHARDED = Case(2, TrainingParallelOptions(use_distributed_optimizer=True))
TP2_PP2 = Case(
    4,
    TrainingParallelOptions(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    micro_batch_size=4,
)
TP2_DP2_SHARDED = Case(
    4, TrainingParallelOptions(tensor_model_parallel_size=2, use_distributed_optimizer=True)
)

VPP2 = Case(2, interleaved())
FULL = RecomputeOptions(recompute_granularity="full")
BLOCK = RecomputeOptions("full", recompute_method="block", recompute_num_layers=3)
SELECTIVE = RecomputeOptions("selective")
TP2_SP_VPP2_FULL = Case(
    4,
    interleaved(tensor_model_parallel_size=2, sequence_parallel=True, recompute=FULL),
    micro_batch_size=4,
)
DP2_OVERLAPPED = Case(2, TrainingParallelOptions(overlap_grad_reduce=True))
DP2_SHARDED_OVERLAPPED = Case(2, overlapped())
TP2_SP_DP2_OVERLAPPED_SELECTIVE = Case(
    4, overlapped(tensor_model_parallel_size=2, sequence_parallel=True, recompute=SELECTIVE)
)
PP2_DP2_OVERLAPPED = Case(4, overlapped(pipeline_model_parallel_size=2))
VPP2_DP2_OVERLAPPED_FULL = Case(4, overlapped(**VIRTUAL, recompute=FULL))

RUNS = {
    "one": ONE,
    "one-again": ONE,
    "one-sharded": ONE_SHARDED,
    "tp2": TP2,
    "tp2-again": TP2,
    "sp2": SP2,
    "pp2": PP2,
    "dp2": DP2,
    "dp2-sharded": DP2_SHARDED,
    "tp2-pp2": TP2_PP2,
    "tp2-dp2-sharded": TP2_DP2_SHARDED,
    "one-full": Case(1, TrainingParallelOptions(recompute=FULL), micro_batch_size=8),
    "one-block": Case(1, TrainingParallelOptions(recompute=BLOCK)),
    "one-selective": Case(1, TrainingParallelOptions(recompute=SELECTIVE)),
    "vpp2": VPP2,
    "vpp2-selective": Case(2, interleaved(recompute=SELECTIVE)),
    "dp2-overlapped": DP2_OVERLAPPED,
    "dp2-sharded-overlapped": DP2_SHARDED_OVERLAPPED,
    "tp2-sp-vpp2-full": TP2_SP_VPP2_FULL,
    "tp2-sp-dp2-overlapped-selective": TP2_SP_DP2_OVERLAPPED_SELECTIVE,
    "pp2-dp2-overlapped": PP2_DP2_OVERLAPPED,
    "vpp2-dp2-overlapped-full": VPP2_DP2_OVERLAPPED_FULL,
}
"""Uninterrupted runs, by name."""

RUNS_BF16 = {
    f"{name}-bf16": dataclasses.replace(RUNS[name], bf16=True)
    for name in (
        "one",
        "tp2-sp-vpp2-full",
        "tp2-sp-dp2-overlapped-selective",
        "vpp2-dp2-overlapped-full",
    )
}
"""Runs in bfloat16 with main weights in float32."""

APART = DocumentBoundaryOptions(
    reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
)
RUNS_APART = {
    f"{name}-apart": dataclasses.replace(RUNS[name], boundaries=APART, micro_batch_size=size)
    for name, size in {
        "one": 2,
        "tp2": 8,
        "pp2": 2,
        "dp2": 4,
        "dp2-sharded": 1,
        "tp2-pp2": 1,
    }.items()
}
"""Runs that keep documents apart; micro-batches and ranks differ in how many tokens have a loss."""

ONE_CHANGING, DP2_CHANGING = Case(1, permutation="epoch"), Case(2, permutation="epoch")
ONE_FEISTEL, DP2_FEISTEL = Case(1, permutation="feistel"), Case(2, permutation="feistel")
RUNS_CHANGING = {
    "one-changing": ONE_CHANGING,
    "dp2-changing": DP2_CHANGING,
    "dp2-feistel": DP2_FEISTEL,
}
"""Runs whose weights change before and after the checkpoint in their middle."""

RUNS_DRY = {
    f"{name}-dry": dataclasses.replace(RUNS[name], dry_first_step="on")
    for name in ("dp2-sharded", "tp2-pp2", "vpp2-dp2-overlapped-full")
}
"""Runs that begin with a dry step."""
RESUMED_DRY = {f"{name}-resumed": name.removesuffix("-dry") for name in RUNS_DRY}
"""Runs that begin with one where they go on from the middle of another of their layout."""

NARROW_RUN = "tp2-narrow"
"""TP2 with an embedding padded to an even number of rows, where the others have 256."""
NARROW_MULTIPLE = 2

RESUMED = {
    "tp2-to-tp2": ("tp2", TP2),
    "tp2-to-pp2": ("tp2", PP2),
    "dp2-sharded-to-dp2-sharded": ("dp2-sharded", DP2_SHARDED),
    "dp2-sharded-to-one-sharded": ("dp2-sharded", ONE_SHARDED),
    "one-sharded-to-dp2-sharded": ("one-sharded", DP2_SHARDED),
    "tp2-dp2-sharded-to-one-sharded": ("tp2-dp2-sharded", ONE_SHARDED),
    "one-to-dp2": ("one", DP2),
    "tp2-pp2-to-one": ("tp2-pp2", ONE),
    "tp2-narrow-to-one": (NARROW_RUN, ONE),
    "one-changing-to-dp2": ("one-changing", DP2_CHANGING),
    "dp2-feistel-to-one": ("dp2-feistel", ONE_FEISTEL),
    "pp2-to-vpp2": ("pp2", VPP2),
    "vpp2-to-tp2": ("vpp2", TP2),
    "pp2-dp2-overlapped-to-one-sharded": ("pp2-dp2-overlapped", ONE_SHARDED),
    "vpp2-dp2-overlapped-full-to-tp2-dp2-sharded": ("vpp2-dp2-overlapped-full", TP2_DP2_SHARDED),
    "tp2-dp2-sharded-to-vpp2-dp2-overlapped-full": ("tp2-dp2-sharded", VPP2_DP2_OVERLAPPED_FULL),
    "vpp2-dp2-overlapped-full-to-vpp2-dp2-overlapped-full": (
        "vpp2-dp2-overlapped-full",
        VPP2_DP2_OVERLAPPED_FULL,
    ),
}
"""Runs that go on from the middle of another: name -> (that run, the new layout)."""

UNREPAIRED = ("no-repair", "zero-state-only", "shared-step-count")
"""Continuations of 'dp2-sharded' with fewer and fewer of the AdamW repairs missing."""


REWRITTEN = {"tp2-pp2": TP2_PP2, "sp2": SP2, "vpp2": VPP2, NARROW_RUN: TP2}
"""Layouts that read the checkpoint made of the folder of the run 'one', and write one each; the
last with another padding of the embedding."""


TUNED = {"tuned": ONE, "tuned-tp2-pp2": TP2_PP2, "tuned-vpp2": VPP2}
"""Runs that start from the folder of the run 'one', with rows added to its vocabulary."""
TUNED_FROM_CHECKPOINT = "tuned-from-checkpoint"
"""One that starts from the checkpoint made of that folder, without the rows."""
ADDED_ROWS = 61


@dataclasses.dataclass(frozen=True)
class Reading:
    """A read-out of the run 'one': its layout and batch size."""

    case: Case
    batch_size: int


READINGS = {
    "one": Reading(ONE, 32),
    "one-small-batch": Reading(ONE, 5),
    "tp2": Reading(TP2, 32),
    "sp2": Reading(SP2, 32),
    "pp2": Reading(PP2, 32),
    "dp2": Reading(DP2, 5),
    "dp2-idle-rank": Reading(DP2, 64),  # one batch a domain: the second rank gets none
    "tp2-pp2": Reading(TP2_PP2, 16),
}
NUM_WINDOWS = 48
LAYERS = (1, 3)
"""Layers embedded by every reading: of the first and of the last pipeline stage."""
NORMED_LAYER = 1
"""Here the final norm is applied, which the last pipeline stage alone holds."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Where everything lies below one folder."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def uneven_mixture(self) -> Path:
        """A mixture file of the corpus's domains."""
        return self.root / "uneven.json"

    def run(self, name: str) -> Path:
        return self.root / "runs" / name

    def huggingface(self, name: str) -> Path:
        """The Hugging Face folder made of a run, or of a checkpoint that a layout has rewritten."""
        return self.root / "huggingface" / name

    @property
    def padded(self) -> Path:
        """The folder of the run 'one' with rows in its vocabulary that no token has."""
        return self.huggingface("one-padded")

    def from_huggingface(self, name: str) -> Path:
        """The checkpoint made of the folder of the run 'one', as one rank or a layout wrote it."""
        return self.root / "from-huggingface" / name

    def mixture(self, reading: str, layer: int) -> Path:
        return self.root / "readings" / reading / f"layer-{layer}" / "mixture.json"

    def store(self, reading: str, layer: int) -> Path:
        return self.mixture(reading, layer).with_name("embeddings")

    def evaluation(self, reading: str) -> Path:
        return self.root / "readings" / reading / "perplexity.json"

    def evaluation_by_document(self, reading: str) -> Path:
        return self.root / "readings" / reading / "by-document.json"

    @property
    def reference(self) -> Path:
        """Hidden states and losses of the plain model, by :mod:`plain_readout`."""
        return self.root / "reference.npz"

    def failure(self, name: str) -> Path:
        """How a run without repairs ended, where it did not end well."""
        return self.root / "failures" / f"{name}.txt"

    def hook_flops(self, run: str) -> Path:
        """What the hook of a run has spent by each rank's count, one file a rank."""
        return self.root / "hook-flops" / run

    def done(self, section: str) -> Path:
        """Marks a section of the ranks' work as done."""
        return self.root / "done" / section

    @property
    def log(self) -> Path:
        return self.root / "ranks.log"


def training_options(places: Places, name: str, case: Case) -> PretrainOptions:
    """The run that every layout repeats: clipped gradients, weight decay, warm-up and decay."""
    return PretrainOptions(
        corpus=places.corpus,
        run_dir=places.run(name),
        model_size="nano",
        seq_length=32,
        train_iters=TRAIN_ITERS,
        global_batch_size=8,
        micro_batch_size=case.micro_batch_size,
        bf16=case.bf16,
        dry_first_step=case.dry_first_step,
        log_interval=1,
        save_interval=SAVE_INTERVAL,
        boundaries=case.boundaries,
        data=data_options(places, case),
        optimizer=OptimizerOptions(
            lr=3e-3,
            min_lr=1e-3,
            lr_warmup_iters=2,
            weight_decay=0.1,
            # Where the true gradient is zero, as of the keys' biases, AdamW would divide rounding
            # by rounding and take whole steps that every layout takes elsewhere.
            adam_eps=1e-4,
        ),
        parallel=case.parallel,
    )


def tuning_options(places: Places, name: str) -> PretrainOptions:
    """A run from trained weights that are not those of its seed."""
    is_folder = name in TUNED
    return dataclasses.replace(
        training_options(places, name, TUNED[name] if is_folder else ONE),
        model_size=None,
        seed=99,
        train_iters=3,
        pretrained_checkpoint=places.padded if is_folder else places.from_huggingface("one"),
    )


def data_options(places: Places, case: Case) -> DataOptions:
    if case.permutation == "megatron":
        return DataOptions()
    changes = (f"4={places.uneven_mixture}", f"{SAVE_INTERVAL + 3}=uniform")
    return DataOptions(mixture_change=(changes,), permutation=case.permutation)


def reading_layout(case: Case) -> ParallelOptions:
    """The part of a case's layout that tools which only read a model have."""
    fields = dataclasses.fields(ParallelOptions)
    return ParallelOptions(**{field.name: getattr(case.parallel, field.name) for field in fields})


def mixture_options(places: Places, name: str, layer: int) -> ChameleonOptions:
    """The mixture that the run 'one' gives, by one reading of one layer."""
    reading = READINGS[name]
    return ChameleonOptions(
        corpus=places.corpus,
        checkpoint=places.run("one"),
        output=places.mixture(name, layer),
        extraction=ExtractionOptions(
            layer=layer,
            final_norm=layer == NORMED_LAYER,
            num_windows=NUM_WINDOWS,
            embedding_batch_size=reading.batch_size,
        ),
        weighting=RecipeOptions(bootstrap_resamples=20),
        parallel=reading_layout(reading.case),
    )


def perplexity_options(places: Places, name: str) -> PerplexityOptions:
    """The held-out perplexity of the run 'one', by one reading."""
    reading = READINGS[name]
    return PerplexityOptions(
        corpus=places.corpus,
        checkpoint=places.run("one"),
        output=places.evaluation(name),
        evaluation_batch_size=reading.batch_size,
        parallel=reading_layout(reading.case),
    )


OVERLAP = 11


def by_document_options(places: Places, name: str) -> PerplexityOptions:
    """The same, every document by itself, in windows that overlap and end as documents do."""
    return dataclasses.replace(
        perplexity_options(places, name),
        packing="documents",
        overlap=OVERLAP,
        output=places.evaluation_by_document(name),
    )
