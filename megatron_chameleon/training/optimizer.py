"""Model, data parallelism, AdamW and learning-rate schedule of a run, from megatron-core.

Without Transformer Engine and Apex, megatron-core updates parameters, clips gradients and computes
their norm tensor by tensor, and copies every tensor's norm to the host: hundreds of
synchronizations per step. Here, one fused kernel updates all parameters, a few kernels clip all
gradients, and only the global norm is copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

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
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import layers, param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.load import load_training
from megatron_chameleon.checkpoint.state import State, training_state
from megatron_chameleon.model.compiled_layers import compile_layers
from megatron_chameleon.model.gpt import build_model_chunks, unwrap
from megatron_chameleon.model.initialization import POSITION_EMBEDDINGS
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.options import OptimizerOptions, check_muon
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.step import BatchShape, Passes, finalize_gradients


def data_parallel(
    model: Sequence[torch.nn.Module], layout: Layout, *, bf16: bool
) -> list[DistributedDataParallel]:
    """Wrap the chunks of ``model`` for data parallelism, with fp32 gradients."""
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
            # Chunks after the first need no buckets: their communication already overlaps with
            # the computation of earlier chunks.
            disable_bucketing=number > 0,
        )
        for number, chunk in enumerate(model)
    ]
    if layout.overlap_grad_reduce:
        # Megatron's schedules call these functions, so that gradients are reduced after the last
        # micro-batch only. Stages after the first wait, so that all stages communicate at the same
        # time.
        config = wrapped[0].config
        no_sync = [chunk.no_sync for chunk in wrapped]
        start_sync = [chunk.start_grad_sync for chunk in wrapped]
        config.no_sync_func = no_sync if len(wrapped) > 1 else no_sync[0]
        config.grad_sync_func = start_sync if len(wrapped) > 1 else start_sync[0]
    return wrapped


def build_optimizer(
    model: Sequence[DistributedDataParallel],
    options: OptimizerOptions,
    layout: Layout,
    *,
    bf16: bool,
) -> ChainedOptimizer:
    """Build AdamW or Muon, with weight decay on matrices only and global gradient clipping.

    Raises:
        UserError: if the optimizer needs a package, or another release of megatron-core.
    """
    config = OptimizerConfig(
        optimizer=options.optimizer,
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
        **_muon_fields(options),
    )
    if options.optimizer == "muon":
        for chunk in model:
            for name, parameter in unwrap(chunk).named_parameters():
                # megatron would orthogonalize the table of positions.
                if name == POSITION_EMBEDDINGS:
                    parameter.is_embedding_or_output_parameter = True
    # The distributed optimizer keeps views of the parameters. If autograd recorded these views,
    # they would form a reference cycle that Python cannot detect, and this process would never free
    # the model.
    with torch.no_grad():
        optimizer = get_megatron_optimizer(
            config,
            list(model),
            config_overrides=_config_overrides(config, model[0].config),
            use_gloo_process_groups=False,
        )
    use_fused_kernels(optimizer)
    shared_config = model[0].config
    shared_config.grad_scale_func = optimizer.scale_loss
    shared_config.finalize_model_grads_func = finalize_gradients
    return optimizer


def _muon_fields(options: OptimizerOptions) -> dict[str, Any]:
    """Return the fields of megatron's config for Muon.

    Raises:
        UserError: see :func:`~megatron_chameleon.training.options.check_muon`.
    """
    if options.optimizer != "muon":
        return {}
    check_muon()
    return {"muon_momentum": options.muon_momentum}


def _config_overrides(config: OptimizerConfig, model: TransformerConfig) -> dict[Any, Any]:
    """Return megatron's settings for groups of parameters: no weight decay of vectors, and muP's.

    muP divides the learning rate and epsilon of the layers' matrices by the multiple of the width
    (Yang et al. 2022, "Tensor Programs V", table 8).
    """
    overrides: dict[Any, Any] = get_standard_config_overrides(config)
    if getattr(model, "use_mup", False):
        from megatron.core.optimizer import get_mup_config_overrides

        overrides |= get_mup_config_overrides(config, model.mup_width_mult)
    return overrides


def build_scheduler(
    optimizer: MegatronOptimizer, options: OptimizerOptions, train_iters: int
) -> OptimizerParamScheduler:
    """Build the schedule: linear warm-up from 0, then a cosine to ``min_lr`` at the last step."""
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


def is_counted(parameter: torch.nn.Parameter) -> bool:
    """Whether megatron's gradient norm counts this rank's copy of the gradient.

    The norm counts one copy of each replicated parameter: the copy on the first tensor-parallel
    rank for replicated vectors, and on the first pipeline stage for tied embeddings.
    """
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)


def use_fused_kernels(optimizer: ChainedOptimizer) -> None:
    """Use torch's fused kernels in ``optimizer`` and in megatron's gradient clipping.

    Functions of Transformer Engine or Apex that megatron uses are kept.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            _fuse(part.optimizer)
            # Loading a checkpoint overwrites the settings of the parameter groups, so they are set
            # again after loading.
            part.optimizer.register_load_state_dict_post_hook(_fuse)
    # megatron chooses these functions at import, and no argument can replace them.
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    optimizer.defaults["fused"] = True
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if "step" in state:  # the fused kernel reads the step count on the parameter's device
            state["step"] = state["step"].to(parameter.device, torch.float32)


def l2_norm(
    _chunk_size: int,
    _overflow: torch.Tensor,
    tensor_lists: Sequence[list[torch.Tensor]],
    _per_tensor: bool,
    *_more: Any,
) -> tuple[torch.Tensor, None]:
    """Global norm of all tensors, [1] float32 on their device; replaces amp_C's function."""
    (tensors,) = tensor_lists
    return torch.nn.utils.get_total_norm(tensors).float().view(1), None


def scale(
    _chunk_size: int,
    _overflow: torch.Tensor,
    tensor_lists: Sequence[list[torch.Tensor]],
    factor: float,
) -> None:
    """Write ``factor`` times the first list to the second list; replaces amp_C's function."""
    sources, targets = tensor_lists
    if any(s.data_ptr() != t.data_ptr() for s, t in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """This rank's model chunks with optimizer, learning-rate schedule and passes.

    The optimizer is a chain of megatron's: one for AdamW, two for Muon. :meth:`Trainer.run_step`
    shows how a step uses them.
    """

    chunks: list[DistributedDataParallel]
    optimizer: ChainedOptimizer
    scheduler: OptimizerParamScheduler
    passes: Passes

    @property
    def lr(self) -> float:
        """Learning rate of the last step; with muP, that of all but the layers' matrices."""
        return float(self.scheduler.get_lr({}))

    def zero_gradients(self) -> None:
        """Clear all gradients and gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def clip_gradients(self, grad_norm: float) -> None:
        """Scale all gradients to the norm of --clip-grad if ``grad_norm`` exceeds it.

        Args:
            grad_norm: global norm of the gradients that ``optimizer.prepare_grads`` has prepared.
        """
        for part in self.optimizer.chained_optimizers:
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0.0:
                clip_grads.clip_grad_by_total_norm_fp32(
                    parameters, part.config.clip_grad, grad_norm
                )

    def state(self) -> State:
        """State for a checkpoint."""
        return training_state(self.chunks, self.optimizer, self.scheduler, is_loading=False)


def build_trained_model(
    plan: TrainingPlan,
    layout: Layout,
    checkpoint: CheckpointRecord | None = None,
    *,
    combines_gradients: bool = False,
) -> TrainedModel:
    """Build the model of ``plan`` for training.

    Args:
        plan: plan of the run.
        layout: layout of the ranks.
        checkpoint: checkpoint to resume from; None to start from the initial weights.
        combines_gradients: whether a hook combines per-domain gradients.
    """
    options = plan.options
    on_gpu = layout.device.type == "cuda"
    chunks = build_model_chunks(
        plan.config,
        layout,
        options.seed,
        bf16=options.bf16,
        hidden_dropout=options.hidden_dropout,
        attention_dropout=options.attention_dropout,
        # Losses are summed, not averaged: ranks have different numbers of samples of a domain.
        per_token_loss=options.boundaries.eod_mask_loss or combines_gradients,
        recompute=options.parallel.recompute,
        # On the CPU, which is always deterministic, the option must not change results.
        deterministic=options.deterministic and on_gpu,
        # This is Megatron's default, except for compiled layers, since the compiler cannot trace
        # Apex's kernel, and for a recomputed MLP, whose weights would get no gradient tensor, which
        # an overlapped reduction requires.
        gradient_accumulation_fusion=layers._grad_accum_fusion_available
        and not options.compile_layers
        and options.parallel.recompute.recompute_granularity != "selective",
    )
    if plan.pretrained and not checkpoint:
        # Load the weights before the optimizer is built, which copies its main weights from them.
        plan.pretrained.load(chunks)
    if options.compile_layers:
        for chunk in chunks:
            compile_layers(unwrap(chunk))
    wrapped = data_parallel(chunks, layout, bf16=options.bf16)
    optimizer = build_optimizer(wrapped, options.optimizer, layout, bf16=options.bf16)
    scheduler = build_scheduler(optimizer, options.optimizer, options.train_iters)
    if checkpoint:
        load_training(checkpoint, wrapped, optimizer, scheduler)
    weights = plan.loss_weights
    passes = Passes(
        wrapped,
        BatchShape.of(options, layout.data_size),
        len(plan.data.names),
        None if weights is None else torch.tensor(weights, device=layout.device),
        options.document_attention,
    )
    return TrainedModel(wrapped, optimizer, scheduler, passes)
