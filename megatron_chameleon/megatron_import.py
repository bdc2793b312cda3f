"""What has to happen before the first import of megatron.core."""

from __future__ import annotations

import warnings

# Each module of megatron-core that would use Transformer Engine or Apex says so when it is
# imported, a dozen times a start. tools/doctor.py says it once, with what is lost.
_IMPORT_WARNINGS = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Its distributed optimizer looks at gradients of views, and means to.
    "The .grad attribute of a Tensor that is not a leaf",
    # That core_attn may be Transformer Engine's. It never is, here.
    "If you are using transformer_engine as the transformer implementation",
)


def quiet_import_warnings() -> None:
    """Silence megatron-core's warnings about Apex and Transformer Engine.

    The packages that import megatron.core call this from their ``__init__``, so that it comes
    before the import whichever of their modules is asked for first.
    """
    for message in _IMPORT_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
