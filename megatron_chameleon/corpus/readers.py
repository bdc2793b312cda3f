"""Stream documents from sources: JSON lines (plain, gzip, zstd), parquet, data sets."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import orjson
import zstandard

from megatron_chameleon.corpus.options import (
    MAX_DOMAIN_BYTES,
    DomainOptions,
    SourceOptions,
    is_domain_name,
)
from megatron_chameleon.corpus.sources import (
    INSTALL_DATA,
    Chunk,
    Source,
    SourceSplit,
    is_compressed,
    read_dataset_shard,
)
from megatron_chameleon.errors import UserError, one_line
from megatron_chameleon.storage import file_state, is_remote, open_file, reading

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_BLOCK = 1 << 20
# Compressed files are read in smaller blocks, since decompression makes a block several times
# larger, and in the worst case thousands of times.
_COMPRESSED_BLOCK = 1 << 18
_FEWEST_BYTES = 1 << 7
# Some corpora are compressed with zstd's --long, whose window exceeds the default limit.
_ZSTD_WINDOW = 2**31
# zlib's code for "gzip header and trailer, largest window".
_GZIP_FORMAT = 31
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_FINITE = ("NaN", "Infinity")

# Rows are read from a row group in batches of about this many bytes.
_BATCH_BYTES = 1 << 20
_MAX_BATCH_ROWS = 4096
# Columns are read in chunks of this size; pre-buffering would hold a whole row group in memory.
# Chunks are larger for remote files, since a request takes longer.
_CHUNK_BYTES = {False: 1 << 20, True: 1 << 23}

# First bytes of files that hold no text, whatever their suffix, with the format and the fix.
_NOT_TEXT = (
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS; run 'git lfs pull'"),
    (b"/annex/objects/", "a pointer of git-annex; run 'git annex get'"),
    (b"PK\x03\x04", "a zip archive; unpack it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it"),
    (b"\x1f\x8b", "compressed with gzip; rename it to end in .gz"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; rename it to end in .zst"),
    (b"\xfd7zXZ\0", "compressed with xz; decompress it"),
    (b"BZh91AY&SY", "compressed with bzip2; decompress it"),
    (b"PAR1\x15", "a parquet file; rename it to end in .parquet"),
    (b"ARROW1\0", "an Arrow file; pass its folder as hf:FOLDER, or write it as parquet"),
    (b"\xff\xfe", "UTF-16, not UTF-8; convert it with 'iconv -f UTF-16 -t UTF-8'"),
    (b"\xfe\xff", "UTF-16, not UTF-8; convert it with 'iconv -f UTF-16 -t UTF-8'"),
)
_START_BYTES = 512
_TAR_MAGIC = slice(257, 262)

_LINES_SHOWN = 10
# Number of lines at the beginning of a source. If all of these lines lack the key, reading fails.
_LINES_BEFORE_GIVING_UP = 1000
_KEYS_SHOWN = 20
# Maximum number of bytes of a character in UTF-8.
_LONGEST_CHARACTER = 4
_MISSING = object()

# A line longer than a block is gathered in a bytearray, which grows without a second copy. If a
# line exceeds the limit, only its length is kept.
Line = bytes | bytearray | int


class Document(NamedTuple):
    """A text, its domain ('' if not requested) and its split, as that of a :class:`Source`."""

    domain: str
    text: str
    split: SourceSplit | None = None


class MalformedLineError(ValueError):
    """Raised for a line that is not a valid document; the message states the reason."""


class MissingKeyError(MalformedLineError):
    """Raised for a line that has no value at a required key."""


@dataclasses.dataclass
class MalformedLines:
    """Counts of the lines read and skipped, in JSON types.

    Attributes:
        lines: lines read, without blank lines.
        count: malformed lines among ``lines``.
        by_domain: malformed lines by domain; '' if the line should have named the domain.
        first: location and reason of the first malformed lines.
        names: domain name in the source -> number of documents, for the domains that
            --rename-domain renames or leaves out.
    """

    lines: int = 0
    count: int = 0
    by_domain: dict[str, int] = dataclasses.field(default_factory=dict)
    first: list[str] = dataclasses.field(default_factory=list)
    names: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, other: MalformedLines) -> None:
        """Add the counts of lines that were read later."""
        self.lines += other.lines
        self.count += other.count
        self.first += other.first[: _LINES_SHOWN - len(self.first)]
        for total, added in ((self.by_domain, other.by_domain), (self.names, other.names)):
            for name, count in added.items():
                total[name] = total.get(name, 0) + count

    def check(self, max_share: float) -> None:
        """Warn about malformed lines; raise UserError if they exceed ``max_share`` of all lines."""
        more = f"; and {self.count - _LINES_SHOWN} more" if self.count > _LINES_SHOWN else ""
        found = f"{self.count} of {self.lines} lines are malformed: {'; '.join(self.first)}{more}"
        if self.count > max_share * self.lines:
            # If no line can be read, a larger share would not help.
            larger = "" if self.count == self.lines else ", or allow a larger share"
            raise UserError(
                f"{found}; this exceeds --max-malformed-share {max_share:g}: correct the lines"
                f"{larger}"
            )
        if self.count:
            warnings.warn(f"{found}; they are skipped", stacklevel=3)


class DocumentReader:
    """Stream the documents of chunks of ``sources``, in bounded memory.

    Malformed lines are counted in :attr:`malformed` and skipped. Blank lines are skipped. A null
    text is an empty document.

    Attributes:
        malformed: how many lines of all chunks so far were read, and how many were malformed.
        sources: list of sources that chunks refer to.
        hashes: SHA-256 of each chunk that was read completely. The hash covers the bytes of JSON
            lines, and the documents of parquet and data sets.

    Args:
        options: keys and limits of the text.
        sources: list of sources that chunks refer to.
        domains: how domains are assigned to sources that have none; None if domains are not
            requested.
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
        on_bytes: Callable[[int], object] | None = None,
    ) -> None:
        self.malformed = MalformedLines()
        self.hashes: dict[Chunk, str] = {}
        self._on_bytes = on_bytes or (lambda num_bytes: None)
        self._options, self.sources, self._domains = options, sources, domains
        self._held_out = {source.domain for source in sources if source.split == "held_out"}

    def read(self, chunk: Chunk) -> Iterator[Document]:
        """Yield the documents of ``chunk`` in the order of the source."""
        for _, document in self.read_numbered(chunk):
            yield document

    def read_numbered(self, chunk: Chunk) -> Iterator[tuple[int, Document]]:
        """Yield each document of ``chunk`` with its line or row, counted from 1.

        Lines are counted from the beginning of the chunk, and rows from that of the source.
        """
        return chain.from_iterable(self.read_blocks(chunk))

    def read_blocks(self, chunk: Chunk) -> Iterator[list[tuple[int, Document]]]:
        """Yield the same documents as lists: those of the bytes that were read together."""
        source = self.sources[chunk.source]
        parser = _Parser(source, self._options, self._domains, self.malformed, self._held_out)
        digest = hashlib.sha256()
        check_unchanged(source)
        read = {"lines": self._from_lines, "text": self._from_text}
        yield from read.get(source.kind, self._from_tables)(source, chunk, parser, digest)
        # If the chunk is the whole source, no later line can have the keys.
        if (chunk.start, chunk.stop) == (0, None):
            parser.check_keys(1)
        check_unchanged(source)
        self.hashes[chunk] = digest.hexdigest()

    def _from_lines(
        self, source: Source, chunk: Chunk, parser: _Parser, digest: hashlib._Hash
    ) -> Iterator[list[tuple[int, Document]]]:
        def on_block(block: bytes) -> None:
            digest.update(block)
            self._on_bytes(len(block))

        def place(position: int) -> str:
            if chunk.start == 0:
                return f"{number + position}"
            sizes = (line if isinstance(line, int) else len(line) for line in lines[:position])
            return f"byte {begin + position + sum(sizes)}"

        longest, number = self._options.max_document_bytes, 1
        for begin, lines in read_lines(source.path, on_block, longest, chunk.start, chunk.stop):
            if begin == 0 and not isinstance(lines[0], int):
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            documents = parser.parse(lines, place, number)
            number += len(lines)
            # Free the lines before the texts are used: a single text may take most of the memory.
            lines.clear()
            yield documents

    def _from_text(
        self, source: Source, chunk: Chunk, parser: _Parser, digest: hashlib._Hash
    ) -> Iterator[list[tuple[int, Document]]]:
        """Yield the only document of a text file, without a last line end.

        A file that is too long, or not UTF-8, counts as malformed.
        """

        def on_block(block: bytes) -> None:
            digest.update(block)
            self._on_bytes(len(block))

        longest, size, lines = self._options.max_document_bytes, 0, list[Line]()
        record: Any
        try:
            for _begin, some in read_lines(source.path, on_block, longest, is_json=False):
                size += sum(line if isinstance(line, int) else len(line) + 1 for line in some)
                if size <= longest + 1:  # the last line may have no end
                    lines.extend(some)
                else:
                    lines.clear()
            if size > longest + 1:
                raise MalformedLineError(f"has {size:,} bytes, more than --max-document-bytes")
            text = _decoded(b"\n".join(lines).removeprefix(_BYTE_ORDER_MARK))  # type: ignore[arg-type]
            record = {self._options.text_key: text}
        except MalformedLineError as error:
            record = error
        yield parser.parse([record], lambda position: "1", 1)

    def _from_tables(
        self, source: Source, chunk: Chunk, parser: _Parser, digest: hashlib._Hash
    ) -> Iterator[list[tuple[int, Document]]]:
        def place(position: int) -> str:
            return f"row {first_row + position}"

        if source.kind == "parquet":
            batches = self._row_groups(source.path, chunk.start, chunk.stop, parser.keys)
        else:
            batches = read_dataset_shard(source)
        for row, batch in batches:
            first_row = row
            if source.kind == "dataset":
                names = columns_for(batch.schema, parser.keys, source.name)
                batch = batch.select(list(dict.fromkeys(names)))
            rows: list[Any]
            try:
                rows = batch.to_pylist()
            except UnicodeDecodeError:
                rows = [_row(batch, position) for position in range(batch.num_rows)]
            documents = parser.parse(rows, place, first_row)
            for _, document in documents:
                head = f"{len(document.domain)} {len(document.text)} "
                digest.update(f"{head}{document.domain}{document.text}".encode())
            yield documents

    def _row_groups(
        self, path: str, start: int, stop: int | None, keys: Mapping[str, str]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches of the row groups [start, stop) of a parquet file, with row numbers."""
        with _opened(path) as file:
            # Column statistics are not read, since pyarrow aborts the process if they are damaged.
            metadata, sizes = file.metadata, _bytes_on_disk(path, file.metadata)
            leaves = [file.schema.column(i).path for i in range(len(file.schema))]
            columns = columns_for(file.schema_arrow, keys, path, leaves)
            row = 1 + sum(metadata.row_group(group).num_rows for group in range(start))
            for group in range(start, metadata.num_row_groups if stop is None else stop):
                num_rows = metadata.row_group(group).num_rows
                rows = _BATCH_BYTES * num_rows // max(1, metadata.row_group(group).total_byte_size)
                rows = min(max(1, rows), _MAX_BATCH_ROWS)
                left = sizes[group]
                for batch in file.iter_batches(rows, [group], columns, use_threads=False):
                    size = sizes[group] * batch.num_rows // num_rows
                    self._on_bytes(size)
                    left -= size
                    yield row, batch
                    row += batch.num_rows
                self._on_bytes(left)


def check_unchanged(source: Source) -> None:
    """Check by its state that ``source`` has not changed since it was found.

    Files of data sets on the hub cannot change: their addresses hold the revision.

    Raises:
        UserError: if the source has changed, or no longer exists.
    """
    if source.kind == "dataset" or (source.dataset is not None and is_remote(source.path)):
        return
    with reading(source.path):
        state = file_state(source.path, refresh=True)
    if state != source.state:
        raise UserError(
            f"{source.name} was written to while it was read (it had {source.bytes} bytes and has "
            f"{state.bytes} now); run the same command again when that is finished"
        )


# Records


class _Parser:
    """Turn the records of one source into documents.

    Attributes:
        keys: flag -> key that every record must have.

    Args:
        source: source of the records; its domain and split, unless None, apply to all records.
        options: keys and limits of the text.
        domains: where records name their domains; None if domains are not requested.
        counts: line counts, which are updated.
        held_out: names of the held-out domains, which records must not name.
    """

    def __init__(
        self,
        source: Source,
        options: SourceOptions,
        domains: DomainOptions | None,
        counts: MalformedLines,
        held_out: Collection[str | None] = (),
    ) -> None:
        self._source, self._domains, self._counts = source, domains, counts
        self._held_out = held_out
        self._max_bytes = options.max_document_bytes
        self._lines = self._without_key = 0
        self.keys = {"--text-key": options.text_key}
        if domains is not None and domains.domain_key is not None and source.domain is None:
            self.keys["--domain-key"] = domains.domain_key

    def parse(
        self, found: Sequence[Any], place: Callable[[int], str], first_number: int
    ) -> list[tuple[int, Document]]:
        """Parse the lines of a file or the rows of a table; count malformed lines and rows.

        Args:
            found: lines as :func:`read_lines` yields them, or the rows of a table, with an error in
                place of an unreadable row.
            place: returns the location of the line or row at a position in ``found``.
            first_number: number of the first line or row.

        Returns:
            Each document, with the number of its line or row.

        Raises:
            UserError: if the source begins with many lines that all lack the key, or a record
                names a held-out domain.
        """
        documents = []
        source_name, lines = self._source.name, len(found)
        for position, line in enumerate(found):
            try:
                if isinstance(line, MalformedLineError):
                    raise line
                document = self._document(line if isinstance(line, dict) else object_in(line))
            except MalformedLineError as error:
                if isinstance(line, bytes | bytearray) and not line.strip():
                    lines -= 1
                    continue
                if isinstance(error, MissingKeyError):
                    self._without_key += 1
                    self._last_error = error
                by_domain = {self._source.domain or "": 1}
                first = []
                # Only the lines that are printed are located, since locating a line takes time.
                if len(self._counts.first) < _LINES_SHOWN:
                    first = [f"{source_name}:{place(position)} {error}"]
                self._counts.add(MalformedLines(0, 1, by_domain, first))
                continue
            if document is not None:
                documents.append((first_number + position, document))
        self._lines += lines
        self._counts.lines += lines
        self.check_keys(_LINES_BEFORE_GIVING_UP)
        return documents

    def check_keys(self, least: int) -> None:
        """Raise UserError if at least ``least`` lines were read and all of them lack a key."""
        if self._without_key == self._lines >= least:
            raise UserError(
                f"{self._source.name}: no line has the key; the last line {self._last_error}"
            )

    def _document(self, record: dict[str, Any]) -> Document | None:
        """Return the document in ``record``; None if its domain is left out."""
        text = record.get(self.keys["--text-key"])
        if type(text) is not str:
            text = text_at(record, self.keys["--text-key"], "--text-key")
        if len(text) > self._max_bytes // _LONGEST_CHARACTER:
            length = len(text.encode())
            if length > self._max_bytes:
                raise MalformedLineError(
                    f"has {length:,} bytes of text, more than --max-document-bytes"
                )
        domain: str | None = self._source.domain or ""
        if "--domain-key" in self.keys:
            name = domain_at(record, self.keys["--domain-key"], "--domain-key")
            if not is_domain_name(name):
                raise MalformedLineError(
                    f"has a domain name of {len(name.encode())} bytes at "
                    f"'{self.keys['--domain-key']}'; must have 1 to {MAX_DOMAIN_BYTES}"
                )
            assert self._domains is not None
            domain = self._domains.renamed(name)
            if domain in self._held_out:
                raise UserError(
                    f"{self._source.name}: '{name}' is a domain of --input and '{domain}' one of "
                    "--held-out; choose another name"
                )
            if domain is None or name in self._domains.rename_table:
                self._counts.names[name] = 1 + self._counts.names.get(name, 0)
        return None if domain is None else Document(domain, text, self._source.split)


def object_in(line: Line) -> dict[str, Any]:
    """The JSON object in ``line``.

    Raises:
        MalformedLineError: if it is not a JSON object.
        UserError: if memory runs out.
    """
    if isinstance(line, int):
        raise MalformedLineError(f"has {line:,} bytes, more than --max-document-bytes")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        # If memory runs out, the line does not count as malformed, since it may be valid JSON.
        if "Not enough memory" in error.msg:
            raise UserError(
                f"not enough memory to read a line of {len(line):,} bytes; use a smaller "
                "--max-document-bytes"
            ) from error
        # If the line is not UTF-8, this call raises a clearer error.
        text = _decoded(line)
        if not any(name in text for name in _NOT_FINITE):
            raise MalformedLineError(f"is not JSON ({error.msg} at column {error.colno})") from None
        # Python's json module writes NaN and Infinity for metadata such as a perplexity.
        try:
            record = json.loads(text)
            json.dumps(record, ensure_ascii=False).encode()  # fails for unpaired surrogates
        except (ValueError, RecursionError):
            raise MalformedLineError(f"is not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise MalformedLineError(f"is not a JSON object but {_kind(record)}")
    return record


def text_at(record: dict[str, Any], key: str, flag: str) -> str:
    """The text at ``key``, a path with dots; null is an empty text.

    Raises:
        MalformedLineError: if the key, which ``flag`` sets, is missing or its value is not text.
    """
    value = _value_at(record, key)
    if value is _MISSING:
        existing = ", ".join(list(record)[:_KEYS_SHOWN]) or "(none)"
        raise MissingKeyError(f"has no key '{key}', only {existing}; correct {flag}")
    if value is None:
        return ""
    # A column of a table holds bytes if its type is not marked as text.
    if isinstance(value, bytes):
        return _decoded(value)
    if not isinstance(value, str):
        raise MalformedLineError(f"has {_kind(value)} at '{key}', not a string")
    return value


def domain_at(record: dict[str, Any], key: str, flag: str) -> str:
    """The name of a domain at ``key``: a string, or an integer such as the number of a cluster.

    Raises:
        MalformedLineError: as :func:`text_at`.
    """
    value = _value_at(record, key)
    return str(value) if type(value) is int else text_at(record, key, flag)


def _decoded(value: bytes | bytearray) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as invalid:
        raise MalformedLineError(f"is not valid UTF-8 at byte {invalid.start + 1}") from None


def _value_at(record: dict[str, Any], key: str) -> Any:
    """The value at ``key``: the name of a key or, if no key has this name, a path with dots."""
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inside = record.get(first) if dot else None
    if isinstance(inside, str) and inside.lstrip().startswith("{"):  # a JSON object
        with contextlib.suppress(orjson.JSONDecodeError):
            inside = orjson.loads(inside)
    return _value_at(inside, rest) if isinstance(inside, dict) else _MISSING


def _kind(value: Any) -> str:
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), "a number")


# JSON lines


def read_lines(
    path: str,
    on_block: Callable[[bytes], object],
    longest: int,
    start: int = 0,
    stop: int | None = None,
    is_json: bool = True,
) -> Iterator[tuple[int, list[Line]]]:
    r"""Yield the lines of ``path`` without their ``\n``, one block of lines at a time.

    Memory holds one block and its lines, or one longer line of at most ``longest`` bytes.

    Args:
        path: path or URL of a file; .gz and .zst are decompressed, including files of
            several members or frames.
        on_block: called with the bytes of these lines as stored on disk, in order.
        longest: bytes of the longest line that is kept.
        start: first byte at which a line may begin; 0 for a compressed file.
        stop: lines that begin here or later are not read; None for a compressed file.
        is_json: whether the lines are JSON; False for plain text.

    Yields:
        The byte of the (decompressed) file at which the first line begins, and the lines.

    Raises:
        UserError: if the file cannot be read, is damaged or truncated, or has another format.
    """
    needed = None if stop is None else stop - start
    with reading(path), open_file(path, size=needed) as stream:
        if is_compressed(path):
            assert (start, stop) == (0, None), f"{path} is compressed: it cannot be divided"
            compressed = iter(partial(stream.read, _COMPRESSED_BLOCK), b"")
            blocks = _check_start(path, _decompressed(path, compressed, on_block), is_json)
            yield from _split_lines(blocks, 0, longest)
            return
        end = None if stop is None else _line_start(stream, stop)
        begin = stream.seek(_line_start(stream, start))
        size = None if end is None else end - begin
        blocks = _blocks(stream, on_block, size, _BLOCK)
        if begin == 0:
            blocks = _check_start(path, blocks, is_json)
        yield from _split_lines(blocks, begin, longest)


def _line_start(stream: BinaryIO, position: int) -> int:
    r"""Start of the first line that begins at ``position`` or later.

    A line begins at 0 and after every ``\n``. If there is no such line, the result is the end of
    the file.
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
    stream: BinaryIO, on_block: Callable[[bytes], object], left: int | None, size: int
) -> Iterator[bytes]:
    """Yield the next ``left`` bytes (None: all) in blocks of at most ``size`` bytes."""
    while block := stream.read(size if left is None else min(size, left)):
        left = None if left is None else left - len(block)
        on_block(block)
        yield block


def _decompressed(
    path: str, blocks: Iterable[bytes], on_block: Callable[[bytes], object]
) -> Iterator[bytes]:
    """Decompress ``blocks``; ``on_block`` is called with the compressed bytes of each result."""
    is_gzip = PurePosixPath(path.lower()).suffix == ".gz"

    def new_decompressor() -> Any:
        if is_gzip:
            return zlib.decompressobj(wbits=_GZIP_FORMAT)
        return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()

    decompressor, inside, size = new_decompressor(), False, _FEWEST_BYTES
    # Zeros and line ends after a gzip member are skipped: tapes and block devices pad files with
    # zeros, and text tools end files with a line end.
    padding = b""
    try:
        for block in blocks:
            rest, done = block, 0
            while rest := rest if inside else rest.lstrip(padding):
                text = decompressor.decompress(rest[:size])
                inside, rest = not decompressor.eof, decompressor.unused_data + rest[size:]
                on_block(block[done : len(block) - len(rest)])
                done = len(block) - len(rest)
                yield text
                # This bounds memory for highly compressible text.
                if len(text) > _BLOCK:
                    size = max(_FEWEST_BYTES, size * _BLOCK // len(text))
                else:
                    size = min(2 * size, _COMPRESSED_BLOCK)
                if not inside:
                    decompressor = new_decompressor()
                    padding = b"\0\r\n" if is_gzip else b""
            on_block(block[done:])
    except (zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is damaged: {error}; download or compress it again") from error
    # Truncation is detected here, since neither zlib nor zstandard reports a truncated file.
    if inside:
        raise UserError(f"{path} is truncated: its compressed data have no end; download it again")


def _check_start(path: str, blocks: Iterable[bytes], is_json: bool) -> Iterator[bytes]:
    """Yield ``blocks``, after their first bytes were checked.

    Raises:
        UserError: with ``is_json``, naming the format and the fix, if the file is not text, or is
            one JSON value instead of JSON lines.
        MalformedLineError: without ``is_json``, if the file is not text.
    """
    blocks = iter(blocks)
    first, start = list[bytes](), b""
    while len(start) < _START_BYTES and (block := next(blocks, None)) is not None:
        first.append(block)
        start += block
    what = next((what for magic, what in _NOT_TEXT if start.startswith(magic)), None)
    if start[_TAR_MAGIC] == b"ustar":
        what = "a tar archive; unpack it"
    if what is None and is_json and _is_one_value(start.removeprefix(_BYTE_ORDER_MARK)):
        what = (
            "one JSON value, not JSON lines; pass its folder as hf:FOLDER, or write one object on "
            f"each line: jq -c '.[]' {PurePosixPath(path).name}"
        )
    if what is not None and is_json:
        raise UserError(f"{path} is {what}")
    if what is not None:  # a single document of many
        raise MalformedLineError(f"is {what}")
    yield from first
    yield from blocks


def _is_one_value(start: bytes) -> bool:
    """Whether ``start`` begins a JSON array, or an object that takes several lines."""
    first, _, others = start.lstrip().partition(b"\n")
    if not first.startswith(b"["):
        return first.strip() == b"{" and others.lstrip().startswith(b'"')
    try:
        orjson.loads(first)
    except orjson.JSONDecodeError:
        # The next line is an object if this one is only malformed, such as "[INFO]".
        with contextlib.suppress(orjson.JSONDecodeError):
            return not isinstance(orjson.loads(others.lstrip().partition(b"\n")[0]), dict)
        return True
    return not others.strip()


def _split_lines(
    blocks: Iterable[bytes], begin: int, longest: int
) -> Iterator[tuple[int, list[Line]]]:
    kept, length = bytearray(), 0  # the incomplete last line
    end = begin
    for block in blocks:
        end += len(block)
        *ended, last = block.split(b"\n")
        if ended:
            length += len(ended[0])
            kept += ended[0]
            found: list[Line] = [kept if length <= longest else length]
            found += [line if len(line) <= longest else len(line) for line in ended[1:]]
            first, begin = begin, end - len(last)
            kept, length = bytearray(), 0
            yield first, found
        length += len(last)
        if length <= longest:
            kept += last
        else:
            kept = bytearray()
    if length:
        yield begin, [kept if length <= longest else length]


# Parquet


def row_group_bytes(path: str) -> list[int]:
    """Approximate bytes on disk of each row group; the file can be divided between row groups.

    Raises:
        UserError: if the file cannot be read or is not parquet.
    """
    with _opened(path) as file:
        return _bytes_on_disk(path, file.metadata)


def columns_for(
    schema: pa.Schema, keys: Mapping[str, str], name: str, leaves: Sequence[str] = ()
) -> list[str]:
    """Find the columns that hold the values of ``keys``.

    Args:
        schema: schema of the table.
        keys: flag -> key, which is a column or a dotted path into a column.
        name: name of the table, for messages.
        leaves: dotted paths of all leaf columns; empty if leaves cannot be read separately.

    Raises:
        UserError: if a key matches no column or several.
    """
    found = []
    for flag, key in keys.items():
        column = key if key in schema.names else key.partition(".")[0]
        count = schema.names.count(column)
        if count == 0:
            existing = ", ".join([*(leaves or schema.names)][:_KEYS_SHOWN]) or "(none)"
            raise UserError(
                f"{name} has no column '{key}'; existing columns: {existing}; correct {flag}"
            )
        if count > 1:
            raise UserError(
                f"{name} has {count} columns '{column}'; rename all but the one for {flag}"
            )
        # Select the longest path that leads to a column: a column may hold JSON objects as strings,
        # in which the rest of the key is looked up.
        for path in accumulate(key.split("."), "{}.{}".format):
            if any(f"{leaf}.".startswith(f"{path}.") for leaf in leaves):
                column = path
        found.append(column)
    return found


def _bytes_on_disk(path: str, metadata: pq.FileMetaData) -> list[int]:
    file_bytes = file_state(path).bytes
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
        stream = stack.enter_context(open_file(path, cache_type="none")) if remote else path
        try:
            yield pq.ParquetFile(
                stream,
                buffer_size=_CHUNK_BYTES[remote],
                pre_buffer=False,
                page_checksum_verification=True,
            )
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
            # Errors of the system and of remote files are raised unchanged, since storage.reading
            # converts them.
            if isinstance(error, OSError) and (error.errno or remote):
                raise
            raise UserError(
                f"{path} is damaged or truncated: {one_line(error)}; download or write it again"
            ) from error


def _row(batch: pa.RecordBatch, position: int) -> dict[str, Any] | MalformedLineError:
    """Return one row, or a MalformedLineError if its text is not valid UTF-8."""
    try:
        row: dict[str, Any] = batch.slice(position, 1).to_pylist()[0]
        return row
    except UnicodeDecodeError as error:
        return MalformedLineError(f"is not valid UTF-8 at byte {error.start + 1}")
