"""Whether lm-eval is there, which the rest of the package needs."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from megatron_chameleon.errors import UserError


def require_harness() -> str:
    """The version of lm-eval.

    Raises:
        UserError: if it is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "downstream tasks need lm-eval, which is not installed: "
            "pip install 'megatron-chameleon[eval]'"
        )
    return metadata.version("lm_eval")
