"""Reading the index of a checkpoint, and refusing one that would run code when it is read.

Weights and small values are read by torch with ``weights_only=True``. The index of the torch_dist
format, ``.metadata``, is the one file that torch itself would unpickle, whatever is in it. So it is
unpickled here, once, into the few classes that an index is made of and no others, and torch gets
what was made (:mod:`megatron_chameleon.checkpoint.checked_reading`). What it says of values must
not make torch unpickle those.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megatron_chameleon.errors import UserError

INDEX_NAME = ".metadata"
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
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _layout(name: str) -> torch.layout:
    """As ``torch.serialization._get_layout``, without the cache in it that could be changed."""
    return _LAYOUTS[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): _layout,
    **{(kind.__module__, kind.__qualname__): kind for kind in (*_RECORDS, *_VALUES)},
    **{("torch", name): v for name, v in vars(torch).items() if isinstance(v, torch.dtype)},
}


class _IndexUnpickler(pickle._Unpickler):
    """Makes what an index is made of: plain values, torch's data types and its records.

    The one in Python, since that in C lets a file give a state to whatever it names: to a function
    or a class that stays in use, by attributes and by ``__setstate__`` of its own.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def load_build(self) -> None:
        """Fill a record that was just made, and nothing else."""
        state = self.stack.pop()
        made = self.stack[-1]
        kind = type(made)
        if kind not in _RECORDS or vars(made):
            raise pickle.UnpicklingError(f"it changes a {kind.__name__}")
        if kind is TensorProperties and type(state) is tuple:
            TensorProperties.__setstate__(made, state)
        elif type(state) is dict and all(_names_a_field(name) for name in state):
            vars(made).update(state)
        else:
            raise pickle.UnpicklingError(f"it fills a {kind.__name__} in a way of its own")

    dispatch[pickle.BUILD[0]] = load_build


def _names_a_field(name: object) -> bool:
    return type(name) is str and not name.startswith("_")


def read_index(folder: Path) -> Metadata:
    """The index of the checkpoint in ``folder``: where its tensors lie.

    Raises:
        UserError: if it holds anything but an index, naming what it asks for.
    """
    path = folder / INDEX_NAME
    try:
        with path.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        if type(index) is not Metadata:
            raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
        _refuse_pickled_values(index)
        return index
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; use another checkpoint") from error
    except Exception as error:  # damaged bytes can raise anything
        raise UserError(
            f"{path} is not the index of a checkpoint ({' '.join(str(error).split())}): it is "
            "damaged, or made to run code when it is read; use another checkpoint"
        ) from error


def _refuse_pickled_values(index: Metadata) -> None:
    """What an index does not call a tensor, torch would unpickle with all that is in it.

    megatron's "_extra_state" entries are such, and are not read.
    """
    for name, entry in index.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata and "_extra_state" not in name:
            raise pickle.UnpicklingError(f"{name} is no tensor in it")
