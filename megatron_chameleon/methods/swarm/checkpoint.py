"""The state of members in flight: one file, written at once, from which their group goes on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.artifacts.record import Amount, Count, Positive, check_values
from megatron_chameleon.errors import UserError

FORMAT_VERSION = 2  # 2: samples in the order of version 2, see blend.order; with a checksum
_HINT = "delete it, and its members start from scratch"


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
    text = json.dumps({"format_version": FORMAT_VERSION, **dataclasses.asdict(state)})
    metadata = {"state": text, "checksum": _checksum(text, tensors)}
    with replacing(path) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata=metadata)
        except SafetensorError as error:  # its own error for a full disk
            raise UserError(
                f"cannot write {path} ({error}); free space or choose another folder"
            ) from error


def read_state(path: Path) -> GroupState:
    """The state without its tensors.

    Raises:
        UserError: if the file is damaged or of another release.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = dict(json.loads((file.metadata() or {})["state"]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); {_HINT}") from error
    version = text.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version {version}, this release reads {FORMAT_VERSION}; {_HINT}"
        )
    return check_values(str(path), GroupState, text, _HINT)


def read_tensors(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Name -> tensor, on ``device``.

    Each is a copy in memory of its own: on a CPU the file's are mapped from where they lie, while
    training writes to them.

    Raises:
        UserError: if they or the state are not those that were written.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if metadata.get("checksum") != _checksum(metadata["state"], tensors):
        raise UserError(f"{path} does not match its checksum; {_HINT}")
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _checksum(state: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Hex XXH3 of the state's JSON, and of the tensors' names and bytes."""
    digest = xxhash.xxh3_128(state.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
