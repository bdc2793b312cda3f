"""Values of one record, by keys with dots, and why there is none."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import orjson

from megatron_chameleon.corpus.reading.lines import Line, LineTooLong
from megatron_chameleon.corpus.reading.malformed import MalformedLineError, MissingKeyError
from megatron_chameleon.errors import UserError

_KEYS_SHOWN = 20
_MISSING = object()


def object_in(line: Line) -> dict[str, Any]:
    """The JSON object that ``line`` holds.

    Raises:
        MalformedLineError: saying what it holds instead.
        UserError: if there is not enough memory to tell.
    """
    if isinstance(line, LineTooLong):
        raise MalformedLineError(f"has {len(line):,} bytes, more than --max-document-bytes")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if "Not enough memory" in error.msg:  # whether it is malformed must not depend on that
            raise UserError(
                f"there is not enough memory to read a line of {len(line):,} bytes; take a "
                "smaller --max-document-bytes"
            ) from error
        raise MalformedLineError(_reason(line, error)) from None
    if not isinstance(record, dict):
        raise MalformedLineError(f"is not a JSON object but {_kind(record)}")
    return record


def text_at(record: dict[str, Any], key: str, flag: str) -> str:
    """The text at ``key``, a path with dots; null is an empty text.

    Raises:
        MissingKeyError: if there is no such key; ``flag`` is where it was asked for.
        MalformedLineError: if the value is of another type.
    """
    value = _value_at(record, key)
    if value is _MISSING:
        raise MissingKeyError(flag, key, _keys_of(record)[:_KEYS_SHOWN])
    if value is None:
        return ""
    if isinstance(value, bytes):  # a column of a table without the mark that says it is text
        return _decoded(value)
    if not isinstance(value, str):
        raise MalformedLineError(f"has {_kind(value)} at '{key}', not a string")
    return value


def value_getter(key: str) -> Callable[[Any], Any]:
    """What takes the value at ``key`` out of a plain record, fast.

    It raises KeyError, TypeError or AttributeError, or gives no string, where :func:`text_at`
    would have more to say.
    """
    if "." not in key:
        return operator.itemgetter(key)
    return lambda record: _value_at(record, key)


def _decoded(value: bytes | bytearray) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as invalid:
        raise MalformedLineError(f"is not valid UTF-8 at byte {invalid.start + 1}") from None


def _reason(line: bytes | bytearray, error: orjson.JSONDecodeError) -> str:
    try:
        _decoded(line)
    except MalformedLineError as invalid:
        return str(invalid)
    return f"is not JSON ({error.msg} at column {error.colno})"


def _value_at(record: dict[str, Any], key: str) -> Any:
    """The value at ``key``: a key as it stands or, if there is none, a path with dots."""
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inside = _opened(record.get(first)) if dot else None
    return _value_at(inside, rest) if isinstance(inside, dict) else _MISSING


def _opened(value: Any) -> Any:
    """An object that is written as a JSON string, as an object; anything else as it is."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def _keys_of(record: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key that could be asked for, nested ones with dots."""
    keys = []
    for key, value in record.items():
        keys.append(prefix + key)
        inside = _opened(value)
        if isinstance(inside, dict):
            keys += _keys_of(inside, f"{prefix}{key}.")
    return keys


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a truth value", str: "a string", list: "a list", dict: "an object"}.get(
        type(value), "a number"
    )
