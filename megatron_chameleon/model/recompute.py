"""Which activations the backward pass computes again, in megatron's terms."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP
from torch.utils.checkpoint import checkpoint

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.recompute import RecomputeOptions

KEEP_ALL = RecomputeOptions()


def check_recompute(options: RecomputeOptions, layers_per_chunk: int) -> None:
    """Refuse what would do nothing, or not what it says.

    Args:
        options: what was asked for.
        layers_per_chunk: layers of each (virtual) pipeline stage.

    Raises:
        UserError: naming the flag to leave out or to change.
    """
    full = options.recompute_granularity == "full"
    for flag, value in (
        ("--recompute-method", options.recompute_method),
        ("--recompute-num-layers", options.recompute_num_layers),
    ):
        if value is not None and not full:
            raise UserError(f"{flag} {value} is of --recompute-granularity full; give both or none")
    if full:
        _check_unit(options, layers_per_chunk)


def _check_unit(options: RecomputeOptions, layers_per_chunk: int) -> None:
    unit = recompute_unit(options)
    if not 1 <= unit <= layers_per_chunk:
        raise UserError(
            f"--recompute-num-layers {unit}: a pipeline stage's chunk has 1 to "
            f"{layers_per_chunk} layers"
        )
    if options.recompute_method != "block" and layers_per_chunk % unit:
        raise UserError(
            f"--recompute-num-layers {unit} does not divide the {layers_per_chunk} layers of a "
            "pipeline stage's chunk; give one that does, or --recompute-method block"
        )


def recompute_unit(options: RecomputeOptions) -> int:
    """Layers recomputed together (uniform), or layers recomputed at all (block)."""
    return 1 if options.recompute_num_layers is None else options.recompute_num_layers


def recompute_settings(options: RecomputeOptions) -> dict[str, Any]:
    """The fields of megatron's TransformerConfig."""
    if options.recompute_granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": options.recompute_method or "uniform",
            "recompute_num_layers": recompute_unit(options),
        }
    if options.recompute_granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": []}  # RecomputedMLP does
    return {}


class RecomputedMLP(MLP):
    """megatron's MLP, which the backward pass computes again from its input.

    By torch's checkpoint: megatron's saves and restores random states, which the compiler cannot
    trace and nothing here needs, and runs ``backward`` within itself, which never ends where the
    MLP returns its bias.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
        super().__init__(*arguments, tp_group=group, **settings)

    def forward(self, *inputs: Any, **more: Any) -> Any:
        """As megatron's."""
        return checkpoint(
            super().forward, *inputs, use_reentrant=False, preserve_rng_state=False, **more
        )
