"""Data parallelism, AdamW and the learning-rate schedule, all megatron-core's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.finalize import finalize_gradients
from megatron_chameleon.training.fused_optimizer import use_fused_kernels
from megatron_chameleon.training.guards import GuardedOptimizer


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
