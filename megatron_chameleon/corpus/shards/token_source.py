"""Reading the tokens of a shard in the order of its documents, wherever they lie."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from megatron_chameleon.corpus.shards.parts import bin_path
from megatron_chameleon.corpus.shards.shard import TOKENS_NAME, Shard

_BLOCK_BYTES = 1 << 20


class TokenSource(Protocol):
    """The tokens of a shard. ``source`` is the domain and split of the next documents."""

    def read(self, source: int, size: int) -> Iterator[bytes]:
        """The next ``size`` bytes, in blocks."""
        ...

    def skip(self, source: int, size: int) -> None:
        """Leave out the next ``size`` bytes."""
        ...


@contextlib.contextmanager
def token_source(shard: Shard) -> Iterator[TokenSource]:
    """Open the tokens of ``shard``."""
    if shard.parts is not None:
        yield _Parts(shard)
        return
    with (shard.root / TOKENS_NAME).open("rb", buffering=_BLOCK_BYTES) as stream:
        yield _OneFile(stream)


class _OneFile:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def read(self, _source: int, size: int) -> Iterator[bytes]:
        return _blocks(self._stream, size)

    def skip(self, _source: int, size: int) -> None:
        self._stream.seek(size, 1)


class _Parts:
    def __init__(self, shard: Shard) -> None:
        self._folder = shard.root
        self._positions: Counter[int] = Counter()

    def read(self, source: int, size: int) -> Iterator[bytes]:
        # Opened each time: there may be more of them than a process may hold open.
        with bin_path(self._folder, source).open("rb", buffering=0) as stream:
            stream.seek(self._positions[source])
            yield from _blocks(stream, size)
        self.skip(source, size)

    def skip(self, source: int, size: int) -> None:
        self._positions[source] += size


def _blocks(stream: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        block = stream.read(min(size, _BLOCK_BYTES))
        assert block, "the size of the file was checked"
        yield block
        size -= len(block)
