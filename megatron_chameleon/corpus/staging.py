"""The corpus folder while a corpus is written: everything is written elsewhere, then renamed.

    OUTPUT/.partial/plan.json          the plan that all processes have agreed on
    OUTPUT/.partial/shards/000012      a finished shard
    OUTPUT/.partial/staging/HOST-PID-x a process's staging directory; its contents are renamed when
                                       complete
    OUTPUT/.partial/published          hash of the corpus.json that the shards were joined to, for
                                       cleaning up after a run that was killed before it could

Correctness relies on renames alone, which work on any disk that machines share. The locks only
prevent starting the same work twice on one machine and identify deserted staging directories.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron_chameleon.artifacts.corpus import FILE_NAME, Corpus
from megatron_chameleon.artifacts.discovered import CENTROIDS_NAME, DiscoveredDomains
from megatron_chameleon.artifacts.files import (
    flush_all_to_disk,
    flush_to_disk,
    sha256_of_files,
    writing,
)
from megatron_chameleon.artifacts.output_path import require_new
from megatron_chameleon.artifacts.record import require_kind
from megatron_chameleon.corpus.plan import Plan
from megatron_chameleon.corpus.tokenizer import FILE_NAMES as TOKENIZER_NAMES
from megatron_chameleon.errors import UserError

PARTIAL_NAME = ".partial"
TOKENS_NAME = "tokens"
SOURCES_NAME = "sources.json"
# The files of a corpus besides corpus.json; replacing a corpus removes all of them.
_OWN_FILES = (
    *(f"{TOKENS_NAME}/*.{suffix}" for suffix in ("bin", "idx", "xxh3")),
    *TOKENIZER_NAMES.values(),
    SOURCES_NAME,
    DiscoveredDomains.FILE_NAME,
    CENTROIDS_NAME,
)
_SHARDS_NAME, _STAGING_NAME, _PUBLISHED_NAME = "shards", "staging", "published"
_ATTEMPTS = 100


class CorpusFolder:
    """The folder ``root``, locked by this process; :func:`corpus_folder` opens one.

    Attributes:
        root: the corpus folder.
        partial: its folder of unfinished work.
        staging: this process's own staging directory.
    """

    def __init__(self, root: Path, staging: Path) -> None:
        self.root = root
        self.partial = root / PARTIAL_NAME
        self.staging = staging

    def agree(self, plan: Plan) -> Plan:
        """Write ``plan`` if there is none; return the plan that all processes here work by.

        Raises:
            UserError: if there is a different plan and shards were finished or are being made by
                it, naming the difference.
        """
        dataclasses.replace(plan, root=self.staging).save()
        draft, path = self.staging / Plan.FILE_NAME, self.partial / Plan.FILE_NAME
        try:
            os.link(draft, path)
        except OSError as error:
            # Without hard links, of two processes at the same instant the last one's plan is read.
            if isinstance(error, FileExistsError) or path.exists():
                begun = Plan.load(self.partial)
                problem = plan.difference(begun)
                if problem is None:
                    return begun
                if self.finished() or len(list(self.staging.parent.iterdir())) > 1:
                    raise UserError(problem) from None
            os.replace(draft, path)
        return dataclasses.replace(plan, root=self.partial)

    def shard_folder(self, number: int) -> Path:
        """Folder of the finished shard ``number``."""
        return self.partial / _SHARDS_NAME / f"{number:06d}"

    def finished(self) -> set[int]:
        """Numbers of the finished shards."""
        folder = self.partial / _SHARDS_NAME
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return {int(name) for name in names if name.isdecimal()}

    def put_shard(self, written: Path, number: int) -> None:
        """Move the shard ``written`` in the staging directory to its place.

        If another process has put the same shard there, that one stays: they are identical.
        """
        target = self.shard_folder(number)
        with writing(target):
            flush_to_disk(written)
            target.parent.mkdir(exist_ok=True)
            try:
                os.rename(written, target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                shutil.rmtree(written)
            flush_to_disk(target.parent)

    def publish(self, made: Path) -> None:
        """Move all files of the folder ``made`` into place, corpus.json last.

        Only renames lie between the removal of an old corpus and the completion of the new one.
        """
        files = sorted(path for path in made.rglob("*") if path.is_file())
        files.sort(key=lambda path: path.name == FILE_NAME)
        with writing(self.root):
            flush_all_to_disk(files)
            require_kind(self.root / FILE_NAME, Corpus.KIND)
            (self.root / FILE_NAME).unlink(missing_ok=True)
            for old in own_files(self.root):
                old.unlink(missing_ok=True)
            published = self.staging / _PUBLISHED_NAME
            published.write_text(sha256_of_files(made / FILE_NAME))
            os.replace(published, self.partial / _PUBLISHED_NAME)
            for file in files:
                target = self.root / file.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        self.remove_work()

    def remove_published_work(self) -> None:
        """Remove the shards of the corpus that is here, if its run was killed before it could."""
        published, corpus = self.partial / _PUBLISHED_NAME, self.root / FILE_NAME
        exist = published.exists() and corpus.exists()
        if exist and published.read_text() == sha256_of_files(corpus):
            self.remove_work()

    def remote_staging(self) -> list[str]:
        """Staging directories of other machines: in use, or left by killed processes."""
        names = sorted(path.name for path in self.staging.parent.iterdir())
        return [name for name in names if not _is_from_here(name)]

    @property
    def is_publishing(self) -> bool:
        """Whether files of the corpus have begun to be moved into place."""
        return (self.partial / _PUBLISHED_NAME).exists()

    def remove_work(self) -> None:
        """Remove all shards and the plan."""
        with contextlib.suppress(OSError):  # none was finished, or another process was faster
            # All at once: half of the shards would pass for finished ones.
            os.rename(self.partial / _SHARDS_NAME, self.staging / "joined")
        (self.partial / Plan.FILE_NAME).unlink(missing_ok=True)
        (self.partial / _PUBLISHED_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.staging / "joined", ignore_errors=True)


def own_files(root: Path) -> list[Path]:
    """Files in ``root`` that have the names of a corpus's files, corpus.json excepted."""
    return [path for pattern in _OWN_FILES for path in root.glob(pattern)]


@contextlib.contextmanager
def corpus_folder(root: Path, overwrite: bool, *, shared: bool) -> Iterator[CorpusFolder]:
    """Open ``root`` to write a corpus into it, exclusively or ``shared`` with other processes.

    On an error or Ctrl-C this process's unfinished work is removed; finished shards stay.

    Args:
        root: the corpus folder.
        overwrite: whether it may hold a corpus already.
        shared: whether other processes may work in it too.

    Raises:
        UserError: if the folder cannot be written, holds a corpus already (unless ``overwrite``),
            or files of other origin that the corpus would replace, or if another process is at
            work in it.
    """
    is_new = not root.exists()
    partial = root / PARTIAL_NAME
    with _locked(root, shared):
        try:
            with staging_directory(partial / _STAGING_NAME) as staging:
                folder = CorpusFolder(root, staging)
                folder.remove_published_work()
                has_corpus = (root / FILE_NAME).exists()
                if has_corpus and not overwrite:
                    raise UserError(
                        f"{root} already holds a corpus; choose another --output or pass "
                        "--overwrite"
                    )
                require_kind(root / FILE_NAME, Corpus.KIND)
                if not has_corpus and not (partial / Plan.FILE_NAME).exists():
                    require_new(own_files(root), "choose another --output")
                yield folder
        finally:
            _remove_if_unused(partial)
            if is_new:
                with contextlib.suppress(OSError):  # it is not empty
                    root.rmdir()


@contextlib.contextmanager
def staging_directory(folder: Path) -> Iterator[Path]:
    """Yield a new directory in ``folder`` for this process alone; remove it at the end.

    Those of killed processes of this machine, which no lock holds any more, are removed first.

    Raises:
        UserError: if it cannot be created.
    """
    with writing(folder):
        directory, descriptor = _new_directory(folder)
    try:
        yield directory
    finally:
        os.close(descriptor)
        shutil.rmtree(directory, ignore_errors=True)


def _is_from_here(name: str) -> bool:
    """Whether a process of this machine has made the staging directory ``name``."""
    return bool(re.fullmatch(rf"{re.escape(socket.gethostname())}-\d+-[0-9a-f]{{8}}", name))


def _new_directory(folder: Path) -> tuple[Path, int]:
    """A new directory, and the descriptor that holds its lock."""
    problem: OSError = FileExistsError(errno.EEXIST, "no name was free", str(folder))
    for _ in range(_ATTEMPTS):
        directory = folder / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.iterdir():
                if _is_from_here(left.name):
                    _remove_if_deserted(left)
            directory.mkdir()
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, FileExistsError) as error:
            problem = error  # another process has found the folder empty, and removed it
            continue
        # Before it was locked, another process may have taken it for a deserted one.
        if _try_lock(descriptor, fcntl.LOCK_EX) is not False and directory.exists():
            return directory, descriptor
        os.close(descriptor)
    raise problem


def _remove_if_deserted(directory: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if _try_lock(descriptor, fcntl.LOCK_EX):
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool | None:
    """Lock a folder without waiting: whether it worked, None if this disk has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def _locked(root: Path, shared: bool) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(
            f"cannot write to {root}: {error.strerror or error}; choose another --output"
        ) from error
    try:
        # The lock is on the folder itself, so that no file is left, and ends with the process.
        if _try_lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX) is False:
            raise UserError(
                f"another process is writing a corpus into {root}; wait for it, or choose "
                "another --output"
            )
        yield
    finally:
        os.close(descriptor)


def _remove_if_unused(partial: Path) -> None:
    """Remove what is left without a finished shard, unless another process works here."""
    try:
        (partial / _STAGING_NAME).rmdir()
        (partial / _SHARDS_NAME).mkdir(exist_ok=True)
        (partial / _SHARDS_NAME).rmdir()
    except OSError:
        return  # one of them is not empty
    for name in (Plan.FILE_NAME, _PUBLISHED_NAME):
        (partial / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # another process has started from scratch
        partial.rmdir()
