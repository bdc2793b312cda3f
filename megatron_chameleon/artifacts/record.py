"""Artifact records: frozen dataclasses as JSON with a kind, a format version and a checksum."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from megatron_chameleon.artifacts.files import read_json, require_writable, write_json
from megatron_chameleon.errors import UserError

Record = TypeVar("Record")


def _inside(name: str) -> str:
    """Check that the relative path ``name`` stays in its folder."""
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
InnerPath = Annotated[str, AfterValidator(_inside)]
"""Path of a file or folder of an artifact, relative to the artifact's folder."""


@dataclasses.dataclass(frozen=True)
class FolderRecord:
    """An artifact folder, ``root``, described by one JSON file in it."""

    KIND: ClassVar[str]
    FILE_NAME: ClassVar[str]
    FORMAT_VERSION: ClassVar[int]
    MADE_BY: ClassVar[str]

    root: Path

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the JSON file of ``folder``. Raises UserError naming the file and the field."""
        return read_record(
            folder / cls.FILE_NAME,
            cls,
            kind=cls.KIND,
            version=cls.FORMAT_VERSION,
            made_by=cls.MADE_BY,
            root=folder,
        )

    @classmethod
    def exists(cls, folder: Path) -> bool:
        """Whether ``folder`` holds such an artifact."""
        return (folder / cls.FILE_NAME).is_file()

    def save(self) -> None:
        """Write the JSON file into ``root``."""
        write_record(self.root / self.FILE_NAME, self, kind=self.KIND, version=self.FORMAT_VERSION)


def write_record(
    path: Path, record: Any, *, kind: str, version: int, is_editable: bool = False
) -> None:
    """Write the dataclass ``record`` to ``path`` with its ``kind`` and format ``version``.

    A checksum of the content is added, unless users edit the file (``is_editable``).

    Raises:
        UserError: if ``path`` holds anything but a record of this kind, or cannot be written.
    """
    require_kind(path, kind)
    body = dataclasses.asdict(record)
    body.pop("root", None)  # an artifact can be moved
    body = {"kind": kind, "format_version": version, **plain(body)}
    write_json(path, body if is_editable else {**body, "checksum": _checksum(body)})


def kind_of(path: Path) -> str | None:
    """The kind of record in the file ``path``; None if it is not one."""
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


def read_record(
    path: Path, record_type: type[Record], *, kind: str, version: int, made_by: str, **known: Any
) -> Record:
    """Read ``path`` into ``record_type``; ``known`` are fields that the file does not hold.

    Raises:
        UserError: naming the file, the field and the fix, ending with ``made_by``, the tool that
            writes such files.
    """
    body = read_json(path, made_by)
    checksum = body.pop("checksum", None)  # not written by older releases
    is_unchanged = checksum in (None, _checksum(body))
    found_kind, found_version = body.pop("kind", kind), body.pop("format_version", version)
    if found_kind != kind:
        raise UserError(f"{path} is a {found_kind} file, not a {kind}; {made_by}")
    if found_version != version or isinstance(found_version, bool):
        raise UserError(
            f"{path}: format_version {found_version}, this release reads {version}; "
            f"use the release that wrote it, or create it again: {made_by}"
        )
    if not is_unchanged:
        raise UserError(f"{path} has changed since it was written; restore it; {made_by}")
    body |= dict.fromkeys(known, "")
    record = check_values(str(path), record_type, body, made_by)
    return dataclasses.replace(record, **known)  # type: ignore[type-var]


def check_values(
    where: str, value_type: type[Record], body: dict[str, Any], hint: str, field: str = ""
) -> Record:
    """Make a ``value_type`` of the JSON values ``body``, without type conversion.

    An integer is accepted for a float, since JSON writers may drop the ".0".

    Raises:
        UserError: beginning with ``where``, naming the field (inside ``field``, if ``body`` is its
            value), ending with ``hint``.
    """
    try:
        # In strict mode, pydantic makes dataclasses and tuples from JSON text only.
        hashable: Any = value_type  # mypy considers dataclass types unhashable
        value: Record = _adapter(hashable).validate_json(json.dumps(body), strict=True)
        return value
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in (field, *first["loc"]) if part != "")
        raise UserError(
            f"{where}: field {place or '(the whole file)'}: {first['msg']}; {hint}"
        ) from error


def _checksum(body: dict[str, Any]) -> str:
    """Hex SHA-256 of the fields in order; white space does not count."""
    return hashlib.sha256(json.dumps(body).encode("ascii")).hexdigest()


@functools.cache
def _adapter(value_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(value_type)


def plain(value: Any) -> Any:
    """``value`` as JSON types: paths as strings, tuples as lists."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
