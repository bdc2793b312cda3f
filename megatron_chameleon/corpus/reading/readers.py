"""Documents out of sources, piece by piece."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_chameleon.corpus.reading.documents import Document, DocumentMaker
from megatron_chameleon.corpus.reading.domain_names import DomainNames
from megatron_chameleon.corpus.reading.hub_datasets import read_shard
from megatron_chameleon.corpus.reading.lines import Line, LineTooLong, read_lines
from megatron_chameleon.corpus.reading.malformed import KeyCheck, MalformedLineError, MalformedLines
from megatron_chameleon.corpus.reading.parquet import read_row_groups
from megatron_chameleon.corpus.reading.pieces import Piece
from megatron_chameleon.corpus.reading.record_values import object_in
from megatron_chameleon.corpus.reading.sources import Source, check_unchanged
from megatron_chameleon.corpus.reading.tables import rows_of, strings_at, top_columns_for
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.source import DomainOptions, SourceOptions

if TYPE_CHECKING:
    import pyarrow as pa

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# A record, or what is wrong with it, and where it lies in its source.
_Found = tuple[str, dict[str, Any] | MalformedLineError]


class DocumentReader:
    """Streams the documents of pieces of ``sources``, in little memory.

    What is no document is counted in :attr:`malformed` and left out; blank lines are skipped; a
    text that is null is an empty document.

    Attributes:
        malformed: what was left out so far, of all pieces.
        hashes: SHA-256 of what was read, of the pieces read to their end: of the bytes of JSON
            lines; of parquet and data sets, of the documents.

    Args:
        options: which text.
        sources: what pieces are of.
        domains: how the domain is told of sources that have none; None if it is not asked for.
        on_bytes: is told how many bytes of a source were just read.

    Raises:
        UserError: while reading, if a source cannot be read, is not what it was when it was
            found, or none of its lines has the text key or the domain key.
    """

    def __init__(
        self,
        options: SourceOptions,
        sources: Sequence[Source],
        domains: DomainOptions | None = None,
        on_bytes: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        if not 0 <= options.max_malformed_share <= 1:
            raise UserError(
                f"--max-malformed-share {options.max_malformed_share}: a share of all lines, "
                "from 0 to 1, is expected"
            )
        if options.max_document_bytes < 1:
            raise UserError(
                f"--max-document-bytes {options.max_document_bytes}: a number from 1 on is expected"
            )
        self.malformed = MalformedLines()
        self.hashes: dict[Piece, str] = {}
        self.on_bytes = on_bytes
        self._sources = sources
        self._options = options
        self._names = None if domains is None else DomainNames(domains)

    @property
    def renamed(self) -> set[str]:
        """Which OLD of ``--rename-domain OLD=NEW`` have occurred so far."""
        return set() if self._names is None else self._names.renamed

    def read(self, piece: Piece) -> Iterator[Document]:
        """The documents of ``piece``, in the order of the source."""
        source = self._sources[piece.source]
        maker = DocumentMaker(source, self._options, self._names, self.malformed.unwanted)
        reading = _PieceReading(source, piece, maker, self.malformed, self.on_bytes)
        check_unchanged(source)
        for documents in reading.batches():
            yield from documents
        check_unchanged(source)
        self.hashes[piece] = reading.sha256


class _PieceReading:
    """Reads one piece, once.

    Args:
        source: that the piece is of.
        piece: what to read.
        maker: records in, documents out.
        malformed: counts what is left out.
        on_bytes: is told how many bytes were just read.
    """

    def __init__(
        self,
        source: Source,
        piece: Piece,
        maker: DocumentMaker,
        malformed: MalformedLines,
        on_bytes: Callable[[int], object],
    ) -> None:
        self._source = source
        self._piece = piece
        self._maker = maker
        self._malformed = malformed
        self._on_bytes = on_bytes
        self._keys = KeyCheck(source.name)
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of what was read so far."""
        return self._digest.hexdigest()

    def batches(self) -> Iterator[list[Document]]:
        """The documents, those of one block or batch after another."""
        kind = self._source.kind
        yield from self._from_lines() if kind == "lines" else self._from_tables()
        if (self._piece.start, self._piece.stop) == (0, None):
            self._keys.check()  # of a part it would tell more about how the source was cut

    def _from_lines(self) -> Iterator[list[Document]]:
        piece, line_number = self._piece, 1
        for begin, lines in read_lines(
            self._source.path, self._on_block, self._maker.max_bytes, piece.start, piece.stop
        ):
            if begin == 0 and not isinstance(lines[0], LineTooLong):
                lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
            documents = self._maker.from_lines(lines)
            if documents is None:
                first = None if piece.start else line_number
                documents = self._one_by_one(_records(lines, begin, first))
            else:
                self._malformed.lines += len(lines)
                self._keys.found()
            line_number += len(lines)
            lines.clear()  # one of them may be most of the memory
            yield documents

    def _on_block(self, block: bytes) -> None:
        self._digest.update(block)
        self._on_bytes(len(block))

    def _from_tables(self) -> Iterator[list[Document]]:
        for row, batch in self._tables():
            documents = self._of_columns(batch)
            if documents is None:
                rows = enumerate(rows_of(batch), start=row)
                documents = self._one_by_one((f"row {row}", record) for row, record in rows)
            else:
                self._malformed.lines += batch.num_rows
                self._keys.found()
            for document in documents:
                head = f"{len(document.domain)} {len(document.text)} "
                self._digest.update(f"{head}{document.domain}{document.text}".encode())
            yield documents

    def _tables(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The number of the first row, from 1, and rows with the columns that are needed."""
        source, piece, keys = self._source, self._piece, self._maker.keys
        if source.kind == "parquet":
            for row, batch, num_bytes in read_row_groups(
                source.path, keys, piece.start, piece.stop
            ):
                yield row, batch
                self._on_bytes(num_bytes)
            return
        for row, batch in read_shard(source.path, source.shard, source.num_shards):
            columns = top_columns_for(batch.schema, keys, source.name)
            yield row, batch.select(columns)

    def _of_columns(self, batch: pa.RecordBatch) -> list[Document] | None:
        """The documents of a batch whose columns are plain strings, or None."""
        try:
            found = [strings_at(batch, key) for key in self._maker.keys.values()]
        except UnicodeDecodeError:
            return None
        columns = [column for column in found if column is not None]
        return self._maker.from_strings(*columns) if len(columns) == len(found) else None

    def _one_by_one(self, found: Iterable[_Found]) -> list[Document]:
        documents = []
        for where, record in found:
            self._malformed.lines += 1
            try:
                if isinstance(record, MalformedLineError):
                    raise record
                document = self._maker.from_record(record)
            except MalformedLineError as problem:
                place = f"{self._source.name}:{where}"
                self._malformed.add(place, str(problem), self._source.domain)
                self._keys.failed(problem)
                continue
            self._keys.found()
            if document is not None:
                documents.append(document)
        return documents


def _records(lines: Iterable[Line], begin: int, first: int | None) -> Iterator[_Found]:
    """What is in the lines that are not blank.

    Args:
        lines: some that follow each other.
        begin: the byte at which they begin.
        first: number of the first one; None if it is not known, and bytes are given instead.
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
