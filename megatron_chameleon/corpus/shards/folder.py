"""The corpus folder while it is made: finished shards apart, until all of the corpus is there.

    OUTPUT/.partial/plan.json        what all who work here have agreed on
    OUTPUT/.partial/shards/000012    a finished shard
    OUTPUT/.partial/desks/HOST-xyz   what a process is writing; renamed when it is whole
    OUTPUT/.partial/published        hash of the corpus.json that the shards were joined to: where a
                                     run ended before it removed them, the next one can tell

Renames are what several machines can rely on, on any disk they share. The locks are a courtesy to
the person who starts the same work twice on one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import shutil
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
from megatron_chameleon.corpus.shards.desk import desk_in, elsewhere_in, try_lock
from megatron_chameleon.corpus.shards.plan import Plan
from megatron_chameleon.corpus.tokenization.file import FILE_NAMES as TOKENIZER_NAMES
from megatron_chameleon.errors import UserError

PARTIAL_NAME = ".partial"
TOKENS_NAME = "tokens"
SOURCES_NAME = "sources.json"
# What a corpus folder holds besides corpus.json; of a corpus that is replaced, all of it goes.
_OWN_FILES = (
    f"{TOKENS_NAME}/*.bin",
    f"{TOKENS_NAME}/*.idx",
    f"{TOKENS_NAME}/*.xxh3",
    *TOKENIZER_NAMES.values(),
    SOURCES_NAME,
    DiscoveredDomains.FILE_NAME,
    CENTROIDS_NAME,
)
_SHARDS_NAME, _DESKS_NAME, _PUBLISHED_NAME = "shards", "desks", "published"


class CorpusFolder:
    """The folder ``root``, held by this process; :func:`corpus_folder` makes one.

    Attributes:
        root: where the corpus is to be.
        partial: where what is made of it lies meanwhile.
        desk: this process's own folder for what it is writing.
    """

    def __init__(self, root: Path, desk: Path) -> None:
        self.root = root
        self.partial = root / PARTIAL_NAME
        self.desk = desk

    def agree(self, plan: Plan) -> Plan:
        """Write ``plan`` if there is none; return the one that all here work by.

        Raises:
            UserError: if there is another one and work was done by it, saying how they differ.
        """
        dataclasses.replace(plan, root=self.desk).save()
        path = self.partial / Plan.FILE_NAME
        if not _link(self.desk / Plan.FILE_NAME, path):
            begun = Plan.load(self.partial)
            problem = plan.difference(begun)
            if problem is None:
                return begun
            if self.finished() or len(list(self.desk.parent.iterdir())) > 1:
                raise UserError(problem)
            os.replace(self.desk / Plan.FILE_NAME, path)
        return dataclasses.replace(plan, root=self.partial)

    def shard_folder(self, number: int) -> Path:
        """Where the finished shard ``number`` is."""
        return self.partial / _SHARDS_NAME / f"{number:06d}"

    def finished(self) -> set[int]:
        """Numbers of the finished shards."""
        folder = self.partial / _SHARDS_NAME
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return {int(name) for name in names if name.isdecimal()}

    def put_shard(self, written: Path, number: int) -> None:
        """Give the shard that is ``written`` on the desk its place, unless another is there."""
        target = self.shard_folder(number)
        with writing(target):
            flush_to_disk(written)
            target.parent.mkdir(exist_ok=True)
            _rename_unless_there(written, target)
            flush_to_disk(target.parent)

    def publish(self, made: Path) -> None:
        """Move all files in ``made`` into place, corpus.json last: then the folder is a corpus.

        Only renames lie between the end of an old corpus and the new one being whole.
        """
        files = sorted(path for path in made.rglob("*") if path.is_file())
        files.sort(key=lambda path: path.name == FILE_NAME)
        with writing(self.root):
            flush_all_to_disk(files)
            require_kind(self.root / FILE_NAME, Corpus.KIND)
            (self.root / FILE_NAME).unlink(missing_ok=True)
            for old in own_files(self.root):
                old.unlink(missing_ok=True)
            published = self.desk / _PUBLISHED_NAME
            published.write_text(sha256_of_files(made / FILE_NAME))
            os.replace(published, self.partial / _PUBLISHED_NAME)
            for file in files:
                target = self.root / file.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        self.remove_work()

    def remove_published_work(self) -> None:
        """Remove the shards of the corpus that is here, where a run ended before it could."""
        published, corpus = self.partial / _PUBLISHED_NAME, self.root / FILE_NAME
        is_there = published.exists() and corpus.exists()
        if is_there and published.read_text() == sha256_of_files(corpus):
            self.remove_work()

    def left_elsewhere(self) -> list[str]:
        """Names of what processes of other machines have half-written.

        Nobody here can tell whether they are at work or were killed.
        """
        return elsewhere_in(self.desk.parent)

    def remove_work(self) -> None:
        """Remove all shards and the plan."""
        with contextlib.suppress(OSError):  # none was finished, or another process was faster
            # To the desk first, at once: half of the shards would be taken for finished ones.
            os.rename(self.partial / _SHARDS_NAME, self.desk / "joined")
        (self.partial / Plan.FILE_NAME).unlink(missing_ok=True)
        (self.partial / _PUBLISHED_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.desk / "joined", ignore_errors=True)


def own_files(root: Path) -> list[Path]:
    """Files in the folder ``root`` that have the names of a corpus's, its corpus.json apart."""
    return [path for pattern in _OWN_FILES for path in root.glob(pattern)]


@contextlib.contextmanager
def corpus_folder(root: Path, overwrite: bool, *, shared: bool) -> Iterator[CorpusFolder]:
    """A context in which a corpus is made in ``root``, alone or with others.

    Leaving it by an error or Ctrl-C removes what this process has half-written; finished shards
    stay, and if there is none, nothing does.

    Args:
        root: the corpus folder.
        overwrite: whether it may hold a corpus already.
        shared: whether other processes may work in it too.

    Raises:
        UserError: if the folder cannot be written, holds a corpus already (unless ``overwrite``),
            or files of other origin that the corpus would replace, or if another process is at
            work in it.
    """
    made = not root.exists()
    with _held(root, shared):
        try:
            with desk_in(root / PARTIAL_NAME / _DESKS_NAME) as desk:
                folder = CorpusFolder(root, desk)
                folder.remove_published_work()
                if (root / FILE_NAME).exists() and not overwrite:
                    raise UserError(
                        f"{root} already holds a corpus; choose another --output or pass "
                        "--overwrite"
                    )
                require_kind(root / FILE_NAME, Corpus.KIND)
                if (
                    not (root / FILE_NAME).exists()
                    and not (root / PARTIAL_NAME / Plan.FILE_NAME).exists()
                ):
                    require_new(own_files(root), "choose another --output")
                yield folder
        finally:
            _remove_if_unused(root / PARTIAL_NAME)
            if made:
                with contextlib.suppress(OSError):  # there is something in it
                    root.rmdir()


@contextlib.contextmanager
def _held(root: Path, shared: bool) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(
            f"cannot write to {root}: {error.strerror or error}; choose another --output"
        ) from error
    try:
        # The lock is on the folder itself, so that no file is left, and goes with the process.
        if try_lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX) is False:
            raise UserError(
                f"another process is writing a corpus into {root}; wait for it, or choose "
                "another --output"
            )
        yield
    finally:
        os.close(descriptor)


def _remove_if_unused(partial: Path) -> None:
    """Remove what is left without a finished shard, unless another process has a desk there."""
    try:
        (partial / _DESKS_NAME).rmdir()
        (partial / _SHARDS_NAME).mkdir(exist_ok=True)
        (partial / _SHARDS_NAME).rmdir()
    except OSError:
        return  # one of them is not empty
    for name in (Plan.FILE_NAME, _PUBLISHED_NAME):
        (partial / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody has begun anew
        partial.rmdir()


def _link(draft: Path, path: Path) -> bool:
    """Put ``draft`` at ``path`` unless something is there; say whether it was put there."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links; of two at the same instant the last is read
        if path.exists():
            return False
        os.replace(draft, path)
    return True


def _rename_unless_there(folder: Path, target: Path) -> None:
    """Rename ``folder``; one that is there stays: whoever else made it, made the same."""
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(folder)
