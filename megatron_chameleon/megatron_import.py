"""Warning filters to set before the first import of megatron.core."""

from __future__ import annotations

import warnings

# Each module of megatron-core that would use Transformer Engine or Apex warns when it is imported,
# a dozen times in total. tools/doctor.py reports it once, with the consequences.
_IMPORT_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Its distributed optimizer reads gradients of views, on purpose.
    "The .grad attribute of a Tensor that is not a leaf",
    # About a core_attn of Transformer Engine, which is not used here.
    "If you are using transformer_engine as the transformer implementation",
)


def quiet_import_warnings() -> None:
    """Silence megatron-core's warnings about Apex and Transformer Engine.

    The packages that import megatron.core call this from their ``__init__``, so that it runs first
    whichever of their modules is imported.
    """
    for message in _IMPORT_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
