"""One JSON file per artifact: a frozen dataclass, its kind and its format version."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from megatron_chameleon.artifacts.files import write_json
from megatron_chameleon.errors import UserError

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True)
class FolderRecord:
    """An artifact that is a folder, ``root``, in which one JSON file says what the rest is."""

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


def write_record(path: Path, record: Any, *, kind: str, version: int) -> None:
    """Write the dataclass ``record`` to ``path`` with its ``kind`` and format ``version``."""
    body = dataclasses.asdict(record)
    body.pop("root", None)  # where a file lies is not part of what it says
    write_json(path, {"kind": kind, "format_version": version, **_plain(body)})


def read_record(
    path: Path, record_type: type[Record], *, kind: str, version: int, made_by: str, **known: Any
) -> Record:
    """Read ``path`` into ``record_type``; ``known`` are fields that the file does not hold.

    Raises:
        UserError: naming the file, the field and the way out (``made_by`` says what writes it).
    """
    body = _read_object(path, made_by)
    found_kind, found_version = body.pop("kind", kind), body.pop("format_version", version)
    if found_kind != kind:
        raise UserError(f"{path} is a {found_kind} file, not a {kind}; {made_by}")
    if found_version != version:
        raise UserError(
            f"{path}: format_version {found_version}, this release reads {version}; "
            f"use the release that wrote it, or make it again: {made_by}"
        )
    try:
        return TypeAdapter(record_type).validate_python({**body, **known})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(the whole file)"
        raise UserError(f"{path}: field {field}: {first['msg']}; {made_by}") from error


def _read_object(path: Path, made_by: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {made_by}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; {made_by}") from error
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); repair it; {made_by}"
        ) from error
    if not isinstance(body, dict):
        raise UserError(f"{path}: a JSON object is expected, not a {type(body).__name__}")
    return body


def _plain(value: Any) -> Any:
    """``value`` with paths as strings, so that JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
