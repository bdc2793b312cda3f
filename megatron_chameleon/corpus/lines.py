"""Files of text, compressed or not, as lines of bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from megatron_chameleon.errors import UserError

_BLOCK = 1 << 18
# Some corpora are compressed with zstd's --long, whose window the default limit refuses.
_ZSTD_WINDOW = 2**31
_GZIP_FORMAT = 31  # zlib's name for "a gzip header and trailer, largest window"

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=_GZIP_FORMAT),
    ".zst": lambda: zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj(),
}
COMPRESSED_SUFFIXES = tuple(_DECOMPRESSORS)


def read_lines(path: Path, on_block: Callable[[bytes], object]) -> Iterator[bytes]:
    r"""Lines of ``path`` without their ``\n``, unpacked by its suffix, in little memory.

    Args:
        path: a file; .gz and .zst are unpacked, of several members or frames too.
        on_block: is given every block of bytes as it lies on disk, in order.

    Raises:
        UserError: if the file cannot be read, or is damaged or cut short.
    """
    blocks = _blocks(path, on_block)
    if path.suffix in _DECOMPRESSORS:
        blocks = _decompressed(path, blocks)
    return _split_lines(blocks)


def _blocks(path: Path, on_block: Callable[[bytes], object]) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                on_block(block)
                yield block
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}; correct --input"
        ) from error


def _decompressed(path: Path, blocks: Iterator[bytes]) -> Iterator[bytes]:
    new_decompressor = _DECOMPRESSORS[path.suffix]
    decompressor, inside = new_decompressor(), False
    try:
        for block in blocks:
            rest = block
            while rest:
                yield decompressor.decompress(rest)
                inside, rest = not decompressor.eof, decompressor.unused_data
                if not inside:
                    decompressor = new_decompressor()
    except (zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{path} is damaged: {error}; fetch or pack it again") from error
    # Neither library says so when a file ends in the middle.
    if inside:
        raise UserError(f"{path} is cut short: its compressed data have no end; fetch it again")


def _split_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []  # of a line that goes on; joined once, however long it is
    for block in blocks:
        first, *more = block.split(b"\n")
        parts.append(first)
        if more:
            yield b"".join(parts)
            yield from more[:-1]
            parts = [more[-1]]
    if last := b"".join(parts):
        yield last
