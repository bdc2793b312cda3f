"""Data parallelism, AdamW and the learning-rate schedule, all megatron-core's own.

With neither Transformer Engine nor Apex, megatron-core updates parameters, clips gradients and
computes their norm one tensor after the other, and copies every tensor's norm to the host:
hundreds of waits a step. Here the update is one fused kernel, clipping a few, and the norm is
copied once. megatron-core also copies bf16 weights back one tensor after the other; here that is
one kernel too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    ChainedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import layers, param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.state import State, training_state
from megatron_chameleon.model.compiled_layers import compile_layers
from megatron_chameleon.model.gpt import build_model_chunks, unwrap
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.checkpointing import Progress
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import BatchShape, Passes, finalize_gradients

if TYPE_CHECKING:
    from megatron_chameleon.training.hook import TrainingHook


def data_parallel(
    model: Sequence[torch.nn.Module], layout: Layout, *, bf16: bool
) -> list[DistributedDataParallel]:
    """The chunks of ``model`` with gradients that data-parallel ranks average, in fp32."""
    wrapped = [
        DistributedDataParallel(
            chunk.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=layout.use_distributed_optimizer,
                overlap_grad_reduce=layout.overlap_grad_reduce,
                overlap_param_gather=layout.overlap_param_gather,
                grad_reduce_in_fp32=bf16,
            ),
            chunk,
            # The communication of later chunks hides behind the earlier ones' computation.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(model)
    ]
    if layout.overlap_grad_reduce:
        _reduce_after_the_last_micro_batch(wrapped)
    return wrapped


def _reduce_after_the_last_micro_batch(model: list[DistributedDataParallel]) -> None:
    """Tell schedules, by the config that the chunks share, when gradients may be sent.

    Stages after the first hold theirs back until all can send at once, as Megatron does unless
    told otherwise.
    """
    config = model[0].config
    no_sync = [chunk.no_sync for chunk in model]
    start_sync = [chunk.start_grad_sync for chunk in model]
    config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]
    config.grad_sync_func = start_sync if len(model) > 1 else start_sync[0]


def build_optimizer(
    model: Sequence[DistributedDataParallel],
    options: OptimizerOptions,
    layout: Layout,
    *,
    bf16: bool,
) -> GuardedOptimizer:
    """AdamW on matrices with weight decay, on vectors without; gradients clipped globally."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=layout.use_distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
    )
    # The distributed optimizer keeps views of the parameters. With a gradient they would hold, out
    # of Python's sight, what holds the model: neither would ever be freed in this process.
    with torch.no_grad():
        wrapped = get_megatron_optimizer(
            config,
            list(model),
            config_overrides=get_standard_config_overrides(config),
            use_gloo_process_groups=False,
        )
    optimizer = GuardedOptimizer(wrapped)
    use_fused_kernels(optimizer)
    config_of_chunks = model[0].config  # one object, whatever their number
    config_of_chunks.grad_scale_func = optimizer.scale_loss
    config_of_chunks.finalize_model_grads_func = finalize_gradients
    return optimizer


def build_scheduler(
    optimizer: MegatronOptimizer, options: OptimizerOptions, train_iters: int
) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then a cosine to ``min_lr`` at the last step. Counts in steps."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters,
        lr_decay_steps=train_iters,
        lr_decay_style="cosine",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def accept_every_step(_grad_norm: float) -> bool:
    """What an optimizer does without a guard."""
    return True


class GuardedOptimizer(ChainedOptimizer):
    """megatron's optimizer, which asks before it updates the model.

    What it asks with is the gradient's norm that clipping needs on the host anyway. A refused step
    changes neither the weights nor the moments, and ``step`` returns False as its first value, as
    megatron does where a loss scale overflows.
    """

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        super().__init__(optimizer.chained_optimizers)
        self.accepts: Callable[[float], bool] = accept_every_step
        self._grad_norm = 0.0

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """The global norm of the gradient, before clipping: the same on every rank.

        As megatron's, which counts one of several copies of a gradient; but a copy that is not
        finite, on whichever rank, makes the norm nan.
        """
        counted = [
            gradient
            for part in self.chained_optimizers
            for gradient in part.get_main_grads_for_grad_norm()
        ]
        uncounted = [
            parameter.grad
            for part in self.chained_optimizers
            for parameter in part.get_parameters()
            if parameter.grad is not None and not is_counted(parameter)
        ]
        self._grad_norm = float(
            get_grad_norm_fp32(
                with_copies(counted, uncounted),
                grad_stats_parallel_group=self.get_grad_stats_parallel_group(),
            )
        )
        return self._grad_norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Update the model, if the step is accepted; whether it was."""
        return self.accepts(self._grad_norm) and bool(super().step_with_ready_grads())


def is_counted(parameter: torch.nn.Parameter) -> bool:
    """Whether the gradient's norm counts this rank's gradient, as megatron does it.

    Of vectors that tensor-parallel ranks hold alike, the first one's are counted; of the tied
    embeddings, the first pipeline stage's.
    """
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def with_copies(
    counted: Sequence[torch.Tensor], uncounted: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients whose norm is that of ``counted``, to the bit, and nan if a copy is not finite.

    Nothing is reduced over ranks or read for it that is not for the norm: 0 is added to the
    smallest gradient, or what 0 times the copies' norm is otherwise.
    """
    if not uncounted:
        return list(counted)
    flag = 0.0 * torch.nn.utils.get_total_norm(uncounted)
    if not counted:
        return [flag.view(1)]
    smallest = min(range(len(counted)), key=lambda number: counted[number].numel())
    return [
        gradient + flag if number == smallest else gradient
        for number, gradient in enumerate(counted)
    ]


def use_fused_kernels(optimizer: MegatronOptimizer) -> None:
    """Let ``optimizer``, and megatron's gradient clipping, use torch's fused kernels.

    What Transformer Engine or Apex brings is left alone.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, (DistributedOptimizer, Float16OptimizerWithFloat16Params)):
            part._copy_main_params_to_model_params = functools.partial(write_back, part)
        if isinstance(part.optimizer, torch.optim.AdamW):
            _fuse(part.optimizer)
            # A checkpoint brings the settings of its parameter groups along.
            part.optimizer.register_load_state_dict_post_hook(_fuse)
    # megatron chooses these functions when it is imported, and takes no others by argument.
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


def write_back(optimizer: DistributedOptimizer | Float16OptimizerWithFloat16Params) -> None:
    """Copy the fp32 main weights, or this rank's shard of them, to the model's bf16 weights.

    As megatron's ``_copy_main_params_to_model_params``, with one kernel. The main weights of an
    fp32 model are the model's own.
    """
    if isinstance(optimizer, DistributedOptimizer):
        targets, sources = _shards(optimizer)
    else:
        targets, sources = optimizer._get_model_and_main_params_data_float16()
    if targets:
        torch._foreach_copy_(targets, sources)


def _shards(optimizer: DistributedOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's shard of each bf16 weight, flat, in the buffer that is gathered; and its fp32."""
    if optimizer.is_stub_optimizer:  # a rank without parameters
        return [], []
    parameters = [p for group in optimizer.model_float16_groups for p in group]
    targets = []
    for parameter in parameters:
        buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
        place = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
        weights = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
        targets.append(weights[place.start : place.end])
    return targets, [main for group in optimizer.shard_fp32_from_float16_groups for main in group]


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if "step" in state:  # the fused kernel reads it on the parameter's device
            state["step"] = state["step"].to(parameter.device, torch.float32)


def l2_norm(
    _chunk_size: int,
    _overflow: torch.Tensor,
    tensor_lists: Sequence[list[torch.Tensor]],
    _per_tensor: bool,
    *_more: Any,
) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, [1] in float32, left on their device; as amp_C's function."""
    (tensors,) = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).float().view(1), None


def scale(
    _chunk_size: int,
    _overflow: torch.Tensor,
    tensor_lists: Sequence[list[torch.Tensor]],
    factor: float,
) -> None:
    """Write ``factor`` times the first list's tensors to the second's; as amp_C's function."""
    sources, targets = tensor_lists
    if any(s.data_ptr() != t.data_ptr() for s, t in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


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
