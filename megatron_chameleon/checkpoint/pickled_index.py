"""Refusing a checkpoint whose index would run code when it is read.

Weights and small values are read by torch with ``weights_only=True``. The index of the torch_dist
format, ``.metadata``, is the one file that torch itself unpickles, whatever is in it. So it is
unpickled here first, with the few classes that an index is made of and no others.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_chameleon.errors import UserError

INDEX_NAME = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}


class _IndexUnpickler(pickle.Unpickler):
    """Makes what an index is made of: plain values, torch's data types and its records."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def check_index(folder: Path) -> Metadata:
    """Refuse the checkpoint in ``folder`` if its index holds anything but an index.

    Returns:
        the index.

    Raises:
        UserError: naming what it asks for.
    """
    path = folder / INDEX_NAME
    try:
        with path.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        if not isinstance(index, Metadata):  # torch would look for another index to unpickle
            raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
        return index
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; use another checkpoint") from error
    except Exception as error:  # damaged bytes can raise anything
        raise UserError(
            f"{path} is not the index of a checkpoint ({' '.join(str(error).split())}): it is "
            "damaged, or made to run code when it is read; use another checkpoint"
        ) from error
