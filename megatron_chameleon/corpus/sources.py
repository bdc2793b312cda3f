"""Resolve ``--input`` into sources: files, folders, globs and Hugging Face data sets.

Each source has a domain and a split, or leaves them to its documents.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import os
import re
import stat
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from megatron_chameleon.artifacts import Split
from megatron_chameleon.corpus.options import (
    MAX_DOMAIN_BYTES,
    DomainOptions,
    SourceOptions,
    is_domain_name,
)
from megatron_chameleon.corpus.records import DomainNames, describe_left_out, describe_unused
from megatron_chameleon.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import DatasetBuilder, IterableDataset

FileKind = Literal["lines", "parquet"]
SourceKind = Literal["lines", "parquet", "dataset"]

INSTALL_DATA = "pip install 'megatron-chameleon[data]'"
COMPRESSED_SUFFIXES = (".gz", ".zst")
# In folders; other suffixes are only read if the file is named.
FOLDER_SUFFIXES: dict[str, FileKind] = {".jsonl": "lines", ".parquet": "parquet"}
FILE_SUFFIXES: dict[str, FileKind] = {**FOLDER_SUFFIXES, ".json": "lines", ".ndjson": "lines"}
_FORMATS = "use JSON lines as .jsonl, .jsonl.gz or .jsonl.zst, or .parquet"

DATASET_PREFIX = "hf:"
ALL_CONFIGS = "*"
# Split names of data sets -> our splits.
_SPLITS: dict[str, Split] = {
    "train": "train",
    "validation": "valid",
    "valid": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_HELD_OUT_WORDS = {"validation", "valid", "val", "test"}
_BATCH_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Source:
    """One file, or one shard of a data set, that documents are read from.

    Attributes:
        name: its name in messages, unique in a list of sources.
        kind: its format: "lines" (JSON lines), "parquet", or "dataset" for formats read through
            ``datasets``.
        path: of the file on this machine, its address on the hub, or the name of the data set.
        domain: of all its documents; None if each names its own, or domains are not requested.
        split: of all its documents; None if decided by the hash of each text.
        bytes: on disk; 0 if unknown.
        modified_ns: modification time, in nanoseconds since 1970; 0 if unknown.
        cuttable: whether a range of it can be read: bytes of plain lines, row groups of parquet.
        dataset: the data set it belongs to, with revision, config and split; None if there is none.
        shard: of a "dataset", number of the shard among ``num_shards``.
        num_shards: of a "dataset".
    """

    name: str
    kind: SourceKind
    path: str
    domain: str | None = None
    split: Split | None = None
    bytes: int = 0
    modified_ns: int = 0
    cuttable: bool = False
    dataset: str | None = None
    shard: int = 0
    num_shards: int = 1


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A range of a source, or all of it.

    Attributes:
        source: position in the list of sources.
        start: a byte of plain JSON lines, a row group of parquet, otherwise 0.
        stop: start of the next chunk, None for the end of the source. A line belongs to the chunk
            in which it begins.
        bytes: on disk; 0 if unknown.
    """

    source: int
    start: int = 0
    stop: int | None = None
    bytes: int = 0


def find_sources(options: SourceOptions, domains: DomainOptions | None = None) -> list[Source]:
    """The sources behind ``options.input`` and, with ``domains``, the held-out inputs, in order.

    A source that is named twice for the same domain is listed once.

    Args:
        options: what to read.
        domains: how domains and splits are assigned; None if they are not requested: of data sets
            by name only the training split is listed then.

    Raises:
        UserError: for an input without readable files, a source without a domain, and an option
            without effect.
    """
    if not options.inputs:
        raise UserError("--input is empty; pass files, folders or globs")
    if domains is None:
        return _with_unique_names(
            dataclasses.replace(source, domain=named)
            for named, source in _named_sources("--input", options.inputs, None)
            if source.split in (None, "train")
        )
    names, left_out, any_unnamed = DomainNames(domains), Counter[str](), False
    sources = []
    all_inputs: list[tuple[str, list[str], Split | None]] = [
        ("--input", options.inputs, None),
        ("--valid-input", domains.valid_inputs, "valid"),
        ("--test-input", domains.test_inputs, "test"),
    ]
    for flag, inputs, split in all_inputs:
        for named, source in _named_sources(flag, inputs, split):
            domain = named
            if named is None:
                any_unnamed = True
                found = _domain_of(source, domains, flag)
                domain = found and names.final(found)
                if found and domain is None:
                    left_out[found] += 1
                    continue
            sources.append(dataclasses.replace(source, domain=domain))
    if domains.domain_flag is not None and not any_unnamed:
        raise UserError(
            f"{domains.domain_flag} has no effect: every --input names its domain; leave out one "
            "or the other"
        )
    if left_out:
        warnings.warn(describe_left_out(left_out, "files"), stacklevel=2)
    unused = describe_unused(domains, names.renamed)
    if unused and domains.domain_key is None:  # with a key it is known when all was read
        warnings.warn(unused, stacklevel=2)
    if not sources:
        raise UserError("--rename-domain leaves out all of --input; correct it")
    return _with_unique_names(_with_own_splits(sources))


def _named_sources(
    flag: str, inputs: Iterable[str], split: Split | None
) -> Iterator[tuple[str | None, Source]]:
    """NAME of NAME=PATH or None, and each source; all for ``split`` if it is not None."""
    for value in inputs:
        # A path may hold '=' itself, after its first '/'.
        name, equals, pattern = value.partition("=")
        is_named = equals and "/" not in name and not name.startswith(DATASET_PREFIX)
        if is_named and not (is_domain_name(name) and pattern):
            raise UserError(
                f"{flag} {value}: must be NAME=PATH with NAME of at most {MAX_DOMAIN_BYTES} bytes"
            )
        path = pattern if is_named else value
        if path.startswith(DATASET_PREFIX):
            sources = _dataset_sources(path, flag, split)
        else:
            sources = [_file_source(str(file), split) for file in find_files(path, flag)]
        for source in sources:
            yield name if is_named else None, source


def _file_source(path: str, split: Split | None) -> Source:
    kind = kind_of_file(path)
    assert kind is not None, f"{path} has an unsupported format; it should not have been found"
    size, modified_ns = size_and_time(path)
    cuttable = kind == "parquet" or not is_compressed(path)
    return Source(path, kind, path, None, split, size, modified_ns, cuttable)


def _domain_of(source: Source, domains: DomainOptions, flag: str) -> str | None:
    """The domain in a source's config or path, before renaming; None if its records name it."""
    if domains.path_pattern is not None:
        found = domains.path_pattern.search(source.path)
        if not found or not is_domain_name(found[1] or ""):
            raise UserError(
                f"{source.path}: --domain-from-path {domains.domain_from_path} finds no domain; "
                "correct it, or pass this input as NAME=PATH"
            )
        return found[1]
    config = None
    if domains.domain_from_config and source.dataset is not None:
        config = DatasetName.parse(source.dataset).config
    if config is None and domains.domain_key is None:
        raise UserError(
            f"{flag} {source.path} has no domain; pass NAME={source.path}, or --domain-key for a "
            "key in its lines"
        )
    return config


def _with_own_splits(sources: list[Source]) -> list[Source]:
    """Assign all of ``--input`` to train for domains with valid and test sources of their own.

    With a domain key, this is assumed of all domains.
    """
    own: defaultdict[str | None, set[Split]] = defaultdict(set)
    for source in sources:
        if source.split is not None:
            own[source.domain].add(source.split)

    def split_of(source: Source) -> Split | None:
        if source.split not in (None, "train"):
            return source.split
        return "train" if {"valid", "test"} <= own[source.domain] else None

    return [dataclasses.replace(source, split=split_of(source)) for source in sources]


def _with_unique_names(sources: Iterable[Source]) -> list[Source]:
    """The sources without repetitions.

    Raises:
        UserError: for a source of two splits.
    """
    found: dict[tuple[str, int, str | None], Source] = {}
    for source in sources:
        first = found.setdefault((source.path, source.shard, source.domain), source)
        if first.split != source.split:
            raise UserError(
                f"{source.path} is passed for {first.split or 'no split'} and for "
                f"{source.split or 'no split'}; leave one of them out"
            )
    times = Counter(source.name for source in found.values())
    return [
        dataclasses.replace(source, name=f"{source.domain or ''}={source.name}")
        if times[source.name] > 1
        else source
        for source in found.values()
    ]


# Files


def kind_of_file(path: str, suffixes: dict[str, FileKind] = FILE_SUFFIXES) -> FileKind | None:
    """The format of the file at ``path`` by its suffix; None if it is unsupported."""
    name = PurePosixPath(path)
    if name.suffix not in COMPRESSED_SUFFIXES:
        return suffixes.get(name.suffix)
    return "lines" if suffixes.get(PurePosixPath(name.stem).suffix) == "lines" else None


def is_compressed(path: str) -> bool:
    """Whether ``path`` is decompressed while it is read, so that it can only be read whole."""
    return PurePosixPath(path).suffix in COMPRESSED_SUFFIXES


def find_files(pattern: str, flag: str) -> list[Path]:
    """The files at ``pattern``: a file, those of a folder at any depth, or the matches of a glob.

    Hidden files are skipped, and links to folders are followed once.

    Raises:
        UserError: if there is none, or one of another format is named; ``flag`` named it.
    """
    path = Path(pattern).expanduser()
    # A name that exists is never a pattern, whatever brackets it has.
    exists = os.path.lexists(path)
    matches = [path] if exists else [Path(m) for m in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise UserError(f"{flag} {pattern}: no such file or folder, and no match; check the path")
    files: list[Path] = []
    for match in matches:
        if match.is_dir():
            inside = sorted(_walk(match))
            inside = [file for file in inside if kind_of_file(str(file), FOLDER_SUFFIXES)]
            _warn_if_splits(match, inside, flag)
            files += inside
        elif kind_of_file(str(match)) is None:
            raise UserError(f"{flag} {match}: unsupported format; {_FORMATS}")
        else:
            files.append(match)
    for file in files:
        try:
            str(file).encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{flag} {str(file)!a}: file name is not UTF-8; rename it") from error
    if not files:
        raise UserError(f"{flag} {pattern}: no file of a supported format; {_FORMATS}")
    return files


def _warn_if_splits(folder: Path, files: list[Path], flag: str) -> None:
    """Warn if a folder mixes files named after train and held-out splits."""
    names = [str(file.relative_to(folder)).lower() for file in files]
    words = {word for name in names for word in re.findall("[a-z]+", name)}
    held_out = sorted(words & _HELD_OUT_WORDS)
    if "train" in words and held_out:
        warnings.warn(
            f"{flag} {folder}: files are named after the splits train and {', '.join(held_out)}, "
            "which are treated alike; pass the others by --valid-input and --test-input, or all as "
            f"{DATASET_PREFIX}{folder}",
            stacklevel=5,
        )


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:  # skipping the folder would lose text silently
        raise UserError(
            f"cannot read the folder {error.filename}: {error.strerror or error}; correct its "
            "permissions or --input"
        ) from error

    seen: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in files if not name.startswith("."))


def is_remote(path: str) -> bool:
    """Whether ``path`` is the address of a file on the hub."""
    return "://" in path


def open_source(path: str, cache_type: str = "readahead") -> BinaryIO:
    """Open a seekable stream of bytes; call it inside :func:`reading`.

    ``cache_type`` is fsspec's, for a file on the hub: sequential reading, or "none".
    """
    if not is_remote(path):
        return open(path, "rb", buffering=0)
    import fsspec

    stream: BinaryIO = fsspec.open(path, "rb", cache_type=cache_type).open()
    return stream


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert errors of reading a local or hub file into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or one_line(error)}; correct --input"
        ) from error
    except Exception as error:
        if isinstance(error, UserError) or not is_remote(path):
            raise
        # The libraries do not wrap exceptions of their HTTP client.
        raise UserError(f"cannot read {path}: {one_line(error)}; try again later") from error


def one_line(error: BaseException) -> str:
    """The message of ``error`` on one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def size_and_time(path: str) -> tuple[int, int]:
    """Bytes of a file, and its modification time in ns since 1970; 0 where unknown.

    Raises:
        UserError: if it is missing, unreadable or not a regular file.
    """
    with reading(path):
        if not is_remote(path):
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
                raise OSError(errno.EINVAL, "not a regular file", path)
            return status.st_size, status.st_mtime_ns
        import fsspec

        system, name = fsspec.url_to_fs(path)
        return int(system.info(name).get("size") or 0), 0


# Hugging Face data sets


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """The parts of ``hf:OWNER/NAME[@REVISION][:CONFIG][#SPLIT]``; a folder has no revision."""

    path: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetName:
        """Parse ``text``.

        Raises:
            UserError: if it has no name.
        """
        rest, _, split = text.removeprefix(DATASET_PREFIX).partition("#")
        head, colon, config = rest.rpartition(":")
        if not colon or "/" in config or os.path.isdir(os.path.expanduser(rest)):
            head, config = rest, ""
        folder = os.path.expanduser(head)
        revision = ""
        if os.path.isdir(folder) or head[:1] in ("/", ".", "~"):
            head = folder
        else:
            head, _, revision = head.partition("@")
        if not head:
            raise UserError(f"{text}: must be {DATASET_PREFIX}OWNER/NAME[:CONFIG]")
        return cls(head, revision or None, config or None, split or None)

    def __str__(self) -> str:
        parts = (("@", self.revision), (":", self.config), ("#", self.split))
        return f"{DATASET_PREFIX}{self.path}" + "".join(sign + part for sign, part in parts if part)


def read_dataset_shard(source: Source) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Stream the rows of one shard with ``datasets``; row numbers count from 1.

    Raises:
        UserError: if they cannot be read.
    """
    name = DatasetName.parse(source.path)
    with _dataset_errors(name):
        stream = _streams(name)[name.split or ""]
        if source.num_shards > 1:
            stream = stream.shard(num_shards=source.num_shards, index=source.shard, contiguous=True)
        row = 1
        for table in stream.with_format("arrow").iter(_BATCH_ROWS):
            for batch in table.combine_chunks().to_batches():
                yield row, batch
                row += batch.num_rows


def _dataset_sources(text: str, flag: str, split: Split | None) -> list[Source]:
    """The sources of a data set, by config, split and file; only those for ``split`` if not None.

    Raises:
        UserError: if the data set, config or split does not exist, or cannot be reached.
    """
    name = DatasetName.parse(text)
    configs = [name.config]
    if name.config == ALL_CONFIGS:
        with _dataset_errors(name):
            import datasets

            configs = list(datasets.get_dataset_config_names(name.path, revision=name.revision))
    found: list[Source] = []
    for config in configs:
        found += _config_sources(dataclasses.replace(name, config=config), split)
    if not found:
        raise UserError(f"{flag} {text}: no such split; name one as {text}#SPLIT")
    return found


def _config_sources(name: DatasetName, wanted: Split | None) -> Iterator[Source]:
    with _dataset_errors(name):
        import datasets

        builder = datasets.load_dataset_builder(name.path, name.config, revision=name.revision)
        files = builder.config.data_files
        revision = _revision(files) or name.revision
        name = dataclasses.replace(name, config=builder.config.name, revision=revision)
        if _is_read_by_us(builder):
            by_split: dict[str, Sequence[Any]] = {str(k): list(v) for k, v in files.items()}
        else:
            streams = _streams(name)
            by_split = {split: [None] * streams[split].num_shards for split in streams}
    for split, role in _splits_of(name, list(by_split)).items():
        if wanted is not None and role not in (None, wanted):
            continue
        dataset, parts = str(dataclasses.replace(name, split=split)), by_split[split]
        for shard, file in enumerate(parts):
            if file is not None:
                source = _file_source(file, wanted or role)
                yield dataclasses.replace(source, dataset=dataset)
            else:
                yield Source(
                    name=f"{dataset} ({shard + 1} of {len(parts)})",
                    kind="dataset",
                    path=dataset,
                    split=wanted or role,
                    dataset=dataset,
                    shard=shard,
                    num_shards=len(parts),
                )


def _splits_of(name: DatasetName, existing: list[str]) -> dict[str, Split | None]:
    """Split of the data set -> ours; None for a split that the user named: the flag decides."""
    if name.split is not None:
        if name.split not in existing:
            raise UserError(f"{name}: no such split; existing splits: {', '.join(existing)}")
        return {name.split: None}
    wanted: dict[str, Split | None] = {s: _SPLITS[s] for s in existing if s in _SPLITS}
    if "train" not in wanted.values():
        raise UserError(
            f"{name} has no split 'train'; name one of {', '.join(existing)} as {name}#SPLIT"
        )
    if others := ", ".join(split for split in existing if split not in wanted):
        warnings.warn(f"{name}: skipping the splits {others}", stacklevel=2)
    return wanted


def _is_read_by_us(builder: DatasetBuilder) -> bool:
    """Whether our own readers, which need less memory and count malformed lines, support it."""
    config = builder.config
    if getattr(config, "field", None) is not None or not config.data_files:
        return False
    # A .json file may also be one large array.
    files = [str(file) for files in config.data_files.values() for file in files]
    return all(
        kind_of_file(file) and not file.endswith(".json") and file.count("://") <= 1
        for file in files
    )


def _streams(name: DatasetName) -> dict[str, IterableDataset]:
    import datasets

    streams = datasets.load_dataset(name.path, name.config, revision=name.revision, streaming=True)
    return {str(split): stream for split, stream in streams.items()}


def _revision(files: Any) -> str | None:
    """The commit in the addresses of the files, so that every machine reads the same."""
    for file in (file for part in (files or {}).values() for file in part):
        if is_remote(str(file)) and "@" in str(file):
            return str(file).partition("@")[2].partition("/")[0]
    return None


@contextlib.contextmanager
def _dataset_errors(name: DatasetName) -> Iterator[None]:
    """Convert errors of ``datasets`` into a one-line UserError with a hint."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{name}: data sets by name need the package {error.name}; {INSTALL_DATA}"
        ) from error
    except UserError:
        raise
    except Exception as error:  # from many libraries, without a common base class
        raise UserError(f"{name}: {one_line(error).rstrip('.')}; {_hint(error)}") from error


def _hint(error: Exception) -> str:
    message = str(error)
    if "scripts are no longer supported" in message or "trust_remote_code" in message:
        return (
            "use the hub's copy NAME@refs/convert/parquet, if it exists, or download the text and "
            "pass the files"
        )
    if "is a gated dataset" in message or "must be authenticated" in message:
        return "request access on its page, then log in with 'hf auth login' or set HF_TOKEN"
    if "cannot be accessed" in message:
        return "correct the name, or log in with 'hf auth login' if it is private"
    if "Config name is missing" in message:
        return f"add :CONFIG, or :{ALL_CONFIGS} for all of them"
    if isinstance(error, ConnectionError):
        return "check the network, or download the data set and pass its folder"
    return "correct it"
