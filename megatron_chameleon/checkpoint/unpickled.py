"""What of a checkpoint torch reads by ``weights_only``: told in one line where it refuses.

torch's own words are for programmers, and advise to read the file with the code in it.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import (
    COMMON_STATE_FNAME,
    TorchCommonLoadStrategy,
)
from torch.distributed.checkpoint.api import CheckpointException

from megatron_chameleon.errors import UserError

# What torch raises for files that are damaged, cut off, or hold more than tensors and plain values.
_OF_THE_FILE = (OSError, EOFError, ValueError, RuntimeError, pickle.UnpicklingError)

# What megatron raises for values of other names, types or shapes than those of the run.
_OF_THE_CONTENT = (
    CheckpointingException,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    ValueError,
)


class SmallValues(TorchCommonLoadStrategy):
    """megatron's reading of the values that are no tensors, for good and bad files."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        """The values in ``common.pt``.

        Raises:
            UserError: if it is damaged or holds anything but plain values and tensors.
        """
        path = Path(checkpoint_dir) / COMMON_STATE_FNAME
        try:
            values = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(values, dict):
                raise pickle.UnpicklingError(f"it holds a {type(values).__name__}")
        except _OF_THE_FILE as error:
            raise refused(path, error) from error
        return values


@contextlib.contextmanager
def checking_content(folder: Path) -> Iterator[None]:
    """A block that reads the checkpoint in ``folder`` into a model, and an optimizer if wanted.

    Raises:
        UserError: if a file is damaged, or holds something else than these have.
    """
    try:
        yield
    except CheckpointException as error:
        cause = next((cause for cause, _ in error.failures.values()), error)
        known = (*_OF_THE_FILE, *_OF_THE_CONTENT)
        if not isinstance(cause, known) or isinstance(cause, torch.OutOfMemoryError):
            raise
        raise refused(folder, cause) from error
    except _OF_THE_CONTENT as error:
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"cannot use {folder} ({type(error).__name__}: {reason}): it does not hold the state "
            "of such a run; use another checkpoint"
        ) from error


def refused(path: Path, error: BaseException) -> UserError:
    """The words for a file that torch, or a stricter reader, would not read."""
    return UserError(
        f"cannot read {path} ({_reason(error)}): it is damaged, or made to run code when it is "
        "read; use another checkpoint"
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    words = str(error)
    asked = re.search(r"GLOBAL (\S+)", words)
    if asked:
        return f"it asks for {asked[1]}"
    if "weights_only" in words:  # torch's advice for what is no archive of its own
        return "it holds more than tensors and plain values"
    return (words.splitlines() or [type(error).__name__])[0]
