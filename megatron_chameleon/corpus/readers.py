"""Documents out of files of JSON lines, one after another."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from megatron_chameleon.corpus.lines import read_lines
from megatron_chameleon.corpus.malformed import (
    KeyCheck,
    MalformedLineError,
    MalformedLines,
    MissingKeyError,
)
from megatron_chameleon.corpus.sources import MAX_DOMAIN_BYTES, SourceFile, find_sources
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.source import SourceOptions

_KEYS_SHOWN = 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MISSING = object()


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One text; ``domain`` is empty where none was asked for."""

    domain: str
    text: str


class DocumentReader:
    """Streams the documents of ``options.input``, in little memory.

    A line that is no document is counted in :attr:`malformed` and left out; blank lines are
    skipped. Iterate once.

    Attributes:
        sources: the files, in the order in which they are read.
        total_bytes: their size on disk.
        malformed: the lines left out so far.
        hashes: path -> SHA-256, of the files read to their end.

    Args:
        options: which text.
        domain_key: key of the domain in the lines of files that were given without one.
        on_bytes: is told how many bytes of a file were just read.

    Raises:
        UserError: if there is nothing to read; while iterating, if a file cannot be read, or none
            of its lines has the text key or the domain key.
    """

    def __init__(
        self,
        options: SourceOptions,
        domain_key: str | None = None,
        on_bytes: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        if not 0 <= options.max_malformed_share <= 1:
            raise UserError(
                f"--max-malformed-share {options.max_malformed_share}: a share of all lines, "
                "from 0 to 1, is expected"
            )
        self.sources = find_sources(options.inputs)
        self.total_bytes = sum(source.path.stat().st_size for source in self.sources)
        self.malformed = MalformedLines()
        self.hashes: dict[str, str] = {}
        self.on_bytes = on_bytes
        self._text_key = options.text_key
        self._domain_key = domain_key

    def __iter__(self) -> Iterator[Document]:
        for source in self.sources:
            yield from self._read_file(source)

    def _read_file(self, source: SourceFile) -> Iterator[Document]:
        keys = KeyCheck(source.path)
        for number, line in self._numbered_lines(source):
            self.malformed.lines += 1
            try:
                document = self._parse(line, source.domain)
            except MalformedLineError as problem:
                self.malformed.add(f"{source.path}:{number}", str(problem), source.domain)
                keys.failed(problem)
            else:
                keys.found()
                yield document
        keys.check()

    def _numbered_lines(self, source: SourceFile) -> Iterator[tuple[int, bytes]]:
        """The lines that are not blank, counted from 1; the file is hashed on the way."""
        digest = hashlib.sha256()

        def on_block(block: bytes) -> None:
            digest.update(block)
            self.on_bytes(len(block))

        for number, line in enumerate(read_lines(source.path, on_block), start=1):
            content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if content.strip():
                yield number, content
        self.hashes[str(source.path)] = digest.hexdigest()

    def _parse(self, line: bytes, domain: str | None) -> Document:
        record = _object_in(line)
        text = _string_at(record, self._text_key, "--text-key")
        if domain is not None:
            return Document(domain, text)
        if self._domain_key is None:
            return Document("", text)
        return Document(_domain_at(record, self._domain_key), text)


def _object_in(line: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise MalformedLineError(_reason(line, error)) from None
    if not isinstance(record, dict):
        raise MalformedLineError(f"is not a JSON object but {_kind(record)}")
    return record


def _reason(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as invalid:
        return f"is not valid UTF-8 at byte {invalid.start + 1}"
    return f"is not JSON ({error.msg} at column {error.colno})"


def _string_at(record: dict[str, Any], key: str, flag: str) -> str:
    value = _value_at(record, key)
    if value is _MISSING:
        raise MissingKeyError(flag, key, _keys_of(record)[:_KEYS_SHOWN])
    if not isinstance(value, str):
        raise MalformedLineError(f"has {_kind(value)} at '{key}', not a string")
    return value


def _domain_at(record: dict[str, Any], key: str) -> str:
    domain = _string_at(record, key, "--domain-key")
    if not domain or len(domain.encode()) > MAX_DOMAIN_BYTES:
        raise MalformedLineError(
            f"has {len(domain.encode())} bytes of domain name at '{key}', not 1 to "
            f"{MAX_DOMAIN_BYTES}"
        )
    return domain


def _value_at(record: dict[str, Any], key: str) -> Any:
    """The value at ``key``: a key as it stands or, if there is none, a path with dots."""
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inside = record.get(first)
    return _value_at(inside, rest) if dot and isinstance(inside, dict) else _MISSING


def _keys_of(record: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key that could be asked for, nested ones with dots."""
    keys = []
    for key, value in record.items():
        keys.append(prefix + key)
        if isinstance(value, dict):
            keys += _keys_of(value, f"{prefix}{key}.")
    return keys


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a truth value", str: "a string", list: "a list", dict: "an object"}.get(
        type(value), "a number"
    )
