"""Read the index of a torch_dist checkpoint without running code from it.

torch reads weights and common state with ``weights_only=True``, but it unpickles the index,
``.metadata``, without restriction. Here the index is unpickled once, restricted to the classes of
an index, and the result is passed to torch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megatron_chameleon.errors import UserError

INDEX_NAME = ".metadata"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_RECORDS = (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    filesystem._StorageInfo,
)
_VALUES = (torch.Size, metadata._MEM_FORMAT_ENCODING, planner.WriteItemType)


def read_index(folder: Path) -> Metadata:
    """Read the index of the checkpoint in ``folder``, which locates its tensors.

    Raises:
        UserError: if the file is damaged, or refers to a class that is not part of an index.
    """
    path = folder / INDEX_NAME
    try:
        with path.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        if type(index) is not Metadata:
            raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
        return index
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; use another checkpoint") from error
    except Exception as error:  # damaged bytes can raise any error
        raise UserError(
            f"{path} is not a checkpoint index ({' '.join(str(error).split())}): it is damaged, or "
            "crafted to run code; use another checkpoint"
        ) from error


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{(kind.__module__, kind.__qualname__): kind for kind in (*_RECORDS, *_VALUES)},
    **{("torch", name): v for name, v in vars(torch).items() if isinstance(v, torch.dtype)},
    # Earlier releases of megatron-core added a field to these classes.
    (_MEGATRON, "MCoreMetadata"): Metadata,
    (_MEGATRON, "MCoreSavePlan"): planner.SavePlan,
    # The folder of the checkpoint may be recorded as a path, whose class later Pythons moved.
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


class _IndexUnpickler(pickle._Unpickler):
    """Unpickler restricted to plain values, torch's dtypes and the records of an index.

    This class extends Python's implementation of the unpickler, since the C implementation lets a
    pickle set the state of any object that it names, including functions and classes of other
    modules.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it references {module}.{name}")

    def load_build(self) -> None:
        """Set the state of a new record; reject the state of any other object."""
        state = self.stack.pop()
        made = self.stack[-1]
        kind = type(made)
        if kind not in _RECORDS or vars(made):
            raise pickle.UnpicklingError(f"it changes a {kind.__name__}")
        if kind is TensorProperties and type(state) is tuple:
            TensorProperties.__setstate__(made, state)
        elif type(state) is dict and all(
            type(name) is str and not name.startswith("_") for name in state
        ):
            vars(made).update(state)
        else:
            raise pickle.UnpicklingError(f"it sets fields that a {kind.__name__} does not have")

    dispatch[pickle.BUILD[0]] = load_build
