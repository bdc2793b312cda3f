"""A model with all that it is trained by, as it was when the run's last checkpoint was written."""

from __future__ import annotations

import dataclasses

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import layers

from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.state import State, training_state
from megatron_chameleon.model.compiled_layers import compile_layers
from megatron_chameleon.model.gpt import build_model_chunks, unwrap
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.guards import GuardedOptimizer
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.passes import BatchShape, Passes
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.resume import Progress


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """This rank's chunks, one for each of its virtual pipeline stages, and what trains them."""

    chunks: list[DistributedDataParallel]
    optimizer: GuardedOptimizer
    scheduler: OptimizerParamScheduler
    passes: Passes

    @property
    def lr(self) -> float:
        """The learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> State:
        """What a checkpoint of it holds."""
        return training_state(self.chunks, self.optimizer, self.scheduler, is_loading=False)


def build_trained_model(
    plan: TrainingPlan, layout: Layout, progress: Progress, hook: TrainingHook | None = None
) -> TrainedModel:
    """Build what ``plan`` and ``hook`` ask for, as far as ``progress`` has come with it."""
    options = plan.options
    chunks = build_model_chunks(
        plan.shape,
        layout,
        options.seed,
        bf16=options.bf16,
        # The samples of one domain are not as many on every rank.
        per_token_loss=options.boundaries.eod_mask_loss
        or (hook is not None and hook.combines_gradients),
        recompute=options.parallel.recompute,
        # On the CPU all is deterministic, and the bits are those of a run without the option.
        deterministic=options.deterministic and layout.device.type == "cuda",
        # As megatron does by default. The compiler cannot trace Apex's kernel.
        gradient_accumulation_fusion=layers._grad_accum_fusion_available
        and layout.device.type == "cuda"
        and not options.compile_layers,
    )
    if plan.pretrained and not progress.checkpoint:
        # Before the optimizer, which takes its main weights from the model's.
        plan.pretrained.load(chunks)
    if options.compile_layers:
        for chunk in chunks:
            compile_layers(unwrap(chunk))
    wrapped = data_parallel(chunks, layout, bf16=options.bf16)
    optimizer = build_optimizer(wrapped, options.optimizer, layout, bf16=options.bf16)
    scheduler = build_scheduler(optimizer, options.optimizer, options.train_iters)
    if progress.checkpoint:
        load_training(progress.checkpoint, wrapped, optimizer, scheduler)
    passes = Passes(wrapped, batch_shape(plan, layout), len(plan.data.names))
    return TrainedModel(wrapped, optimizer, scheduler, passes)


def batch_shape(plan: TrainingPlan, layout: Layout) -> BatchShape:
    """How the global batch is cut up on each data-parallel rank."""
    options = plan.options
    unit = options.micro_batch_size * layout.data_size
    return BatchShape(
        num_microbatches=options.global_batch_size // unit,
        micro_batch_size=options.micro_batch_size,
        seq_length=options.seq_length,
    )
