"""From tokens and weights to training samples: blended order, data sets, batches."""

# ruff: noqa: E402
from megatron_chameleon.megatron_import import quiet_import_warnings

quiet_import_warnings()

from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.megatron_order import build_blending_indices
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.blend.token_data import DomainData, TokenData

__all__ = [
    "BlendedTokens",
    "DomainData",
    "MixtureSchedule",
    "TokenData",
    "build_blending_indices",
]
