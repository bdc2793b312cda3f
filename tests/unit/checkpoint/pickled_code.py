"""What a file holds that runs code when it is unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex


class PickledCode:
    """Unpickled, it makes a folder: the trace by which a test sees that code was run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)


_GET_LAYOUT = b"ctorch.serialization\n_get_layout\n"


def index_of_two_readings(index: Metadata, name: str, entry: object) -> bytes:
    """A pickle of ``index`` that calls ``entry`` "x_extra_state" once, and ``name`` from then on.

    It does so by the function that looks up layouts, of which it changes the cache.
    """

    def looking_up(layouts: dict[str, Any]) -> bytes:
        known = {"torch.strided": torch.strided}
        return _GET_LAYOUT + _part({"cache": {**known, **layouts}}) + pickle.BUILD + pickle.POP

    called = _GET_LAYOUT + _part("a") + pickle.TUPLE1 + pickle.REDUCE
    rest = dict(vars(index))
    entries = rest.pop("state_dict_metadata")
    made = b"ctorch.distributed.checkpoint.metadata\nMetadata\n)" + pickle.NEWOBJ
    fields = _part(rest) + _part("state_dict_metadata") + _part(entries)
    fields += called + _part(entry) + pickle.SETITEM + pickle.SETITEM
    # With __setstate__ set, the first of these is passed over when the pickle is read again.
    later = _part({"cache": {"torch.strided": torch.strided, "a": name}, "__setstate__": _CALLED})
    return (
        pickle.PROTO
        + b"\x02"
        + looking_up({"a": "x_extra_state"})
        + made
        + fields
        + pickle.BUILD
        + _GET_LAYOUT
        + later
        + pickle.BUILD
        + pickle.POP
        + pickle.STOP
    )


_CALLED = MetadataIndex  # an allowed class that takes anything


def _part(value: object) -> bytes:
    """What puts ``value`` on the stack of a pickle."""
    return pickle.dumps(value, protocol=2)[2:-1]
