"""Parquet files, row group by row group, in little memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from megatron_chameleon.corpus.reading.opening import (
    INSTALL_DATA,
    is_remote,
    one_line,
    open_source,
    reading,
    size_and_time,
)
from megatron_chameleon.corpus.reading.tables import columns_for
from megatron_chameleon.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# Rows are taken out in batches of about this many bytes.
_BATCH_BYTES = 1 << 20
_MAX_BATCH_ROWS = 4096
# Columns are read in parts of this size, rather than a row group's all at once: reading ahead
# would hold the group in memory. A request to the hub costs more than one to a disk.
_PART_BYTES = {False: 1 << 20, True: 1 << 23}


def row_group_bytes(path: str) -> list[int]:
    """About how many bytes on disk each row group has; the file can be cut there.

    Raises:
        UserError: if the file cannot be read or is no parquet.
    """
    with _opened(path) as file:
        return _shares(path, file.metadata)


def read_row_groups(
    path: str, keys: Mapping[str, str], start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, pa.RecordBatch, int]]:
    """Rows of the row groups [start, stop), with only the columns that ``keys`` ask for.

    Args:
        path: a file, perhaps on the hub.
        keys: flag -> key, a column or a path with dots into one.
        start: the first row group.
        stop: the first that is not read; None reads to the end.

    Yields:
        The number in the file of the batch's first row, from 1; the batch; and about how many
        bytes on disk the row group has that ends with it, 0 if none does.

    Raises:
        UserError: if the file cannot be read, is no parquet, is damaged, or lacks a column.
    """
    with _opened(path) as file:
        metadata, shares = file.metadata, _shares(path, file.metadata)
        columns = columns_for(file.schema_arrow, keys, path)
        row = 1 + sum(metadata.row_group(group).num_rows for group in range(start))
        for group in range(start, metadata.num_row_groups if stop is None else stop):
            left, size = metadata.row_group(group).num_rows, _batch_rows(metadata.row_group(group))
            for batch in file.iter_batches(size, [group], columns, use_threads=False):
                left -= batch.num_rows
                yield row, batch, 0 if left else shares[group]
                row += batch.num_rows


# What is said of a row group's columns is not asked for: where it is damaged, pyarrow ends the
# process.


def _shares(path: str, metadata: pq.FileMetaData) -> list[int]:
    file_bytes, _ = size_and_time(path)
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    ends = [file_bytes * end // max(1, sum(sizes)) for end in accumulate(sizes)]
    return [end - begin for begin, end in pairwise([0, *ends])]


def _batch_rows(group: pq.RowGroupMetaData) -> int:
    rows = _BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)
    return min(max(1, rows), _MAX_BATCH_ROWS)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: parquet is read by pyarrow; {INSTALL_DATA}") from error
    with reading(path), contextlib.ExitStack() as stack:
        remote = is_remote(path)
        stream = stack.enter_context(open_source(path, cache_type="none")) if remote else path
        try:
            yield pq.ParquetFile(
                stream,
                buffer_size=_PART_BYTES[remote],
                pre_buffer=False,
                page_checksum_verification=True,
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
            # What the system or the hub refuses has a number or a type of its own.
            if isinstance(error, OSError) and (error.errno or remote):
                raise
            raise UserError(
                f"{path} is damaged or cut short: {one_line(error)}; fetch or write it again"
            ) from error
