"""Data parallelism, AdamW and the learning-rate schedule, all megatron-core's own."""

from __future__ import annotations

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.parallel.layout import Layout


def data_parallel(model: torch.nn.Module, layout: Layout, *, bf16: bool) -> DistributedDataParallel:
    """``model`` with gradient buffers that are averaged over data-parallel ranks, in fp32."""
    return DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=layout.use_distributed_optimizer,
            grad_reduce_in_fp32=bf16,
        ),
        model,
    )


def build_optimizer(
    model: DistributedDataParallel, options: OptimizerOptions, layout: Layout, *, bf16: bool
) -> MegatronOptimizer:
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
    )
    optimizer = get_megatron_optimizer(
        config,
        [model],
        config_overrides=get_standard_config_overrides(config),
        use_gloo_process_groups=False,
    )
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
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
