"""The corpus folder while it is written: everything apart until all of it is there."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from megatron_chameleon.artifacts.corpus import FILE_NAME
from megatron_chameleon.artifacts.files import flush_to_disk
from megatron_chameleon.errors import UserError

PARTIAL_NAME = ".partial"
TOKENS_NAME = "tokens"
# What a corpus folder holds besides corpus.json; of a corpus that is replaced, all of it goes.
_OWN_FILES = (f"{TOKENS_NAME}/*.bin", f"{TOKENS_NAME}/*.idx", "tokenizer.json", "tokenizer.model")


class CorpusFolder:
    """A context in which a corpus is written into ``root/.partial``, then moved into place.

    Nothing under its final name changes before :meth:`publish`. Leaving without it, by an error or
    Ctrl-C, removes what was written; what a killed run has left, the next one removes.

    Raises:
        UserError: if the folder cannot be written, holds a corpus already (unless ``overwrite``),
            or another process is writing one into it.
    """

    def __init__(self, root: Path, overwrite: bool) -> None:
        self.root = root
        self.partial = root / PARTIAL_NAME
        self._overwrite = overwrite

    def __enter__(self) -> Self:
        if (self.root / FILE_NAME).exists() and not self._overwrite:
            raise UserError(
                f"{self.root} already holds a corpus; choose another --output or pass --overwrite"
            )
        self._made = not self.root.exists()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise UserError(
                f"cannot write to {self.root}: {error.strerror or error}; choose another --output"
            ) from error
        try:
            self._lock()
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.partial)
        if self._made and not any(self.root.iterdir()):
            self.root.rmdir()
        os.close(self._descriptor)

    def publish(self) -> None:
        """Move all files into place, corpus.json last: with it the folder is a corpus again.

        Only renames lie between the end of an old corpus and the new one being whole.
        """
        files = sorted(path for path in self.partial.rglob("*") if path.is_file())
        files.sort(key=lambda path: path.name == FILE_NAME)
        for file in files:
            flush_to_disk(file)
        (self.root / FILE_NAME).unlink(missing_ok=True)
        for old in [path for pattern in _OWN_FILES for path in self.root.glob(pattern)]:
            old.unlink()
        for file in files:
            target = self.root / file.relative_to(self.partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, target)

    def _lock(self) -> None:
        # The lock is on the folder itself, so that no file is left, and goes with the process.
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is writing a corpus into {self.root}; wait for it, or choose "
                "another --output"
            ) from None
