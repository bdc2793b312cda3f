"""Files of text, compressed or not, as lines of bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import zstandard

from megatron_chameleon.corpus.reading.opening import open_source, reading
from megatron_chameleon.errors import UserError

_BLOCK = 1 << 20
# Text comes out of a compressed block several times as large, or thousands of times.
_COMPRESSED_BLOCK = 1 << 18
_FEWEST_BYTES = 1 << 7
# Some corpora are compressed with zstd's --long, whose window the default limit refuses.
_ZSTD_WINDOW = 2**31
_GZIP_FORMAT = 31  # zlib's name for "a gzip header and trailer, largest window"

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=_GZIP_FORMAT),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
}
COMPRESSED_SUFFIXES = tuple(_DECOMPRESSORS)


class LineTooLong:
    """Stands for a line of ``length`` bytes, which were not kept."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


# A line that is longer than a block is gathered in a bytearray, which grows without a second copy.
Line = bytes | bytearray | LineTooLong


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
        path: a file, perhaps on the hub; .gz and .zst are unpacked, several members or frames too.
        on_block: is given the bytes of these lines as they lie on disk, in order.
        longest: bytes of the longest line that is kept.
        start: only lines that begin at this byte or later; 0 for a compressed file.
        stop: and before this one, the last of them to its end; None for a compressed file.

    Yields:
        The byte of the (unpacked) file at which the first line begins, and the lines.

    Raises:
        UserError: if the file cannot be read, or is damaged or cut short.
    """
    if is_compressed(path):
        assert (start, stop) == (0, None), f"{path} is compressed: no piece of it is read alone"
        blocks = _blocks(path, on_block, 0, None, _COMPRESSED_BLOCK)
        yield from _split_lines(_decompressed(path, blocks), 0, longest)
        return
    begin, end = _whole_lines(path, start, stop)
    yield from _split_lines(_blocks(path, on_block, begin, end, _BLOCK), begin, longest)


def is_compressed(path: str) -> bool:
    """Whether ``path`` is unpacked while it is read, so that it can only be read whole."""
    return _suffix(path) in _DECOMPRESSORS


def line_start(stream: BinaryIO, position: int) -> int:
    r"""Where the first line begins that begins at ``position`` or later; the end if there is none.

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


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix


def _whole_lines(path: str, start: int, stop: int | None) -> tuple[int, int | None]:
    """The bytes between which the lines lie that begin in [start, stop)."""
    if (start, stop) == (0, None):
        return 0, None
    with reading(path), open_source(path) as stream:
        return line_start(stream, start), None if stop is None else line_start(stream, stop)


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
    new_decompressor = _DECOMPRESSORS[_suffix(path)]
    decompressor, inside, size = new_decompressor(), False, _FEWEST_BYTES
    # What tapes and block devices fill a file up with; gzip takes it after a whole member.
    padding = b""
    try:
        for block in blocks:
            rest = block
            while rest := rest if inside else rest.lstrip(padding):
                text = decompressor.decompress(rest[:size])
                yield text
                inside, rest = not decompressor.eof, decompressor.unused_data + rest[size:]
                size = _next_size(size, len(text))
                if not inside:
                    decompressor = new_decompressor()
                    padding = b"\0" if _suffix(path) == ".gz" else b""
    except (zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is damaged: {error}; fetch or pack it again") from error
    # Neither library says so when a file ends in the middle.
    if inside:
        raise UserError(f"{path} is cut short: its compressed data have no end; fetch it again")


def _next_size(size: int, unpacked: int) -> int:
    """How many bytes to unpack next, so that text which repeats itself does not fill memory."""
    if unpacked > _BLOCK:
        return max(_FEWEST_BYTES, size * _BLOCK // unpacked)
    return min(2 * size, _COMPRESSED_BLOCK)


def _split_lines(
    blocks: Iterable[bytes], begin: int, longest: int
) -> Iterator[tuple[int, list[Line]]]:
    begun, position = _BegunLine(longest), begin
    for block in blocks:
        position += len(block)
        first, *others = block.split(b"\n")
        begun.add(first)
        if not others:
            continue
        last = others.pop()
        lines: list[Line] = [begun.take(), *others]
        if longest < len(block):
            lines = [line if len(line) <= longest else LineTooLong(len(line)) for line in lines]
        yield begin, lines
        begun.add(last)
        begin = position - len(last)
    if begun.length:
        yield begin, [begun.take()]


class _BegunLine:
    """A line whose end was not read yet; one of more than ``longest`` bytes is not kept."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.length = 0
        self._kept = bytearray()

    def add(self, part: bytes) -> None:
        self.length += len(part)
        if self.length <= self._longest:
            self._kept += part
        else:
            self._kept = bytearray()

    def take(self) -> Line:
        """The line, ended; another one begins."""
        line: Line = self._kept if self.length <= self._longest else LineTooLong(self.length)
        self.length, self._kept = 0, bytearray()
        return line
