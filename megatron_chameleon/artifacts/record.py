"""Artifact records: frozen dataclasses as JSON with a kind, a format version and a checksum."""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megatron_chameleon.artifacts.files import (
    read_json,
    require_writable,
    sha256_of_files,
    write_json,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.storage import Location, concurrently, file_state, reading

T = TypeVar("T")


def require_inner_path(name: str) -> str:
    """Return ``name``, a relative path that stays in its folder.

    Raises:
        ValueError: for any other path.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("is outside the artifact's folder")
    if "\0" in name or len(path.parts) > 32 or any(len(part.encode()) > 250 for part in path.parts):
        raise ValueError("not a valid file name")
    return name


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
InnerPath = Annotated[str, AfterValidator(require_inner_path)]
"""Path of a file or folder of an artifact, relative to the artifact's folder."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A dataclass that is stored as one JSON file.

    Attributes:
        KIND: name of the kind in the file and in messages.
        FORMAT_VERSION: version of the file format; files of other versions are rejected.
        MADE_BY: how to create such a file; ends error messages.
        EDITABLE: whether users edit the file; it then has no checksum.
    """

    KIND: ClassVar[str]
    FORMAT_VERSION: ClassVar[int] = 1
    MADE_BY: ClassVar[str]
    EDITABLE: ClassVar[bool] = False

    @classmethod
    def _read(cls, path: Path, **known: Any) -> Self:
        """Read ``path``; ``known`` are values of fields that are not in the file."""
        body = read_json(path, cls.MADE_BY)
        # A user who edits a file by hand deletes its checksum.
        checksum = body.pop("checksum", None)
        is_unchanged = checksum in (None, _checksum(body))
        kind = body.pop("kind", cls.KIND)
        version = body.pop("format_version", cls.FORMAT_VERSION)
        if kind != cls.KIND:
            raise UserError(f"{path} is a {kind} file, not a {cls.KIND}; {cls.MADE_BY}")
        if version != cls.FORMAT_VERSION or isinstance(version, bool):
            raise UserError(
                f"{path}: format_version {version}, this release reads {cls.FORMAT_VERSION}; "
                f"use the release that wrote it, or create it again: {cls.MADE_BY}"
            )
        if not is_unchanged:
            raise UserError(f"{path} has changed since it was written; restore it; {cls.MADE_BY}")
        record = check_values(str(path), cls, body | dict.fromkeys(known, ""), cls.MADE_BY)
        return dataclasses.replace(record, **known)

    def _write(self, path: Path) -> None:
        require_kind(path, self.KIND)
        body = {"kind": self.KIND, "format_version": self.FORMAT_VERSION, **json_values(self)}
        # The folder is not stored, since an artifact can be moved.
        body.pop("root", None)
        write_json(path, body if self.EDITABLE else {**body, "checksum": _checksum(body)})


@dataclasses.dataclass(frozen=True)
class FileRecord(Record):
    """An artifact that is one JSON file."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read ``path``. Raises UserError naming the file, the field and the fix."""
        return cls._read(path)

    def save(self, path: Path) -> None:
        """Write the file. Raises UserError if ``path`` exists and is not a record of this kind."""
        self._write(path)


@dataclasses.dataclass(frozen=True)
class FolderRecord(Record):
    """An artifact folder, ``root``, described by one JSON file in it."""

    FILE_NAME: ClassVar[str]

    root: Path

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the JSON file of ``folder``. Raises UserError naming the file and the field."""
        return cls._read(folder / cls.FILE_NAME, root=folder)

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether ``folder`` holds an artifact of this kind."""
        return (folder / cls.FILE_NAME).is_file()

    def save(self) -> None:
        """Write the JSON file into ``root``."""
        self._write(self.root / self.FILE_NAME)


@dataclasses.dataclass(frozen=True)
class HashedFiles:
    """Data files with a recorded hash.

    Attributes:
        sizes: path or URL -> bytes.
        sha256: hex SHA-256 of the concatenated files.
    """

    sizes: dict[Location, int]
    sha256: str

    @property
    def bytes(self) -> int:
        """Number of bytes that :meth:`digest` reads."""
        return sum(self.sizes.values())

    def digest(self, on_bytes: Callable[[int], object] | None = None) -> str:
        """Compute the hash; ``on_bytes`` is called with the number of bytes just read."""
        return sha256_of_files(*map(Path, self.sizes), on_bytes=on_bytes)


@dataclasses.dataclass(frozen=True)
class HashedFolderRecord(FolderRecord, abc.ABC):
    """An artifact folder whose record lists the sizes and hashes of its data files."""

    RESTORE: ClassVar[str]
    """Advice at the end of error messages: how to replace damaged files."""

    @abc.abstractmethod
    def hashed_files(self) -> list[HashedFiles]:
        """Return the data files of the record."""

    def check_sizes(self) -> None:
        """Check that every data file exists and has its recorded size.

        Raises:
            UserError: naming a file that is missing or has another size.
        """
        files = [file for files in self.hashed_files() for file in files.sizes.items()]
        concurrently(self._check_size, files)

    def _check_size(self, file: tuple[Location, int]) -> None:
        path, size = file
        with reading(path, self.RESTORE):
            found = file_state(path).bytes
        if found != size:
            raise UserError(
                f"{path} has {found} bytes, but {self.FILE_NAME} records {size}: it is truncated "
                f"or belongs to another artifact; {self.RESTORE}"
            )

    def verify(
        self, shard: int = 0, num_shards: int = 1, on_bytes: Callable[[int], object] | None = None
    ) -> None:
        """Read data files and compare their hashes.

        Args:
            shard: index of the shard of the files to read, for parallel readers.
            num_shards: number of shards of about equal size.
            on_bytes: called with the number of bytes just read.

        Raises:
            UserError: naming the first file that differs from the record.
        """
        for files in self._largest_first()[shard::num_shards]:
            try:
                found = files.digest(on_bytes)
            except OSError as error:
                # Name all files if the error has no file name, as for a failed read().
                name = error.filename or " or ".join(map(str, files.sizes))
                raise UserError(
                    f"cannot read {name}: {error.strerror or error}; {self.RESTORE}"
                ) from error
            if found != files.sha256:
                raise UserError(
                    f"{' or '.join(map(str, files.sizes))} has changed since it was written; "
                    f"{self.RESTORE}"
                )

    def bytes_to_verify(self, shard: int, num_shards: int) -> int:
        """Number of bytes that :meth:`verify` reads for these arguments."""
        return sum(files.bytes for files in self._largest_first()[shard::num_shards])

    def _largest_first(self) -> list[HashedFiles]:
        return sorted(self.hashed_files(), key=lambda files: (-files.bytes, *map(str, files.sizes)))


def kind_of(path: Path) -> str | None:
    """The kind of record in the file ``path``; None if the file is not a record."""
    try:
        kind = read_json(path, "").get("kind")
    except UserError:
        return None
    return None if kind is None else str(kind)


def require_kind(path: Path, kind: str) -> None:
    """Check that ``path`` does not exist or holds a record of ``kind``, which may be replaced.

    Raises:
        UserError: naming the kind of the existing file.
    """
    if os.path.lexists(path) and (found := kind_of(path)) != kind:
        raise UserError(
            f"{path} exists and is {f'of kind {found!r}' if found else 'not an artifact'}; only a "
            f"file of kind {kind!r} is replaced; choose another name, or move it away"
        )


def check_output(output: Path, kind: str) -> None:
    """Check that a record of ``kind`` can be written to the file ``--output``. Nothing is written.

    Raises:
        UserError: if something else exists there, or the folder is not writable.
    """
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; pass a file name")
    require_kind(output, kind)
    require_writable(output.parent, f"--output {output}")


def check_values(
    where: str, value_type: type[T], body: dict[str, Any], hint: str, field: str = ""
) -> T:
    """Convert the JSON object ``body`` to ``value_type``; the types of its values must match.

    An integer is accepted for a float, since JSON writers may drop the ".0".

    Args:
        where: start of error messages.
        value_type: a dataclass.
        body: field -> value.
        hint: end of error messages.
        field: name of the field whose value ``body`` is, for messages.

    Raises:
        UserError: naming the first invalid field.
    """
    try:
        # The body is converted to text, since in strict mode pydantic makes dataclasses and tuples
        # from JSON text only. The type is annotated as Any, since mypy considers dataclass types
        # unhashable.
        hashable: Any = value_type
        value: T = _adapter(hashable).validate_json(json.dumps(body), strict=True)
        return value
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in (field, *first["loc"]) if part != "")
        raise UserError(
            f"{where}: field {place or '(the whole file)'}: {first['msg']}; {hint}"
        ) from error


def differences(one: Any, other: Any) -> dict[str, tuple[Any, Any]]:
    """Return field -> (value of ``one``, value of ``other``), for fields with different values.

    Both arguments are dataclasses of the same type.
    """
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@functools.cache
def _adapter(value_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(value_type)


def json_values(value: Any) -> dict[str, Any]:
    """The dataclass ``value`` as a dictionary of JSON types: paths as strings, tuples as lists."""
    text = json.dumps(dataclasses.asdict(value), default=os.fspath)
    body: dict[str, Any] = json.loads(text)
    return body


def _checksum(body: dict[str, Any]) -> str:
    """Hex SHA-256 of the fields in order; white space does not count."""
    return hashlib.sha256(json.dumps(body).encode("ascii")).hexdigest()
