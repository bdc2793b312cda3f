"""Write a corpus folder atomically: staging directories, locks, renames into place.

- ``OUTPUT/.partial/plan.json`` is the plan that all processes have agreed on.
- ``OUTPUT/.partial/shards/000012`` is a finished shard.
- ``OUTPUT/.partial/staging/HOST-PID-x`` is the staging directory of a process, which moves complete
  files and shards out of it.
- ``OUTPUT/.partial/published`` holds the hash of the corpus.json made from these shards. If a run
  is killed before it removes the shards, the next run uses this hash to detect that the corpus is
  complete, and removes the shards.

The plan contains everything that determines the contents of the shards. Correctness relies on
renames alone, which work on any disk that machines share. The lock only prevents starting the same
work twice on one machine.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_chameleon.artifacts.corpus import Corpus
from megatron_chameleon.artifacts.discovered import CENTROIDS_NAME, DiscoveredDomains
from megatron_chameleon.artifacts.files import (
    flush_all_to_disk,
    flush_to_disk,
    require_new,
    sha256_of_files,
    sha256_of_json,
    writing,
)
from megatron_chameleon.artifacts.provenance import package_versions, without_credentials
from megatron_chameleon.artifacts.record import FolderRecord, json_values, require_kind
from megatron_chameleon.corpus.options import PreprocessOptions
from megatron_chameleon.corpus.readers import row_group_bytes
from megatron_chameleon.corpus.sources import Chunk, Source
from megatron_chameleon.corpus.tokenizer import FILE_NAMES as TOKENIZER_NAMES
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import flag_of

PARTIAL_NAME = ".partial"
TOKENS_NAME = "tokens"
SOURCES_NAME = "sources.json"
WEIGHTS_NAME = "data-path.json"
# The files of a corpus besides corpus.json; replacing a corpus removes all of them.
_OWN_FILES = (
    *(f"{TOKENS_NAME}/*.{suffix}" for suffix in ("bin", "idx", "xxh3")),
    *TOKENIZER_NAMES.values(),
    SOURCES_NAME,
    WEIGHTS_NAME,
    DiscoveredDomains.FILE_NAME,
    CENTROIDS_NAME,
)
_SHARDS_NAME, _STAGING_NAME, _PUBLISHED_NAME = "shards", "staging", "published"
_ATTEMPTS = 100

# Packages that may tokenize differently in other releases.
_PACKAGES = ("megatron-chameleon", "tokenizers", "sentencepiece", "tiktoken")
# These options are not compared. The resolved sources are compared instead, and malformed lines are
# checked at the end.
_NOT_COMPARED = ("input", "valid_input", "test_input", "held_out", "max_malformed_share")
# Maximum number of shards, each of which is a folder.
_MAX_SHARDS = 1_000_000


@dataclasses.dataclass(frozen=True)
class ShardPlan(FolderRecord):
    """Sources, their division into shards, and how they are tokenized.

    Attributes:
        options: name -> value of the options that affect the tokens.
        tokenizer: hash of the tokenizer.
        versions: versions of the packages that make the tokens.
        sources: all sources, with their states.
        shards: chunks of each shard.
    """

    KIND = "preprocessing plan"
    FILE_NAME = "plan.json"
    FORMAT_VERSION = 1
    MADE_BY = "remove the folder to start from scratch"

    options: dict[str, Any]
    tokenizer: str
    versions: dict[str, str]
    sources: list[Source]
    shards: list[list[Chunk]]

    @property
    def hash(self) -> str:
        """Hex SHA-256 of all fields but ``root``."""
        body = dataclasses.asdict(self)
        del body["root"]
        return sha256_of_json(body)

    @property
    def budgets(self) -> dict[str, int] | None:
        """Domain -> train tokens of a subset; None for a corpus of all text."""
        budgets: dict[str, int] | None = self.options.get("max_tokens")
        return budgets

    def shard_bytes(self, number: int) -> int:
        """Bytes on disk of shard ``number``; sources of unknown size count as 0."""
        return sum(chunk.bytes for chunk in self.shards[number])

    def difference(self, existing: ShardPlan) -> str | None:
        """Describe in one line how this plan differs from ``existing``; None if they are equal.

        Modification times are not compared: a file that was copied or touched has the same content.
        """
        now, then = self._compared(), existing._compared()
        if list(now.items()) == list(then.items()) and self.shards == existing.shards:
            return None
        changed = [name for name in {**now, **then} if now.get(name) != then.get(name)]
        change = "the order or the row groups of --input have changed"
        if changed:
            now_and_then = [values.get(changed[0], "absent") for values in (now, then)]
            change = f"{changed[0]} is {now_and_then[0]} and was {now_and_then[1]}"
        return (
            f"{change} when the work in {existing.root} was started; restore it, or remove "
            f"{existing.root} to start from scratch"
        )

    def _compared(self) -> dict[str, str]:
        """Everything that determines the shards, keyed by the names that messages use."""
        of_options = {name: value for name, value in self.options.items() if name != "max_tokens"}
        compared = {flag_of(name): repr(value) for name, value in of_options.items()}
        for name, budget in sorted((self.budgets or {}).items()):
            compared[f"--max-tokens with --mixture for domain '{name}'"] = f"{budget} tokens"
        compared |= {"the hash of --tokenizer-model": self.tokenizer, **self.versions}
        for source in self.sources:
            domain = f"domain {source.domain}, split {source.split}"
            compared[source.name] = f"{source.bytes} bytes of {domain}"
        return compared


def plan_shards(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    sources: Sequence[Source],
    budgets: dict[str, int] | None = None,
) -> ShardPlan:
    """Plan the shards for ``options``, with the ``budgets`` of a subset.

    Raises:
        UserError: if there are too many shards, or a source that has to be divided cannot be read.
    """
    shards_at_least = sum(source.bytes for source in sources) // options.shard_bytes
    if shards_at_least > _MAX_SHARDS:
        raise UserError(
            f"--shard-bytes {options.shard_bytes} makes {shards_at_least} shards; increase it"
        )
    compared = {
        **json_values(options.source),
        **json_values(options.domains),
        "eod_token": tokenizer.eod_token,
        "split": options.split,
        "shard_bytes": options.shard_bytes,
        "max_tokens": budgets,
    }
    return ShardPlan(
        root=options.output,
        options={name: value for name, value in compared.items() if name not in _NOT_COMPARED},
        tokenizer=tokenizer.sha256,
        versions=package_versions(_PACKAGES),
        sources=list(sources),
        shards=divide(sources, options.shard_bytes),
    )


def divide(sources: Sequence[Source], target_bytes: int) -> list[list[Chunk]]:
    """Divide ``sources`` into shards of at most ``target_bytes`` on disk, where that is possible.

    Large sources are divided if their format allows it, and small sources share a shard. The
    concatenated chunks of all shards are the sources in their original order.

    Raises:
        UserError: if a parquet file that has to be divided cannot be read.
    """
    shards: list[list[Chunk]] = []
    room = 0
    for number, source in enumerate(sources):
        for chunk in _chunks(number, source, target_bytes):
            is_size_unknown = source.kind == "dataset" and source.bytes == 0
            size = target_bytes if is_size_unknown else chunk.bytes
            if not shards or size > room:
                shards.append([])
                room = target_bytes
            shards[-1].append(chunk)
            room -= size
    return shards


def _chunks(number: int, source: Source, target_bytes: int) -> Iterator[Chunk]:
    if not source.cuttable or source.bytes <= target_bytes:
        yield Chunk(number, bytes=source.bytes)
        return
    # Each chunk is listed with its Chunk.start, and with the byte at which it begins.
    edges = [(0, 0)]
    if source.kind == "parquet":
        total = 0
        for group, group_bytes in enumerate(row_group_bytes(source.path)):
            size = total - edges[-1][1]  # bytes of the current chunk
            if size and size + group_bytes > target_bytes:
                edges.append((group, total))
            total += group_bytes
    else:
        count = -(-source.bytes // target_bytes)
        edges = [(at, at) for at in (source.bytes * i // count for i in range(count))]
    ends = [*edges[1:], (None, source.bytes)]
    for (start, start_byte), (stop, stop_byte) in zip(edges, ends, strict=True):
        yield Chunk(number, start, stop, stop_byte - start_byte)


@dataclasses.dataclass(frozen=True)
class CorpusFolder:
    """The folder ``root``, locked by this process; :func:`corpus_folder` opens it.

    Attributes:
        root: the corpus folder.
        staging: staging directory of this process.
    """

    root: Path
    staging: Path

    @property
    def partial(self) -> Path:
        """The folder of unfinished work."""
        return self.root / PARTIAL_NAME

    def agree(self, plan: ShardPlan) -> ShardPlan:
        """Write ``plan`` if the folder has none; return the plan of the folder.

        The plan of the folder has no credentials of URLs, so they may change before it is resumed.

        Raises:
            UserError: naming the difference, if the folder has another plan with shards that are
                finished or in progress.
        """
        plan = dataclasses.replace(
            plan,
            root=self.staging,
            sources=[
                dataclasses.replace(source, path=without_credentials(source.path))
                for source in plan.sources
            ],
        )
        plan.save()
        draft, path = self.staging / ShardPlan.FILE_NAME, self.partial / ShardPlan.FILE_NAME
        try:
            os.link(draft, path)
        except OSError:
            # The link fails if a plan exists. It also fails on a disk without hard links; there, if
            # two processes write a plan at the same time, the later plan replaces the earlier one.
            if path.exists():
                existing = ShardPlan.load(self.partial)
                problem = plan.difference(existing)
                if problem is None:
                    return existing
                others = {path.name for path in self.staging.parent.iterdir()} - {self.staging.name}
                if self.finished() or not all(map(_is_of_ended_process, others)):
                    raise UserError(problem) from None
            os.replace(draft, path)
        return dataclasses.replace(plan, root=self.partial)

    def shard_folder(self, number: int) -> Path:
        """Folder of the finished shard ``number``."""
        return self.partial / _SHARDS_NAME / f"{number:06d}"

    def finished(self) -> set[int]:
        """Numbers of the finished shards."""
        folder = self.partial / _SHARDS_NAME
        names = os.listdir(folder) if folder.exists() else []  # glob ignores unreadable folders
        return {int(name) for name in names if name.isdecimal()}

    def put_shard(self, written: Path, number: int) -> None:
        """Move the shard ``written`` from the staging directory to its final path.

        If another process has written the same shard, its identical copy is kept.
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

    def remove_shard(self, number: int) -> None:
        """Remove the finished shard ``number``, so that it is made again."""
        removed = self.staging / f"removed-{secrets.token_hex(4)}"
        with writing(removed):
            os.rename(self.shard_folder(number), removed)
            shutil.rmtree(removed)

    def publish(self, made: Path) -> None:
        """Move all files of the folder ``made`` into place, corpus.json last.

        Between the removal of an old corpus and the completion of the new corpus, files are only
        renamed.
        """
        files = sorted(path for path in made.rglob("*") if path.is_file())
        files.sort(key=lambda path: path.name == Corpus.FILE_NAME)
        with writing(self.root):
            flush_all_to_disk(files)
            require_kind(self.root / Corpus.FILE_NAME, Corpus.KIND)
            for old in (self.root / Corpus.FILE_NAME, *_own_files(self.root)):
                old.unlink(missing_ok=True)
            published = self.staging / _PUBLISHED_NAME
            published.write_text(sha256_of_files(made / Corpus.FILE_NAME))
            os.replace(published, self.partial / _PUBLISHED_NAME)
            for file in files:
                target = self.root / file.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
        self.remove_work()

    def remove_published_work(self) -> None:
        """Remove the shards of a published corpus whose run was killed before removing them."""
        corpus, published = self.root / Corpus.FILE_NAME, self.partial / _PUBLISHED_NAME
        exist = corpus.exists() and published.exists()
        if exist and published.read_text() == sha256_of_files(corpus):
            self.remove_work()

    @property
    def is_publishing(self) -> bool:
        """Whether files of the corpus are being moved into place."""
        return (self.partial / _PUBLISHED_NAME).exists()

    def remove_work(self) -> None:
        """Remove all shards, the plan and the staging directories."""
        # Renaming fails if there are no shards, or if another process has removed them.
        with contextlib.suppress(OSError):
            # The folder is renamed before it is removed, since a partly removed set of shards must
            # not be joined.
            removed = self.partial / f"removed-{secrets.token_hex(4)}"
            os.rename(self.partial / _SHARDS_NAME, removed)
        # The shards are removed before the file `published`, since this file makes the next run
        # resume an interrupted removal.
        for removed in self.partial.glob("removed*"):
            shutil.rmtree(removed, ignore_errors=True)
        shutil.rmtree(self.partial, ignore_errors=True)


def _is_of_ended_process(name: str) -> bool:
    """Whether the staging directory ``name`` belongs to an ended process of this machine."""
    made_here = re.fullmatch(rf"{re.escape(socket.gethostname())}-(\d+)-\w+", name)
    return made_here is not None and not psutil.pid_exists(int(made_here[1]))


def _own_files(root: Path) -> list[Path]:
    """List the files in ``root`` with names of a corpus's files, except for corpus.json."""
    return [path for pattern in _OWN_FILES for path in root.glob(pattern)]


@contextlib.contextmanager
def corpus_folder(root: Path, overwrite: bool, *, shared: bool) -> Iterator[CorpusFolder]:
    """Open ``root`` to write a corpus into it, exclusively or ``shared`` with other processes.

    After an exception or Ctrl-C, this process's unfinished work is removed; finished shards are
    kept.

    Args:
        root: the corpus folder.
        overwrite: whether it may hold a corpus already.
        shared: whether other processes may work in it too.

    Raises:
        UserError: if the folder cannot be written, already holds a corpus (unless ``overwrite``),
            holds files of other origin that the corpus would replace, or is in use by another
            process.
    """
    is_new = not root.exists()
    partial = root / PARTIAL_NAME
    host = socket.gethostname()
    staging = partial / _STAGING_NAME / f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
    folder = CorpusFolder(root, staging)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        # The folder itself is locked, so no lock file is left behind. The lock ends with the
        # process.
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            is_alone = not shared
        except BlockingIOError:
            raise UserError(
                f"another process is writing a corpus into {root}; wait for it, or choose "
                "another --output"
            ) from None
        except OSError:  # a disk without locks
            is_alone = False
        if is_alone:  # remove staging directories of killed processes of this machine
            for stale in staging.parent.glob("*"):
                if stale.name.rsplit("-", 2)[0] == host:
                    shutil.rmtree(stale, ignore_errors=True)
        try:
            folder.remove_published_work()
            has_corpus = (root / Corpus.FILE_NAME).exists()
            if has_corpus and not overwrite:
                raise UserError(
                    f"{root} already holds a corpus; choose another --output or pass --overwrite"
                )
            require_kind(root / Corpus.FILE_NAME, Corpus.KIND)
            if not has_corpus and not (partial / ShardPlan.FILE_NAME).exists():
                require_new(_own_files(root), "choose another --output")
            with writing(staging):
                _make_directory(staging)
            yield folder
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            with contextlib.suppress(OSError):  # stop at a folder that is in use or not empty
                for name in (_STAGING_NAME, _SHARDS_NAME):
                    (partial / name).mkdir(exist_ok=True)
                    (partial / name).rmdir()
                for name in (ShardPlan.FILE_NAME, _PUBLISHED_NAME):
                    (partial / name).unlink(missing_ok=True)
                partial.rmdir()
            if is_new:
                # Removing the folder fails if it is not empty.
                with contextlib.suppress(OSError):
                    root.rmdir()
    finally:
        os.close(descriptor)


def _make_directory(path: Path) -> None:
    for _ in range(_ATTEMPTS):
        # Try again if another process has removed the empty parent in the meantime.
        with contextlib.suppress(FileNotFoundError):
            path.mkdir(parents=True)
            return
    path.mkdir(parents=True)
