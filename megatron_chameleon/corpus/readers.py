"""Stream documents from sources: JSON lines (plain, gzip, zstd), parquet, data sets."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

import zstandard

from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.records import (
    Document,
    DocumentMaker,
    DomainNames,
    KeyCheck,
    Line,
    LineTooLong,
    MalformedLineError,
    MalformedLines,
    object_in,
)
from megatron_chameleon.corpus.sources import (
    INSTALL_DATA,
    Chunk,
    Source,
    is_compressed,
    is_remote,
    one_line,
    open_source,
    read_dataset_shard,
    reading,
    size_and_time,
)
from megatron_chameleon.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BLOCK = 1 << 20
# Compressed blocks expand several times, in the worst case thousands of times.
_COMPRESSED_BLOCK = 1 << 18
_FEWEST_BYTES = 1 << 7
# Some corpora are compressed with zstd's --long, whose window exceeds the default limit.
_ZSTD_WINDOW = 2**31
_GZIP_FORMAT = 31  # zlib's code for "gzip header and trailer, largest window"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Rows are read from a row group in batches of about this many bytes.
_BATCH_BYTES = 1 << 20
_MAX_BATCH_ROWS = 4096
# Columns are read in chunks of this size; pre-buffering would hold a whole row group in memory. A
# request to the hub costs more than one to a disk.
_CHUNK_BYTES = {False: 1 << 20, True: 1 << 23}
_COLUMNS_SHOWN = 20

# Location in the source, and a record or its error.
_Found = tuple[str, dict[str, Any] | MalformedLineError]


class DocumentReader:
    """Stream the documents of chunks of ``sources``, in bounded memory.

    Lines without a document are counted in :attr:`malformed` and skipped, like blank lines; a text
    that is null is an empty document.

    Attributes:
        malformed: counts of the lines skipped so far, of all chunks.
        hashes: SHA-256 of the contents of each chunk that was read completely: of the bytes of
            JSON lines; of the documents of parquet and data sets.

    Args:
        options: the text to read.
        sources: what chunks refer to.
        domains: how sources without a domain are assigned one; None if domains are not requested.
        on_bytes: called with the number of bytes just read of a source.

    Raises:
        UserError: while reading, if a source cannot be read or has changed since it was found, or
            none of its lines has the text key or the domain key.
    """

    def __init__(
        self,
        options: SourceOptions,
        sources: Sequence[Source],
        domains: DomainOptions | None = None,
        on_bytes: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self.malformed = MalformedLines()
        self.hashes: dict[Chunk, str] = {}
        self.on_bytes = on_bytes
        self._sources = sources
        self._options = options
        self._domain_key = None if domains is None else domains.domain_key
        self._names = None if domains is None else DomainNames(domains)

    @property
    def renamed(self) -> set[str]:
        """The OLD of ``--rename-domain OLD=NEW`` that have occurred so far."""
        return set() if self._names is None else self._names.renamed

    def read(self, chunk: Chunk) -> Iterator[Document]:
        """The documents of ``chunk``, in the order of the source."""
        source = self._sources[chunk.source]
        maker = DocumentMaker(
            source.domain,
            source.split,
            self._options,
            self._domain_key,
            self._names,
            self.malformed.unwanted,
        )
        keys, digest = KeyCheck(source.name), hashlib.sha256()
        _check_unchanged(source)
        read = self._from_lines if source.kind == "lines" else self._from_tables
        for documents in read(source, chunk, maker, keys, digest):
            yield from documents
        if (chunk.start, chunk.stop) == (0, None):
            keys.check()  # a part of a source may lack the key
        _check_unchanged(source)
        self.hashes[chunk] = digest.hexdigest()

    def _from_lines(
        self,
        source: Source,
        chunk: Chunk,
        maker: DocumentMaker,
        keys: KeyCheck,
        digest: hashlib._Hash,
    ) -> Iterator[list[Document]]:
        def on_block(block: bytes) -> None:
            digest.update(block)
            self.on_bytes(len(block))

        line_number = 1
        for begin, lines in read_lines(
            source.path, on_block, maker.max_bytes, chunk.start, chunk.stop
        ):
            if begin == 0 and not isinstance(lines[0], LineTooLong):
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            documents = maker.from_lines(lines)
            if documents is None:
                first = None if chunk.start else line_number
                documents = self._one_by_one(source, _records(lines, begin, first), maker, keys)
            else:
                self.malformed.lines += len(lines)
                keys.found()
            line_number += len(lines)
            lines.clear()  # a single text may take most of the memory
            yield documents

    def _from_tables(
        self,
        source: Source,
        chunk: Chunk,
        maker: DocumentMaker,
        keys: KeyCheck,
        digest: hashlib._Hash,
    ) -> Iterator[list[Document]]:
        for first_row, batch in self._tables(source, chunk, maker.keys):
            documents = _from_columns(batch, maker)
            if documents is None:
                rows = enumerate(_rows_of(batch), start=first_row)
                found = ((f"row {row}", record) for row, record in rows)
                documents = self._one_by_one(source, found, maker, keys)
            else:
                self.malformed.lines += batch.num_rows
                keys.found()
            for document in documents:
                head = f"{len(document.domain)} {len(document.text)} "
                digest.update(f"{head}{document.domain}{document.text}".encode())
            yield documents

    def _tables(
        self, source: Source, chunk: Chunk, keys: Mapping[str, str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The number of the first row, from 1, and rows with the columns of ``keys``."""
        if source.kind == "parquet":
            for row, batch, num_bytes in read_row_groups(
                source.path, keys, chunk.start, chunk.stop
            ):
                yield row, batch
                self.on_bytes(num_bytes)
            return
        for row, batch in read_dataset_shard(source):
            leaves = columns_for(batch.schema, keys, source.name)
            names = batch.schema.names
            columns = [leaf if leaf in names else leaf.split(".")[0] for leaf in leaves]
            yield row, batch.select(list(dict.fromkeys(columns)))

    def _one_by_one(
        self, source: Source, found: Iterable[_Found], maker: DocumentMaker, keys: KeyCheck
    ) -> list[Document]:
        documents = []
        for where, record in found:
            self.malformed.lines += 1
            try:
                if isinstance(record, MalformedLineError):
                    raise record
                document = maker.from_record(record)
            except MalformedLineError as problem:
                self.malformed.add(f"{source.name}:{where}", str(problem), source.domain)
                keys.failed(problem)
                continue
            keys.found()
            if document is not None:
                documents.append(document)
        return documents


def _check_unchanged(source: Source) -> None:
    """Check by size and modification time that ``source`` has not changed since it was found.

    Files on the hub cannot change: their addresses hold the revision.

    Raises:
        UserError: if it has changed, or is gone.
    """
    if source.kind == "dataset" or is_remote(source.path):
        return
    size, modified_ns = size_and_time(source.path)
    if size != source.bytes:
        raise UserError(
            f"{source.name} has changed while it was read: it had {source.bytes} bytes and has "
            f"{size} now; restore it and run the same command again"
        )
    if modified_ns != source.modified_ns:
        raise UserError(
            f"{source.name} was written to while it was read; run the same command again when "
            "that is finished"
        )


def _records(lines: Iterable[Line], begin: int, first: int | None) -> Iterator[_Found]:
    """The records in the lines that are not blank.

    Args:
        lines: consecutive lines.
        begin: the byte at which they begin.
        first: number of the first line; None if it is unknown, bytes are reported then.
    """
    for position, line in enumerate(lines):
        where = f"byte {begin}" if first is None else f"{first + position}"
        begin += len(line) + 1
        if not isinstance(line, LineTooLong) and not line.strip():
            continue
        try:
            yield where, object_in(line)
        except MalformedLineError as problem:
            yield where, problem


# JSON lines


def read_lines(
    path: str,
    on_block: Callable[[bytes], object],
    longest: int,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[tuple[int, list[Line]]]:
    r"""The lines of ``path`` without their ``\n``, those of one block after another.

    Memory holds one block and its lines, or one longer line of at most ``longest`` bytes.

    Args:
        path: a file, here or on the hub; .gz and .zst are decompressed, several members or frames
            included.
        on_block: called with the bytes of these lines as stored on disk, in order.
        longest: bytes of the longest line that is kept.
        start: first byte at which a line may begin; 0 for a compressed file.
        stop: lines that begin here or later are not read; None for a compressed file.

    Yields:
        The byte of the (decompressed) file at which the first line begins, and the lines.

    Raises:
        UserError: if the file cannot be read, or is damaged or truncated.
    """
    if is_compressed(path):
        assert (start, stop) == (0, None), f"{path} is compressed: it cannot be divided"
        blocks = _blocks(path, on_block, 0, None, _COMPRESSED_BLOCK)
        yield from _split_lines(_decompressed(path, blocks), 0, longest)
        return
    begin, end = 0, None
    if (start, stop) != (0, None):
        with reading(path), open_source(path) as stream:
            begin = line_start(stream, start)
            end = None if stop is None else line_start(stream, stop)
    yield from _split_lines(_blocks(path, on_block, begin, end, _BLOCK), begin, longest)


def line_start(stream: BinaryIO, position: int) -> int:
    r"""Start of the first line that begins at ``position`` or later; the end if there is none.

    A line begins at 0 and after every ``\n``.
    """
    if position == 0:
        return 0
    before = stream.seek(position - 1)
    while block := stream.read(_COMPRESSED_BLOCK):
        found = block.find(b"\n")
        if found >= 0:
            return before + found + 1
        before += len(block)
    return before


def _blocks(
    path: str, on_block: Callable[[bytes], object], begin: int, end: int | None, size: int
) -> Iterator[bytes]:
    """The bytes [begin, end), at most ``size`` at a time."""
    with reading(path), open_source(path) as stream:
        position = stream.seek(begin) if begin else 0
        while end is None or position < end:
            block = stream.read(size if end is None else min(size, end - position))
            if not block:
                return
            position += len(block)
            on_block(block)
            yield block


def _decompressed(path: str, blocks: Iterable[bytes]) -> Iterator[bytes]:
    is_gzip = PurePosixPath(path).suffix == ".gz"

    def new_decompressor() -> Any:
        if is_gzip:
            return zlib.decompressobj(wbits=_GZIP_FORMAT)
        return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()

    decompressor, inside, size = new_decompressor(), False, _FEWEST_BYTES
    padding = b""  # gzip allows zeros after a member, with which tapes and block devices pad files
    try:
        for block in blocks:
            rest = block
            while rest := rest if inside else rest.lstrip(padding):
                text = decompressor.decompress(rest[:size])
                yield text
                inside, rest = not decompressor.eof, decompressor.unused_data + rest[size:]
                # Bounds memory for highly compressible text.
                if len(text) > _BLOCK:
                    size = max(_FEWEST_BYTES, size * _BLOCK // len(text))
                else:
                    size = min(2 * size, _COMPRESSED_BLOCK)
                if not inside:
                    decompressor = new_decompressor()
                    padding = b"\0" if is_gzip else b""
    except (zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is damaged: {error}; download or compress it again") from error
    # Neither library reports a truncated file.
    if inside:
        raise UserError(f"{path} is truncated: its compressed data have no end; download it again")


def _split_lines(
    blocks: Iterable[bytes], begin: int, longest: int
) -> Iterator[tuple[int, list[Line]]]:
    kept, length = bytearray(), 0  # of the incomplete last line
    position = begin

    def add(part: bytes) -> None:
        nonlocal kept, length
        length += len(part)
        if length <= longest:
            kept += part
        else:
            kept = bytearray()

    def take() -> Line:
        nonlocal kept, length
        line: Line = kept if length <= longest else LineTooLong(length)
        kept, length = bytearray(), 0
        return line

    for block in blocks:
        position += len(block)
        first, *others = block.split(b"\n")
        add(first)
        if not others:
            continue
        last = others.pop()
        lines: list[Line] = [take(), *others]
        if longest < len(block):
            lines = [line if len(line) <= longest else LineTooLong(len(line)) for line in lines]
        yield begin, lines
        add(last)
        begin = position - len(last)
    if length:
        yield begin, [take()]


# Parquet


def row_group_bytes(path: str) -> list[int]:
    """Approximate bytes on disk of each row group; the file can be divided between them.

    Raises:
        UserError: if the file cannot be read or is not parquet.
    """
    with _opened(path) as file:
        return _bytes_on_disk(path, file.metadata)


def read_row_groups(
    path: str, keys: Mapping[str, str], start: int = 0, stop: int | None = None
) -> Iterator[tuple[int, pa.RecordBatch, int]]:
    """Rows of the row groups [start, stop), with only the columns of ``keys``.

    Args:
        path: a file, here or on the hub.
        keys: flag -> key, a column or a path with dots into one.
        start: the first row group.
        stop: the first that is not read; None reads to the end.

    Yields:
        The number in the file of the batch's first row, from 1; the batch; and, with the last batch
        of a row group, its approximate bytes on disk, otherwise 0.

    Raises:
        UserError: if the file cannot be read, is not parquet, is damaged, or lacks a column.
    """
    with _opened(path) as file:
        # Statistics of columns are not read: where they are damaged, pyarrow ends the process.
        metadata, sizes = file.metadata, _bytes_on_disk(path, file.metadata)
        columns = columns_for(file.schema_arrow, keys, path)
        row = 1 + sum(metadata.row_group(group).num_rows for group in range(start))
        for group in range(start, metadata.num_row_groups if stop is None else stop):
            left = num_rows = metadata.row_group(group).num_rows
            rows = _BATCH_BYTES * num_rows // max(1, metadata.row_group(group).total_byte_size)
            rows = min(max(1, rows), _MAX_BATCH_ROWS)
            for batch in file.iter_batches(rows, [group], columns, use_threads=False):
                left -= batch.num_rows
                yield row, batch, 0 if left else sizes[group]
                row += batch.num_rows


def _bytes_on_disk(path: str, metadata: pq.FileMetaData) -> list[int]:
    file_bytes, _ = size_and_time(path)
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    ends = [file_bytes * end // max(1, sum(sizes)) for end in accumulate(sizes)]
    return [end - begin for begin, end in pairwise([0, *ends])]


@contextlib.contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"{path}: parquet needs the package pyarrow; {INSTALL_DATA}") from error
    with reading(path), contextlib.ExitStack() as stack:
        remote = is_remote(path)
        stream = stack.enter_context(open_source(path, cache_type="none")) if remote else path
        try:
            yield pq.ParquetFile(
                stream,
                buffer_size=_CHUNK_BYTES[remote],
                pre_buffer=False,
                page_checksum_verification=True,
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
            # Errors of the system or the hub have a number or a type of their own.
            if isinstance(error, OSError) and (error.errno or remote):
                raise
            raise UserError(
                f"{path} is damaged or truncated: {one_line(error)}; download or write it again"
            ) from error


# Columns of Arrow tables


def columns_for(schema: pa.Schema, keys: Mapping[str, str], name: str) -> list[str]:
    """The columns, or leaves of columns, that hold the values of ``keys``.

    Args:
        schema: of the table.
        keys: flag -> key, a column or a path with dots into one.
        name: of the table, for messages.

    Raises:
        UserError: listing the columns, if a key matches none or several.
    """
    found = []
    for flag, key in keys.items():
        top = key if key in schema.names else key.split(".")[0]
        if schema.names.count(top) > 1:
            raise UserError(
                f"{name} has {schema.names.count(top)} columns '{top}'; rename all but the one "
                f"for {flag}"
            )
        column = _column_of(schema, key)
        if column is None:
            existing = ", ".join(list(_paths(schema))[:_COLUMNS_SHOWN]) or "(none)"
            raise UserError(
                f"{name} has no column '{key}'; existing columns: {existing}; correct {flag}"
            )
        found.append(column)
    return found


def _from_columns(batch: pa.RecordBatch, maker: DocumentMaker) -> list[Document] | None:
    """The documents of a batch; None unless all columns are strings."""
    try:
        found = [_strings_at(batch, key) for key in maker.keys.values()]
    except UnicodeDecodeError:
        return None
    columns = [column for column in found if column is not None]
    return maker.from_strings(*columns) if len(columns) == len(found) else None


def _strings_at(batch: pa.RecordBatch, key: str) -> list[str] | None:
    """The strings at ``key``, null as ''; None unless it is a column of strings.

    Raises:
        UnicodeDecodeError: if one is not UTF-8.
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


def _rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | MalformedLineError]:
    """The rows one by one, slowly, or the error of a row that is not UTF-8."""
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
            return path  # objects written as strings; their keys are known when they are read
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
