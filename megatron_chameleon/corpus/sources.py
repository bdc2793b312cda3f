"""Resolve ``--input`` into sources: files, folders, globs, URLs and Hugging Face data sets.

A source has a domain and a split; each is None if the source's documents determine it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from megatron_chameleon.artifacts import Split
from megatron_chameleon.artifacts.files import read_foreign_json
from megatron_chameleon.artifacts.provenance import without_credentials
from megatron_chameleon.corpus.options import (
    MAX_DOMAIN_BYTES,
    DomainOptions,
    SourceOptions,
    flat,
    is_domain_name,
)
from megatron_chameleon.errors import UserError, one_line
from megatron_chameleon.storage import FileState, file_state, find_remote, is_remote, reading

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import DatasetBuilder, IterableDataset

SourceSplit = Split | Literal["held_out"]
FileKind = Literal["lines", "parquet", "text"]
SourceKind = Literal["lines", "parquet", "text", "dataset"]

INSTALL_DATA = "pip install 'megatron-chameleon[data]'"
COMPRESSED_SUFFIXES = (".gz", ".zst")
# Suffixes of the files of records read in a folder; .json is often a description of the data, so it
# is read if passed by name.
FOLDER_SUFFIXES: dict[str, FileKind] = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".parquet": "parquet",
}
RECORD_SUFFIXES: dict[str, FileKind] = {**FOLDER_SUFFIXES, ".json": "lines"}
# Files of data: text beside them, such as a README, describes them.
_DATA = re.compile(r"\.(json|csv|tsv|arrow|npy|bin|idx)(\.\w+)?$|\.(xz|bz2|zip|tar|tgz|7z)$", re.I)
# Files that are one document each: prose and source code.
_TEXT = (
    "txt md rst tex org adoc py pyi c h cc cpp cxx hpp cu cuh rs go java kt scala cs swift js jsx "
    "ts tsx rb pl pm php lua r jl hs ml lisp clj ex erl f90 sh bash sql asm s v sv vhd proto cmake"
)
TEXT_SUFFIXES: dict[str, FileKind] = {f".{suffix}": "text" for suffix in _TEXT.split()}
FILE_SUFFIXES: dict[str, FileKind] = {**RECORD_SUFFIXES, **TEXT_SUFFIXES}
_FORMATS = (
    "use JSON lines as .jsonl, .jsonl.gz or .jsonl.zst, .parquet, or text such as .txt, .md and .py"
)

DATASET_PREFIX = "hf:"
ALL_CONFIGS = "*"
# Split name of a data set -> split of a corpus.
_SPLIT_ALIASES: dict[str, Split] = {
    "train": "train",
    "validation": "valid",
    "valid": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_HELD_OUT_WORDS = {"validation", "valid", "val", "test"}
_BATCH_ROWS = 256
_HUB_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class Source:
    """A file, or a shard of a data set, from which documents are read.

    Attributes:
        name: name in messages, unique in a list of sources; without the credentials of a URL.
        kind: format of the source: "lines" (JSON lines), "parquet", "text" (one document), or
            "dataset" for formats that are read through ``datasets``.
        path: path on this machine, URL, or name of the data set.
        domain: domain of all documents; None if each document names its own, or domains are not
            requested.
        split: split of all documents; None if the hash of each text decides, "held_out" if it
            decides between valid and test.
        bytes: size on disk; 0 if unknown.
        modified_ns: modification time, in nanoseconds since 1970; 0 if unknown.
        etag: hash or version of a remote file's content; '' if unknown.
        cuttable: whether a range of the source can be read (bytes of plain lines, row groups of
            parquet).
        dataset: data set with revision, config and split that the source belongs to, if any.
        shard: for a "dataset", index of the shard among ``num_shards``.
        num_shards: for a "dataset", number of its shards.
    """

    name: str
    kind: SourceKind
    path: str
    domain: str | None = None
    split: SourceSplit | None = None
    bytes: int = 0
    modified_ns: int = 0
    etag: str = ""
    cuttable: bool = False
    dataset: str | None = None
    shard: int = 0
    num_shards: int = 1

    @property
    def state(self) -> FileState:
        """State of the file when the source was found."""
        return FileState(self.bytes, self.modified_ns, self.etag)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A range of a source, or the whole source.

    Attributes:
        source: position in the list of sources.
        start: first byte of plain JSON lines, or first row group of parquet; otherwise 0.
        stop: start of the next chunk, None for the end of the source. A line belongs to the chunk
            in which it begins.
        bytes: size on disk; 0 if unknown.
    """

    source: int
    start: int = 0
    stop: int | None = None
    bytes: int = 0


def find_sources(options: SourceOptions, domains: DomainOptions | None = None) -> list[Source]:
    """List the sources of ``options.input`` and, with ``domains``, of the other inputs.

    A source that is named twice for the same domain is listed once.

    Args:
        options: inputs to read.
        domains: how domains and splits are assigned; None if domains and splits are not requested;
            then only the training split of a named data set is listed.

    Raises:
        UserError: for an input without readable files, a source without a domain, and an option
            without effect.
    """
    inputs = flat(options.input)
    if not inputs:
        raise UserError("--input is empty; pass files, folders or globs")
    if domains is None:
        found = _named_sources("--input", inputs, None)
        return _with_unique_names(source for source in found if source.split in (None, "train"))
    all_inputs: list[tuple[str, list[str], Split | None]] = [
        ("--input", inputs, None),
        ("--valid-input", flat(domains.valid_input), "valid"),
        ("--test-input", flat(domains.test_input), "test"),
    ]
    named = [
        (flag, source)
        for flag, values, split in all_inputs
        for source in _named_sources(flag, values, split)
    ]
    sources: list[Source] = []
    counts: Counter[str] = Counter()  # number of sources by domain before renaming
    for flag, source in named:
        name = _domain_of(source, domains, flag) if source.domain is None else None
        if name is None:
            sources.append(source)
            continue
        counts[name] += 1
        domain = domains.renamed(name)
        if domain is not None:
            sources.append(dataclasses.replace(source, domain=domain))
    if domains.domain_flags and all(source.domain is not None for _, source in named):
        raise UserError(
            f"{domains.domain_flags[0]} has no effect because every --input names its domain; "
            "leave out this flag, or the names in --input"
        )
    # With a domain key, the names are reported later, since they are known only after all lines are
    # read.
    if domains.domain_key is None:
        domains.report_renames(counts, "files")
    if not sources:
        raise UserError("--rename-domain leaves out all of --input; correct it")
    held_out = list(_named_sources("--held-out", flat(domains.held_out), None))
    trained = {source.domain for source in sources}
    for source in held_out:
        if source.domain is None:
            raise UserError(f"--held-out {source.path}: pass NAME={source.path}, with a name")
        if source.domain in trained:
            raise UserError(
                f"--held-out {source.domain}=...: '{source.domain}' is a domain of --input too; "
                "choose another name"
            )
    sources += (dataclasses.replace(source, split="held_out") for source in held_out)
    # A domain with both valid and test sources uses all of its --input for training. With a domain
    # key, this applies to all domains together.
    splits = {(source.domain, source.split) for source in sources}
    for number, source in enumerate(sources):
        if source.split in (None, "train"):
            has_both = {(source.domain, "valid"), (source.domain, "test")} <= splits
            sources[number] = dataclasses.replace(source, split="train" if has_both else None)
    return _with_unique_names(sources)


def _named_sources(flag: str, inputs: Iterable[str], split: Split | None) -> Iterator[Source]:
    """Yield the sources of ``inputs`` with the domain of NAME=PATH, and ``split`` if not None."""
    for value in inputs:
        # An '=' after the first '/' is part of the path.
        name, equals, pattern = value.partition("=")
        is_named = equals and "/" not in name and not name.startswith(DATASET_PREFIX)
        if is_named and not (is_domain_name(name) and pattern):
            raise UserError(
                f"{flag} {value}: must be NAME=PATH with NAME of at most {MAX_DOMAIN_BYTES} bytes"
            )
        path = pattern if is_named else value
        if path.startswith(DATASET_PREFIX) and not is_remote(path):
            sources = _dataset_sources(path, flag, split)
        else:
            sources = [_file_source(file, split) for file in find_files(path, flag)]
        for source in sources:
            yield dataclasses.replace(source, domain=name if is_named else None)


def _file_source(path: str, split: Split | None) -> Source:
    kind = kind_of_file(path)
    assert kind is not None, f"{path} has an unsupported format; it should not have been found"
    with reading(path):
        state = file_state(path)
    cuttable = kind == "parquet" or (kind == "lines" and not is_compressed(path))
    known = state.bytes, state.modified_ns, state.etag
    return Source(without_credentials(path), kind, path, None, split, *known, cuttable)


def _domain_of(source: Source, domains: DomainOptions, flag: str) -> str | None:
    """Find the domain in a source's path or config; None if its records name their domains."""
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


def _with_unique_names(sources: Iterable[Source]) -> list[Source]:
    """Drop repeated sources and make the names unique.

    Raises:
        UserError: if a source is passed for two splits.
    """
    found: dict[tuple[str, int, str | None], Source] = {}
    for source in sources:
        first = found.setdefault((source.path, source.shard, source.domain), source)
        if first.split != source.split:
            raise UserError(
                f"{source.path} is passed for {first.split or 'all splits'} and for "
                f"{source.split or 'all splits'}; leave one of them out"
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
    name = PurePosixPath(path.lower())
    if name.suffix not in COMPRESSED_SUFFIXES:
        return suffixes.get(name.suffix)
    inner = suffixes.get(PurePosixPath(name.stem).suffix)
    return None if inner == "parquet" else inner


def is_compressed(path: str) -> bool:
    """Whether ``path`` is compressed, and so can only be read as a whole."""
    return PurePosixPath(path.lower()).suffix in COMPRESSED_SUFFIXES


def find_files(pattern: str, flag: str) -> list[str]:
    """List the files at ``pattern``: a file, a folder that is searched at any depth, or a glob.

    ``pattern`` is a path or a URL. Hidden files are skipped, and links to folders are followed
    once. In folders, files of records are read, or if they hold no data, files of text; a warning
    counts the others.

    Raises:
        UserError: naming ``flag``, if there is no file, or a file passed by name has an unsupported
            format.
    """
    with reading(pattern, f"correct {flag}"):
        matches = find_remote(pattern) if is_remote(pattern) else _find_local(pattern)
    if not matches:
        raise UserError(f"{flag} {pattern}: no such file or folder, and no match; check the path")
    files: list[str] = []
    suffixes = _folder_suffixes([file for _, inside in matches for file in inside or ()])
    for match, contained in matches:
        if contained is not None:
            inside = [file for file in contained if kind_of_file(file, suffixes)]
            files += inside
            _warn_skipped(match, contained, inside, flag)
            if suffixes is TEXT_SUFFIXES:
                continue  # train.py and test.py are no splits
            below = " ".join(file.removeprefix(match) for file in inside)
            words = set(re.findall("[a-z]+", below.lower()))
            if "train" in words and words & _HELD_OUT_WORDS:
                others = ", ".join(sorted(words & _HELD_OUT_WORDS))
                or_by_name = (
                    "" if is_remote(match) else f", or the folder as {DATASET_PREFIX}{match}"
                )
                warnings.warn(
                    f"{flag} {match}: files are named after the splits train and {others}, but all "
                    f"are treated alike; pass held-out files by --valid-input and --test-input"
                    f"{or_by_name}",
                    stacklevel=4,
                )
        elif kind_of_file(match) is None:
            raise UserError(f"{flag} {match}: unsupported format; {_FORMATS}")
        else:
            files.append(match)
    if not files:
        in_folders = [file for _, inside in matches for file in inside or ()]
        problem = f"no file of a supported format; {_FORMATS}"
        if any(kind_of_file(file, TEXT_SUFFIXES) for file in in_folders):
            problem += "; to read text beside data, pass a pattern such as 'FOLDER/**/*.py'"
        if any(file.endswith(".arrow") for file in in_folders):
            problem += f"; to read Arrow files, pass the folder as {DATASET_PREFIX}FOLDER"
        raise UserError(f"{flag} {pattern}: {problem}")
    for file in files:
        if any("\ud800" <= character <= "\udfff" for character in file):
            raise UserError(f"{flag} {file!a}: file name is not UTF-8; rename it")
    return files


def _folder_suffixes(contained: Sequence[str]) -> dict[str, FileKind]:
    """Suffixes of the files to read in folders: records, or text if there are no data at all."""
    has_data = any(kind_of_file(file, FOLDER_SUFFIXES) or _DATA.search(file) for file in contained)
    return FOLDER_SUFFIXES if has_data else TEXT_SUFFIXES


def _warn_skipped(folder: str, contained: Sequence[str], inside: Sequence[str], flag: str) -> None:
    """Warn about files of a folder that are not read, if there are any."""
    read = set(inside)
    skipped = [file for file in contained if file not in read]
    if not skipped:
        return
    found = ["".join(PurePosixPath(file.lower()).suffixes[-2:]) for file in skipped]
    counts = Counter(sorted(found))  # sorted, so that ties have an order
    kinds = ", ".join(f"{n:,} {kind or 'without a suffix'}" for kind, n in counts.most_common(5))
    by_name = "; name those that are text to read them" if any(map(kind_of_file, skipped)) else ""
    warnings.warn(
        f"{flag} {folder}: {len(skipped):,} of {len(contained):,} files are not read "
        f"({kinds}){by_name}",
        stacklevel=5,
    )


def _find_local(pattern: str) -> list[tuple[str, list[str] | None]]:
    """List matches as :func:`find_remote` does, for a path of this machine."""
    path = str(Path(pattern).expanduser())
    # An existing path is not a pattern, even if it contains brackets.
    matches = [path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True))
    return [
        (match, sorted(_walk(match), key=PurePath) if os.path.isdir(match) else None)
        for match in matches
    ]


def _walk(folder: str) -> Iterator[str]:
    # Without this function, os.walk would silently skip unreadable folders and lose their text.
    def fail(error: OSError) -> None:
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
        # Path removes a leading "./", so that a file has the same name for every spelling of its
        # folder.
        yield from (str(Path(root, name)) for name in files if not name.startswith("."))


# Hugging Face data sets


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """The parts of ``hf:OWNER/NAME[@REVISION][:CONFIG][#SPLIT]``; local folders lack a revision."""

    path: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> DatasetName:
        """Parse ``text``.

        Raises:
            UserError: if ``text`` has no name.
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
        UserError: if the rows cannot be read.
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


def _dataset_sources(text: str, flag: str, wanted: Split | None) -> list[Source]:
    """List the sources of a data set by config, split and file.

    If ``wanted`` is set, only sources that may go to this split are listed.

    Raises:
        UserError: if the data set, config or split does not exist, or cannot be reached.
    """
    name = DatasetName.parse(text)
    found: list[Source] = []
    with _dataset_errors(name):
        import datasets

        is_folder = name.path.startswith(("/", ".")) or os.path.isdir(name.path)
        if not is_folder and not datasets.config.HF_HUB_OFFLINE:
            _require_hub(name)
        configs = [name.config]
        if name.config == ALL_CONFIGS and not _saved_splits(name.path):
            configs = datasets.get_dataset_config_names(name.path, revision=name.revision)
        for config in configs:
            builder = datasets.load_dataset_builder(**_load_arguments(name, config))
            files = builder.config.data_files or {}
            # Use the commit in the addresses of the files, so that every machine reads the same.
            addresses = (str(file) for part in files.values() for file in part)
            at = next((file for file in addresses if is_remote(file) and "@" in file), None)
            revision = at.partition("@")[2].partition("/")[0] if at else name.revision
            exact = dataclasses.replace(name, config=builder.config.name, revision=revision)
            if _is_supported_directly(builder):
                by_split: dict[str, Sequence[Any]] = {str(k): list(v) for k, v in files.items()}
            else:
                streams = _streams(exact)
                by_split = {split: [None] * streams[split].num_shards for split in streams}
            for split, target in _target_splits(exact, list(by_split)).items():
                if wanted is None or target in (None, wanted):
                    dataset = str(dataclasses.replace(exact, split=split))
                    found += _sources_of_split(dataset, by_split[split], wanted or target)
    if not found:
        raise UserError(
            f"{flag} {text} has no split '{wanted or 'train'}'; name one as {text}#SPLIT"
        )
    return found


def _sources_of_split(
    dataset: str, files: Sequence[str | None], split: Split | None
) -> Iterator[Source]:
    for shard, file in enumerate(files):
        if file is not None:
            yield dataclasses.replace(_file_source(file, split), dataset=dataset)
            continue
        name = f"{dataset} ({shard + 1} of {len(files)})"
        source = Source(name, "dataset", dataset, split=split, dataset=dataset)
        yield dataclasses.replace(source, shard=shard, num_shards=len(files))


def _require_hub(name: DatasetName) -> None:
    """Send one request first, since ``datasets`` retries for half a minute without a network."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception as error:
        # The exception is one of httpx or of requests, depending on the release.
        raise UserError(
            f"{name}: cannot reach {constants.ENDPOINT} ({one_line(error)}); check the network, "
            "download the data set and pass its folder, or use a cached copy: HF_HUB_OFFLINE=1"
        ) from error


def _target_splits(name: DatasetName, existing: list[str]) -> dict[str, Split | None]:
    """Map splits of the data set to those of the corpus.

    A split named by the user maps to None, since the flag that names it decides the corpus split.
    """
    if name.split is not None:
        if name.split not in existing:
            raise UserError(f"{name}: no such split; existing splits: {', '.join(existing)}")
        return {name.split: None}
    targets: dict[str, Split | None] = {
        split: _SPLIT_ALIASES[split] for split in existing if split in _SPLIT_ALIASES
    }
    if "train" not in targets.values():
        raise UserError(
            f"{name} has no split 'train'; name one of {', '.join(existing)} as {name}#SPLIT"
        )
    if others := ", ".join(split for split in existing if split not in targets):
        warnings.warn(f"{name}: skipping the splits {others}", stacklevel=2)
    return targets


def _is_supported_directly(builder: DatasetBuilder) -> bool:
    """Whether readers.py can read the files; it uses less memory and counts malformed lines."""
    config = builder.config
    if getattr(config, "field", None) is not None or not config.data_files:
        return False
    # A .json file may be one large array instead of JSON lines, so it is excluded.
    files = [str(file) for files in config.data_files.values() for file in files]
    return all(
        kind_of_file(file, RECORD_SUFFIXES)
        and not file.lower().endswith(".json")
        and file.count("://") <= 1
        for file in files
    )


def _load_arguments(name: DatasetName, config: str | None) -> dict[str, Any]:
    """Arguments with which ``datasets`` loads the data set."""
    if splits := _saved_splits(name.path):
        return {"path": "arrow", "data_files": splits}
    return {"path": name.path, "name": config, "revision": name.revision}


def _saved_splits(folder: str) -> dict[str, list[str]]:
    """Split -> Arrow files of a folder that ``save_to_disk`` wrote; empty for other data sets."""
    root = Path(folder).expanduser()
    if (root / "state.json").is_file():
        parts = {"train": root}
    elif (root / "dataset_dict.json").is_file():
        splits = read_foreign_json(root / "dataset_dict.json", "save the data set again")
        parts = {str(split): root / str(split) for split in splits.get("splits") or ()}
    else:
        return {}
    found = {}
    for split, part in parts.items():
        # The state lists the files in order; the folder may hold files of earlier states.
        state = read_foreign_json(part / "state.json", "save the data set again")
        names = [str(file["filename"]) for file in state.get("_data_files") or ()]
        found[split] = [str(part / Path(name).name) for name in names]
    return found


def _streams(name: DatasetName) -> dict[str, IterableDataset]:
    import datasets

    streams = datasets.load_dataset(**_load_arguments(name, name.config), streaming=True)
    return {str(split): stream for split, stream in streams.items()}


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
    except Exception as error:
        # The error may come from many libraries, whose exceptions have no common base class.
        raise UserError(
            f"{name}: {one_line(error).rstrip('.')}; correct the name, add :CONFIG (or "
            f":{ALL_CONFIGS} for all of them), log in with 'hf auth login' if it is gated or "
            "private, or use the hub's copy NAME@refs/convert/parquet if it has a loading script"
        ) from error


def source_identity(source: Source) -> list[Any]:
    """Return values of which at least one changes when the text of ``source`` changes."""
    if source.kind == "dataset":
        folder = Path(DatasetName.parse(source.path).path).expanduser()
        # A data set on the hub has its revision in its name.
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return [source.name, *stats]
    # The address of a file without a known time may hold the revision.
    name = Path(without_credentials(source.path)).name if source.modified_ns else source.name
    return [name, source.bytes, source.modified_ns, source.etag]
