"""Blend domains into training samples: sample order, data sets and batches."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_chameleon.blend.dataset import BlendedTokens
    from megatron_chameleon.blend.megatron_order import build_blending_indices
    from megatron_chameleon.blend.schedule import MixtureSchedule

__all__ = [
    "BlendedTokens",
    "MixtureSchedule",
    "build_blending_indices",
]

_MODULES = {
    "BlendedTokens": "dataset",
    "MixtureSchedule": "schedule",
    "build_blending_indices": "megatron_order",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use: importing blend.options must not load torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
