"""Local copies of the tasks' data sets: which files they are, and what they are known by."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json


@dataclasses.dataclass(frozen=True)
class LocalCopy:
    """A copy of a data set.

    Attributes:
        folder: OWNER/NAME in the folder of copies.
        configuration: of the data set; None where it has no names for them.
    """

    folder: Path
    configuration: str | None

    def exists(self) -> bool:
        """Whether it is there."""
        return self.folder.is_dir()

    def files(self) -> list[Path]:
        """Those of its configuration's own folder, or all if it has none, without hidden ones.

        Other configurations may be put beside it at any time.
        """
        own = self.folder / (self.configuration or "")
        root = own if own.is_dir() else self.folder
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return sorted(root / path for path in found if not _is_hidden(path))

    def sha256(self) -> str:
        """Hex SHA-256 of the files' names and contents."""
        hashes = {path.relative_to(self.folder): sha256_of_files(path) for path in self.files()}
        return sha256_of_json({path.as_posix(): digest for path, digest in hashes.items()})

    def empty_file(self) -> Path | None:
        """A file without any content, which nothing can be read from; None if there is none."""
        return next((path for path in self.files() if path.stat().st_size == 0), None)


def _is_hidden(path: Path) -> bool:
    """Such as what a download keeps for itself."""
    return any(part.startswith(".") for part in path.parts)
