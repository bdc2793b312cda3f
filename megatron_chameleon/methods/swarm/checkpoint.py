"""The state of members in flight: one file, written at once, from which their group goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.record import Amount, Count, Positive, check_values
from megatron_chameleon.errors import UserError

FORMAT_VERSION = 2  # 2: samples in the order of version 2, see blend.order


@dataclasses.dataclass(frozen=True)
class GroupState:
    """How far a group has come, without its tensors.

    Attributes:
        step: steps taken.
        members: the numbers of those that are left [E].
        micro_batch_size: sequences of a pass and member, which later steps have to keep to be the
            same to the bit.
        steps: when held-out losses were measured.
        losses: [len(steps)][E][k] what they were; None for a domain without held-out text.
        flops: of each member [E].
        seconds: of each member [E], its share of the device's.
    """

    step: Count
    members: list[Count]
    micro_batch_size: Positive
    steps: list[Count]
    losses: list[list[list[float | None]]]
    flops: list[Amount]
    seconds: list[Amount]


def save_state(path: Path, state: GroupState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``state`` and its ``tensors`` to ``path``, in place of what was there.

    Raises:
        UserError: if the disk is full or refuses; what was there is then as it was.
    """
    told = json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(state)})
    with replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata={"state": told})
        except SafetensorError as error:  # its own error for a full disk
            raise UserError(
                f"cannot write {path} ({error}); free space or choose another folder"
            ) from error


def read_state(path: Path) -> GroupState:
    """The state without its tensors.

    Raises:
        UserError: if the file is damaged or of another release.
    """
    hint = "delete it, and its members start from scratch"
    try:
        with safe_open(path, framework="pt") as file:
            told = dict(json.loads((file.metadata() or {})["state"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); {hint}") from error
    version = told.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version {version}, this release reads {FORMAT_VERSION}; {hint}"
        )
    return check_values(str(path), GroupState, told, hint)


def read_tensors(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Name -> tensor, on ``device``.

    Each is a copy in memory of its own: on a CPU the file's are mapped from where they lie, while
    training writes to them.
    """
    with safe_open(path, framework="pt", device=str(device)) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
