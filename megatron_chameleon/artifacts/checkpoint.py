"""What a checkpoint folder says of itself: the model's shape, its step, its files and their hashes.

The weights are read and written by the package ``checkpoint``; this record needs no torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import FolderRecord
from megatron_chameleon.errors import UserError

FILE_NAME = "checkpoint.json"
FOLDER_NAME = "checkpoints"
# megatron's index, which holds the path it was written to, and its small values, pickled in the
# order in which they came about.
NO_TENSORS = (".metadata", "common.pt")
FORMAT_VERSION = 1
MADE_BY = "tools/pretrain_gpt.py writes it"


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """Size and hex SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class MixturePhase:
    """The weights by which samples are drawn from ``first_sample`` on: domain -> weight."""

    first_sample: int
    weights: dict[str, float]


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
    """

    KIND = "checkpoint"
    FILE_NAME = FILE_NAME
    FORMAT_VERSION = FORMAT_VERSION
    MADE_BY = MADE_BY

    model: dict[str, Any]
    step: int
    samples: int
    domain_samples: dict[str, int]
    mixture_phases: list[MixturePhase]
    domain_tokens: dict[str, int]
    tokenizer_hash: str
    corpus_hash: str
    mixture_hash: str
    layout: dict[str, Any]
    files: dict[str, CheckpointFile]
    provenance: Provenance

    @classmethod
    def load(cls, folder: Path) -> CheckpointRecord:
        """Read ``folder/checkpoint.json`` and check that every file has its size.

        Raises:
            UserError: naming the file and the way out.
        """
        record = super().load(folder)
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

    def verify(self) -> None:
        """Read every file and compare its hash. Raises UserError naming the first that differs."""
        for name, file in self.files.items():
            if sha256_of_files(self.root / name) != file.sha256:
                raise UserError(
                    f"{self.root / name} has changed since it was written; "
                    "use an earlier checkpoint"
                )


def hash_files(folder: Path) -> dict[str, CheckpointFile]:
    """Size and hash of every file in ``folder``, by name."""
    return {
        path.name: CheckpointFile(path.stat().st_size, sha256_of_files(path))
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != FILE_NAME
    }


def step_folder(run_dir: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run_dir / FOLDER_NAME / f"step-{step:08d}"


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in (run_dir / FOLDER_NAME).glob(f"step-*/{FILE_NAME}"))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder meant by ``path``: itself, or the latest of the run it holds.

    Raises:
        UserError: if there is none.
    """
    if (path / FILE_NAME).is_file():
        return path
    folders = checkpoint_folders(path)
    if not folders:
        raise UserError(
            f"--checkpoint {path}: neither a checkpoint nor a run with one; "
            f"it needs {path / FOLDER_NAME}/step-*/{FILE_NAME}; {MADE_BY}"
        )
    return folders[-1]
