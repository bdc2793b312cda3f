"""Runs on the CPU and on the simulated device, and the tolerances between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

STEPS, LOG_INTERVAL, SAVE_INTERVAL = 6, 3, 3
STEPS_WITHOUT_LOGGING = (2, 3, 5, 6)
"""Steps that do not follow a logging, saving or dry step.

Logging, saving and dry steps also synchronize the host after they end; these synchronizations would
be counted in the next step.
"""

# The two runs add numbers in different orders, which changes fp32 losses by a relative 1e-7; losses
# are about 5. --adam-eps is much larger than the rounding errors of gradients, so the relative
# difference of updates is equally small. bf16 rounds each logit with a relative error of up to
# 2^-9; losses are means over 768 tokens. Real errors, such as a missing mask, change losses by more
# than 1e-2.
FP32_TOLERANCE, BF16_TOLERANCE = 1e-5, 2e-3

TRAINING_FLAGS = (
    *("--model", "nano", "--seq-length", "32", "--train-iters", str(STEPS)),
    *("--global-batch-size", "8", "--micro-batch-size", "2"),
    *("--lr", "3e-3", "--lr-warmup-iters", "2", "--adam-eps", "1e-4"),
)
PRETRAINING_FLAGS = (
    *TRAINING_FLAGS,
    *("--log-interval", str(LOG_INTERVAL), "--save-interval", str(SAVE_INTERVAL)),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A pretraining run on the device.

    Attributes:
        flags: flags in addition to PRETRAINING_FLAGS.
        ranks: number of ranks.
        reference: flags of a one-rank run on the CPU, whose losses must be the same.
        environment: additional environment variables.
        is_core: whether ``make test`` includes the run; otherwise, its tests are marked slow.
    """

    flags: tuple[str, ...] = ()
    ranks: int = 1
    reference: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_core: bool = False

    @property
    def tolerance(self) -> float:
        return BF16_TOLERANCE if "--bf16" in self.flags else FP32_TOLERANCE


LLAMA, QWEN2, QWEN3 = (("--model", f"{{models}}/{name}") for name in ("llama", "qwen2", "qwen3"))
BF16 = ("--bf16",)
SHARDED = ("--use-distributed-optimizer",)
OVERLAPPED = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
TENSOR = ("--tensor-model-parallel-size", "2")
TENSOR_SEQUENCE = (*TENSOR, "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PIPELINE, "--num-virtual-stages-per-pipeline-rank", "2")
MASKS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
WEIGHTED = (*MASKS, "--loss-weights", "news=0.5,code=2")
SEPARATED = ("--reset-attention-mask", "--eod-mask-loss")
FLEX = ("--document-attention", "flex")
VALIDATION = (
    *("--eval-interval", "3", "--eval-iters", "2", "--eval-first-step"),
    *("--target", "news=3,code"),
)
RECOMPUTATION = ("--recompute-granularity", "full")
DROPOUT = ("--hidden-dropout", "0.1")
FOUR_SAMPLES = ("--micro-batch-size", "4")
"""Overrides TRAINING_FLAGS: half as many communications, which dominate these layouts on a CPU."""
INTERPRETED = {"TRITON_INTERPRET": "1"}

TRAINING = {
    "fp32": Case(is_core=True),
    "bf16": Case((*QWEN3, *BF16), reference=(*QWEN3, *BF16), is_core=True),
    "overlapped-async": Case(
        (*QWEN2, *OVERLAPPED, "--async-save"), ranks=2, reference=QWEN2, is_core=True
    ),
    "tensor-sequence": Case(
        (*LLAMA, *TENSOR_SEQUENCE, *FOUR_SAMPLES), ranks=2, reference=LLAMA, is_core=True
    ),
    "interleaved": Case((*INTERLEAVED, *FOUR_SAMPLES), ranks=2, is_core=True),
    "data-parallel": Case(ranks=2),
    "tensor-pipeline": Case((*TENSOR, *PIPELINE), ranks=4),
    "bf16-tensor-interleaved": Case(
        (*BF16, *TENSOR_SEQUENCE, *INTERLEAVED, *SHARDED), ranks=4, reference=BF16
    ),
    "masks-weighted-data-parallel": Case(WEIGHTED, ranks=2, reference=WEIGHTED),
    "masks-recomputation-bf16": Case((*BF16, *MASKS, *RECOMPUTATION), reference=(*BF16, *MASKS)),
    # The option needs Triton, which is hidden unless it is interpreted.
    "flex-recomputation-bf16": Case(
        (*BF16, *MASKS, *FLEX, *RECOMPUTATION), reference=(*BF16, *MASKS), environment=INTERPRETED
    ),
    "flex-interleaved": Case(
        (*LLAMA, *SEPARATED, *FLEX, *INTERLEAVED, *FOUR_SAMPLES),
        ranks=2,
        reference=(*LLAMA, *SEPARATED),
        environment=INTERPRETED,
    ),
    "selective-recomputation": Case(("--recompute-granularity", "selective")),
    "validation-pipeline": Case((*VALIDATION, *PIPELINE), ranks=2, reference=VALIDATION),
    "dropout": Case(DROPOUT, reference=DROPOUT),
    "deterministic": Case(("--deterministic",), reference=("--deterministic",)),
    "kernels-bf16": Case(BF16, reference=BF16, environment=INTERPRETED),
}
EVERY_3 = ("--permutation", "epoch", "--online-interval", "3")
CHAMELEON = ("--online", "chameleon", "--online-windows", "4")
ONLINE = {
    "chameleon": (*EVERY_3, *CHAMELEON),
    # ODM reads the same losses as ADO.
    "ado": (*EVERY_3, "--online", "ado", "--online-warmup-iters", "0"),
}
