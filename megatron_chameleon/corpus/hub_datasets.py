"""Hugging Face data sets, by name or in a folder: their files or shards, and their rows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_chameleon.artifacts import Split
from megatron_chameleon.corpus.input_files import (
    INSTALL_DATA,
    is_remote,
    kind_of_file,
    one_line,
)
from megatron_chameleon.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import DatasetBuilder, IterableDataset

PREFIX = "hf:"
ALL_CONFIGS = "*"
# Names of splits in data sets -> our splits.
_SPLITS: dict[str, Split] = {
    "train": "train",
    "validation": "valid",
    "valid": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}
_BATCH_ROWS = 256


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """The parts of ``hf:OWNER/NAME[@REVISION][:CONFIG][#SPLIT]``; a folder has no revision."""

    path: str
    revision: str | None = None
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, given: str) -> DatasetName:
        """Parse ``given``.

        Raises:
            UserError: if it has no name.
        """
        rest, _, split = given.removeprefix(PREFIX).partition("#")
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
            raise UserError(f"{given}: must be {PREFIX}OWNER/NAME[:CONFIG]")
        return cls(head, revision or None, config or None, split or None)

    def __str__(self) -> str:
        parts = (("@", self.revision), (":", self.config), ("#", self.split))
        return f"{PREFIX}{self.path}" + "".join(sign + part for sign, part in parts if part)


@dataclasses.dataclass(frozen=True)
class DatasetPart:
    """A file of a data set, or one shard of a data set whose format our readers do not support.

    Attributes:
        dataset: the data set with its revision, config and split.
        split: of ours, None if the user named the split, whose role the flag decides.
        file: path or address of the file, None if ``datasets`` reads it.
        shard: number of the shard among ``num_shards``.
    """

    dataset: DatasetName
    split: Split | None
    file: str | None
    shard: int = 0
    num_shards: int = 1


def is_dataset(given: str) -> bool:
    """Whether an input names a data set."""
    return given.startswith(PREFIX)


def find_parts(given: str) -> list[DatasetPart]:
    """The parts of a data set, in the order of configs, splits and files.

    Raises:
        UserError: if the data set, config or split does not exist, or cannot be reached.
    """
    name = DatasetName.parse(given)
    configs = _all_configs(name) if name.config == ALL_CONFIGS else [name.config]
    found: list[DatasetPart] = []
    for config in configs:
        found += _parts_of_config(dataclasses.replace(name, config=config))
    return found


def read_shard(dataset: str, shard: int, num_shards: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Stream the rows of one shard with ``datasets``; row numbers count from 1.

    Raises:
        UserError: if they cannot be read.
    """
    name = DatasetName.parse(dataset)
    with _one_line_errors(name):
        stream = _streamed(name)[name.split or ""]
        if num_shards > 1:
            stream = stream.shard(num_shards=num_shards, index=shard, contiguous=True)
        row = 1
        for table in stream.with_format("arrow").iter(_BATCH_ROWS):
            for batch in table.combine_chunks().to_batches():
                yield row, batch
                row += batch.num_rows


def _parts_of_config(name: DatasetName) -> list[DatasetPart]:
    with _one_line_errors(name):
        import datasets

        builder = datasets.load_dataset_builder(name.path, name.config, revision=name.revision)
        files = builder.config.data_files
        name = dataclasses.replace(
            name, config=builder.config.name, revision=_revision(files) or name.revision
        )
        if _is_read_by_us(builder):
            by_split: dict[str, Sequence[Any]] = {str(k): list(v) for k, v in files.items()}
        else:
            streams = _streamed(name)
            by_split = {split: [None] * streams[split].num_shards for split in streams}
    found = []
    for split, role in _wanted_splits(name, list(by_split)).items():
        dataset = dataclasses.replace(name, split=split)
        parts = by_split[split]
        found += [DatasetPart(dataset, role, part, i, len(parts)) for i, part in enumerate(parts)]
    return found


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


def _wanted_splits(name: DatasetName, there: list[str]) -> dict[str, Split | None]:
    if name.split is not None:
        if name.split not in there:
            raise UserError(f"{name}: no such split; existing splits: {', '.join(there)}")
        return {name.split: None}
    wanted = {split: _SPLITS[split] for split in there if split in _SPLITS}
    others = ", ".join(split for split in there if split not in wanted)
    if "train" not in wanted.values():
        raise UserError(
            f"{name} has no split 'train'; name one of {', '.join(there)} as {name}#SPLIT"
        )
    if others:
        warnings.warn(f"{name}: skipping the splits {others}", stacklevel=2)
    return dict(wanted)


def _all_configs(name: DatasetName) -> list[str | None]:
    with _one_line_errors(name):
        import datasets

        return list(datasets.get_dataset_config_names(name.path, revision=name.revision))


def _streamed(name: DatasetName) -> dict[str, IterableDataset]:
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
def _one_line_errors(name: DatasetName) -> Iterator[None]:
    """Turn the errors of ``datasets`` into a UserError of one line with a hint."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{name}: data sets by name need the package {error.name}; {INSTALL_DATA}"
        ) from error
    except UserError:
        raise
    except Exception as error:  # of many libraries, which share no class
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
