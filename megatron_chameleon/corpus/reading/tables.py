"""Columns of Arrow tables, found by keys with dots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_chameleon.corpus.reading.malformed import MalformedLineError
from megatron_chameleon.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS_SHOWN = 20


def columns_for(schema: pa.Schema, keys: Mapping[str, str], name: str) -> list[str]:
    """The columns, or leaves of columns, that hold the values of ``keys``.

    Args:
        schema: of the table.
        keys: flag -> key, a column or a path with dots into one.
        name: what messages call the table.

    Raises:
        UserError: naming the columns there are, if a key leads to none or to several.
    """
    found = []
    for flag, key in keys.items():
        top = key if key in schema.names else key.split(".")[0]
        if schema.names.count(top) > 1:
            raise UserError(
                f"{name}: there are {schema.names.count(top)} columns '{top}'; rename all but the "
                f"one that {flag} means"
            )
        column = _column_of(schema, key)
        if column is None:
            there = ", ".join(list(_paths(schema))[:_COLUMNS_SHOWN]) or "(none)"
            raise UserError(
                f"{name}: there is no column '{key}'; the columns there are {there}: correct {flag}"
            )
        found.append(column)
    return found


def top_columns_for(schema: pa.Schema, keys: Mapping[str, str], name: str) -> list[str]:
    """Like :func:`columns_for`, but whole columns."""
    columns = columns_for(schema, keys, name)
    tops = [column if column in schema.names else column.split(".")[0] for column in columns]
    return list(dict.fromkeys(tops))


def strings_at(batch: pa.RecordBatch, key: str) -> list[str] | None:
    """The strings at ``key``, null as ''; None unless it is a column of strings.

    Raises:
        UnicodeDecodeError: if one is no UTF-8.
    """
    import pyarrow.compute as pc

    names = [key] if key in batch.schema.names else key.split(".")
    column = batch.column(names[0])
    for name in names[1:]:
        if not _has_field(column.type, name):
            return None
        column = pc.struct_field(column, [name])
    if not _is_string(column.type):
        return None
    strings: list[str | None] = column.to_pylist()
    return ["" if string is None else string for string in strings]


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | MalformedLineError]:
    """The rows one by one, slowly; what is no UTF-8 is given as the error it is."""
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield MalformedLineError(f"is not valid UTF-8 at byte {error.start + 1}")


def _column_of(schema: pa.Schema, key: str) -> str | None:
    """The column that ``key`` is or leads into; within structs the leaf itself."""
    if key in schema.names:
        return key
    first, *rest = key.split(".")
    if first not in schema.names:
        return None
    path, kind = first, schema.field(first).type
    for name in rest:
        if _is_string(kind):
            return path  # of objects written as strings; what is in them is seen when read
        if not _has_field(kind, name):
            return None
        path, kind = f"{path}.{name}", kind.field(name).type
    return path


def _paths(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[str]:
    for field in fields:
        yield prefix + field.name
        if _is_struct(field.type):
            yield from _paths(field.type, f"{prefix}{field.name}.")


def _has_field(kind: pa.DataType, name: str) -> bool:
    return _is_struct(kind) and kind.get_field_index(name) >= 0


def _is_struct(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_struct(kind))


def _is_string(kind: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _is_string(kind.value_type)
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )
