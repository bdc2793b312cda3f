"""What a checkpoint folder says of itself: the model's shape, its step, its files and their hashes.

The weights are read and written by the package ``checkpoint``; this record needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.files import (
    put_all_back,
    put_back,
    require_regular_file,
    sha256_of_files,
    sha256_of_json,
)
from megatron_chameleon.artifacts.mixture import MixturePhase
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import Count, FolderRecord, InnerPath
from megatron_chameleon.errors import UserError

FILE_NAME = "checkpoint.json"
FOLDER_NAME = "checkpoints"
LATEST_NAME = "latest"
# megatron's index, which holds the path it was written to, and its small values, pickled in the
# order in which they came about.
NO_TENSORS = (".metadata", "common.pt")
CONFIG_NAME = "metadata.json"  # megatron's: the format of the tensors
TENSOR_FILES = "*.distcp"
FORMAT_VERSION = 2  # 2: with domain_samples and mixture_phases
MADE_BY = "tools/pretrain_gpt.py writes it"


class CheckpointWarning(UserWarning):
    """A checkpoint was not written, or not read, and the work goes on without it."""


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
    """What a method that watches training needs to go on: its name and its state, JSON values."""

    name: str
    state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class CheckpointRecord(FolderRecord):
    """What ``checkpoint.json`` says; ``root`` is the checkpoint's folder.

    Attributes:
        model: the model's shape, as a dictionary (package ``model`` reads it).
        step: optimizer steps done.
        samples: training samples consumed.
        domain_samples: domain -> how many of its own samples these are. From here on, each
            domain's stream goes on.
        mixture_phases: the weights that the samples were drawn by, in order.
        domain_tokens: domain -> training tokens seen.
        layout: the parallel layout that wrote it; another one can read it.
        files: file name -> size and hash.
        guard: what judges the steps that follow: counts, the last losses and gradient norms, and
            the steps skipped in a row up to this one.
        hook: of the method that watches the run, if one does.
        order_version: version of the order of the samples; a run resumes in the same one.
    """

    KIND = "checkpoint"
    FILE_NAME = FILE_NAME
    FORMAT_VERSION = FORMAT_VERSION
    MADE_BY = MADE_BY

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

    @classmethod
    def load(cls, folder: Path) -> CheckpointRecord:
        """Read ``folder/checkpoint.json`` and check that every file is listed and has its size.

        Raises:
            UserError: naming the file and the way out.
        """
        record = super().load(folder)
        needed = {*NO_TENSORS, CONFIG_NAME, *(path.name for path in folder.glob(TENSOR_FILES))}
        for name in sorted(needed - set(record.files)):
            raise UserError(
                f"{folder / FILE_NAME}: field files: {name} is not listed: the checkpoint is "
                "damaged; use an earlier one"
            )
        for name, file in record.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != file.bytes:
                raise UserError(
                    f"{path} is missing or not of its size: the checkpoint is damaged; "
                    "use an earlier one"
                )
        return record

    @property
    def hash(self) -> str:
        """Hex SHA-256 over the hashes of the files: the identity of these weights.

        The files without tensors are left out: equal runs in two folders differ in them.
        """
        return sha256_of_json(
            {name: file.sha256 for name, file in self.files.items() if name not in NO_TENSORS}
        )

    def verify(
        self, share: int = 0, shares: int = 1, on_bytes: Callable[[int], object] | None = None
    ) -> None:
        """Read files and compare their hashes.

        Args:
            share: which share of the files is read, from 0 on.
            shares: into how many about equal ones they are dealt, for those who share the work.
            on_bytes: is told how many bytes were just read.

        Raises:
            UserError: naming the first file that is not what checkpoint.json says.
        """
        for name in self._largest_first()[share::shares]:
            path = self.root / name
            try:
                found = sha256_of_files(path, on_bytes=on_bytes)
            except OSError as error:
                raise UserError(
                    f"cannot read {path}: {error.strerror or error}; use an earlier checkpoint"
                ) from error
            if found != self.files[name].sha256:
                raise UserError(
                    f"{path} has changed since it was written; use an earlier checkpoint"
                )

    def verify_in_threads(self) -> None:
        """As :meth:`verify`, of all files, several at a time: hashing lets other threads run."""
        threads = min(len(self.files), os.cpu_count() or 1) or 1
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda share: self.verify(share, threads), range(threads)))

    def share_bytes(self, share: int, shares: int) -> int:
        """How many bytes :meth:`verify` reads for these arguments."""
        return sum(self.files[name].bytes for name in self._largest_first()[share::shares])

    def _largest_first(self) -> list[str]:
        return sorted(self.files, key=lambda name: (-self.files[name].bytes, name))


def hash_files(folder: Path, leave_out: Collection[str] = ()) -> dict[str, CheckpointFile]:
    """Size and hash of every file in ``folder``, by name, but for those of some names."""
    return {
        path.name: CheckpointFile.of(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != FILE_NAME and path.name not in leave_out
    }


def step_folder(run_dir: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run_dir / FOLDER_NAME / f"step-{step:08d}"


def all_checkpoint_folders(run_dir: Path) -> list[Path]:
    """Complete checkpoints in the folder of a run, oldest first, whether in use or not.

    A copy that somebody has made of one, under a name of their own, is none of them.
    """
    folders = (path.parent for path in (run_dir / FOLDER_NAME).glob(f"step-*/{FILE_NAME}"))
    return sorted(folder for folder in folders if re.fullmatch(r"step-\d{8,}", folder.name))


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first, up to the one that the file ``latest`` names.

    All of them, if there is no such file, or none of that name.
    """
    folders = all_checkpoint_folders(run_dir)
    latest = _named_latest(run_dir)
    return folders[: folders.index(latest) + 1] if latest in folders else folders


def find_checkpoint(path: Path, flag: str = "--checkpoint") -> Path:
    """The checkpoint folder meant by ``path``: itself, or the latest of the run it holds.

    Every byte of it is verified. A damaged checkpoint of a run is passed over for the one before,
    with a :class:`CheckpointWarning`. One that a killed save had set aside gets its name back.

    Args:
        path: of a checkpoint, or of a run.
        flag: the option by which the user gave it.

    Raises:
        UserError: if there is none, or none that is whole.
    """
    with contextlib.suppress(OSError):  # a reader that may not write goes on with what is there
        put_back(path)
        put_all_back(path / FOLDER_NAME)
    if (path / FILE_NAME).is_file():
        CheckpointRecord.load(path).verify_in_threads()
        return path
    folders = checkpoint_folders(path)
    if not folders:
        raise UserError(
            f"{flag} {path}: neither a checkpoint nor a run with one; "
            f"it needs {path / FOLDER_NAME}/step-*/{FILE_NAME}; {MADE_BY}"
        )
    problems: list[UserError] = []
    latest = _named_latest(path)
    if latest is not None and latest not in folders:
        problems.append(UserError(f"{latest}, which {LATEST_NAME} names, is not complete"))
    for folder in reversed(folders):
        try:
            CheckpointRecord.load(folder).verify_in_threads()
        except UserError as error:
            problems.append(error)
            continue
        if problems:
            warnings.warn(f"{problems[0]}: {folder} is used", CheckpointWarning, stacklevel=2)
        return folder
    raise UserError(f"{problems[0]}: {path} has no whole one")


def _named_latest(run_dir: Path) -> Path | None:
    """The folder that the file ``latest`` names, there or not."""
    try:
        path = run_dir / FOLDER_NAME / LATEST_NAME
        require_regular_file(path)
        name = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return run_dir / FOLDER_NAME / name
