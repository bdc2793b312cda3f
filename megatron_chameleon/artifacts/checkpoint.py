"""The record of a checkpoint folder, and the checkpoint folders of a run.

The weights are read and written by the package ``checkpoint``; this module needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import os
import re
import shutil
import warnings
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat

from megatron_chameleon.artifacts.files import (
    finish_replacements,
    sha256_of_files,
    sha256_of_json,
)
from megatron_chameleon.artifacts.mixture import MixturePhase
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import (
    Count,
    HashedFiles,
    HashedFolderRecord,
    InnerPath,
)
from megatron_chameleon.errors import UserError

FOLDER_NAME = "checkpoints"
# These files are excluded from the hash of the weights, since they differ between identical runs:
# megatron-core's index contains the path of the checkpoint, and its common state is pickled in
# insertion order.
NO_TENSORS = (".metadata", "common.pt")
# In this file, megatron-core records the format of the tensor files.
CONFIG_NAME = "metadata.json"
TENSOR_FILES = "*.distcp"


class CheckpointWarning(UserWarning):
    """A checkpoint could not be written or read; the run continues without it."""


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """Size and hex SHA-256 of one file."""

    bytes: Count
    sha256: str

    @classmethod
    def of(cls, path: Path) -> CheckpointFile:
        """Read the file at ``path``."""
        return cls(path.stat().st_size, sha256_of_files(path))


@dataclasses.dataclass(frozen=True)
class HookState:
    """Name and JSON state of a training hook, to resume it."""

    name: str
    state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class BestTarget:
    """The lowest target loss of a run.

    Attributes:
        step: step of the validation with this loss.
        loss: target loss, in nats per token.
        measured: hash of the target and of the amount of text that is measured; losses with other
            hashes are not comparable.
    """

    step: Count
    loss: FiniteFloat
    measured: str


@dataclasses.dataclass(frozen=True)
class CheckpointRecord(HashedFolderRecord):
    """The contents of ``checkpoint.json``; ``root`` is the checkpoint's folder.

    Attributes:
        model: the model's shape, as a dictionary (package ``model`` reads it).
        step: optimizer steps done.
        samples: training samples consumed.
        domain_samples: domain -> samples consumed; a resumed run continues after them.
        mixture_phases: the sampling weights of each phase, in order.
        domain_tokens: domain -> training tokens seen.
        layout: parallel layout of the run that wrote the checkpoint; runs with any layout can read
            it.
        files: file name -> size and hash.
        guard: state of the step guard: counts, the last losses and gradient norms, and the number
            of consecutive skipped steps.
        hook: name and state of the training hook, if there is one.
        order_version: version of the sample order; a resumed run requires the same version.
        best: the lowest target loss up to ``step``; None without a target.
    """

    KIND = "checkpoint"
    FILE_NAME = "checkpoint.json"
    # Version 2 added domain_samples and mixture_phases.
    FORMAT_VERSION = 2
    MADE_BY = "megatron-chameleon pretrain_gpt writes it"
    RESTORE = "use an earlier checkpoint"

    model: dict[str, Any]
    step: Count
    samples: Count
    domain_samples: dict[str, Count]
    mixture_phases: list[MixturePhase]
    domain_tokens: dict[str, Count]
    tokenizer_hash: str
    corpus_hash: str
    mixture_hash: str
    layout: dict[str, Any]
    files: dict[InnerPath, CheckpointFile]
    provenance: Provenance
    guard: dict[str, Any] = dataclasses.field(default_factory=dict)
    hook: HookState | None = None
    order_version: Count = 1
    best: BestTarget | None = None

    @classmethod
    def load(cls, folder: Path) -> CheckpointRecord:
        """Read ``folder/checkpoint.json`` and check that every file is listed and has its size.

        Raises:
            UserError: naming the file and the fix.
        """
        record = super().load(folder)
        needed = {*NO_TENSORS, CONFIG_NAME, *(path.name for path in folder.glob(TENSOR_FILES))}
        for name in sorted(needed - set(record.files)):
            raise UserError(
                f"{folder / cls.FILE_NAME}: field files: {name} is not listed: the checkpoint is "
                f"damaged; {cls.RESTORE}"
            )
        record.check_sizes()
        return record

    def hashed_files(self) -> list[HashedFiles]:
        """All files except the record itself."""
        files = self.files.items()
        return [HashedFiles({self.root / name: file.bytes}, file.sha256) for name, file in files]

    @property
    def hash(self) -> str:
        """Hex SHA-256 over the hashes of the tensor files: the identity of these weights.

        With rotary positions, the model's fields are included, since models with the same tensors
        can differ in the base or the scaling of the frequencies.
        """
        hashed: dict[str, Any] = {
            name: file.sha256 for name, file in self.files.items() if name not in NO_TENSORS
        }
        if self.model.get("position_embedding_type") == "rope":
            hashed["model"] = self.model
        return sha256_of_json(hashed)

    def verify_in_threads(self) -> None:
        """Verify all files in parallel threads; hashing releases the GIL."""
        threads = min(len(self.files), os.cpu_count() or 1) or 1
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda shard: self.verify(shard, threads), range(threads)))


def hash_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, CheckpointFile]:
    """Size and hash of the files in ``folder``, by name, except those in ``leave_out``."""
    return {
        path.name: CheckpointFile.of(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != CheckpointRecord.FILE_NAME and path.name not in leave_out
    }


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return run_dir / FOLDER_NAME / f"step-{step:08d}"


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first.

    Folders with other names, such as copies made by users, are ignored.
    """
    folders = (
        path.parent for path in (run_dir / FOLDER_NAME).glob(f"step-*/{CheckpointRecord.FILE_NAME}")
    )
    return sorted(folder for folder in folders if re.fullmatch(r"step-\d{8,}", folder.name))


def find_checkpoint(path: Path, flag: str = "--checkpoint") -> Path:
    """Return the checkpoint folder ``path``, or the latest checkpoint of the run ``path``.

    Verifies every byte. If the newest checkpoint of a run is damaged, the previous one is used,
    with a :class:`CheckpointWarning`. A checkpoint moved aside by a save that was killed is
    restored first.

    Args:
        path: folder of a checkpoint, or of a run.
        flag: the option with this path, for messages.

    Raises:
        UserError: if there is no checkpoint, or if all are damaged.
    """
    # Without write permission, checkpoints that were moved aside are not restored.
    with contextlib.suppress(OSError):
        finish_replacements(path.parent, glob.escape(path.name))
        finish_replacements(path / FOLDER_NAME)
    if (path / CheckpointRecord.FILE_NAME).is_file():
        CheckpointRecord.load(path).verify_in_threads()
        return path
    if not path.exists():
        raise UserError(f"{flag} {path}: no such folder; check the path")
    folders = checkpoint_folders(path)
    if not folders:
        raise UserError(
            f"{flag} {path}: neither a checkpoint nor a run with one "
            f"({path / FOLDER_NAME}/step-*/{CheckpointRecord.FILE_NAME}); "
            f"{CheckpointRecord.MADE_BY}"
        )
    problems: list[UserError] = []
    for folder in reversed(folders):
        try:
            CheckpointRecord.load(folder).verify_in_threads()
        except UserError as error:
            problems.append(error)
            continue
        if problems:
            warnings.warn(f"{problems[0]}: using {folder}", CheckpointWarning, stacklevel=2)
        return folder
    raise UserError(f"{problems[0]}: {path} has no intact checkpoint")


def temporary_name(folder: Path, token: str) -> Path:
    """Return the temporary name of ``folder``, under which it is written.

    Each attempt has its own ``token``, since processes of a killed run may still be writing into
    its temporary folder.

    Args:
        folder: the folder to write.
        token: eight characters. The length is fixed so that :func:`remove_leftovers` does not
            delete temporary folders of a folder with a longer name.
    """
    return folder.with_name(f".{folder.name}.{token}.tmp")


def remove_leftovers(parent: Path, name: str) -> None:
    """Delete the temporary folders of interrupted writes.

    A folder whose replacement was interrupted is restored. No other process may write these
    folders.

    Args:
        parent: folder that contains the folders.
        name: glob pattern of their names.

    Raises:
        OSError: from the file system.
    """
    finish_replacements(parent, name)
    for path in list(parent.glob(f".{name}.????????.tmp")):
        shutil.rmtree(path, ignore_errors=True)


def keep_last(run_dir: Path, count: int, steps: Collection[int] = ()) -> None:
    """Delete all but the last ``count`` checkpoints of a run and those of ``steps``; 0 keeps all.

    Raises:
        OSError: from the file system; the remaining checkpoints are intact.
    """
    kept = {step_folder(run_dir, step) for step in steps}
    for folder in checkpoint_folders(run_dir)[:-count] if count else []:
        if folder in kept:
            continue
        deleted = temporary_name(folder, "deleting")
        os.replace(folder, deleted)  # atomic: a partial checkpoint never has a checkpoint's name
        shutil.rmtree(deleted)


def go_back_to(run_dir: Path, step: int) -> list[Path]:
    """Rename the checkpoints after ``step``, and remove leftovers of interrupted writes.

    Afterwards, the checkpoint of ``step`` is the latest. No other process may write to the run.

    Returns:
        New paths of the renamed checkpoints.

    Raises:
        OSError: from the file system.
    """
    remove_leftovers(run_dir / FOLDER_NAME, "step-*")
    for path in run_dir.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    moved = []
    for folder in checkpoint_folders(run_dir):
        if folder.name > step_folder(run_dir, step).name:
            name = f"unused-{folder.name}"
            names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
            moved.append(next(path for path in map(folder.with_name, names) if not path.exists()))
            os.replace(folder, moved[-1])
    return moved
