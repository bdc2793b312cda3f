"""Standard output and error of a tool: writes never fail, and text cannot control the terminal."""

from __future__ import annotations

import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

# Control characters other than tab and newline, and those that change the direction of writing or
# end a line. A name or a document that holds them could rewrite what the terminal shows.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# Progress bars return to the start of their line and go up a line, and libraries print in colors.
_BARS_AND_COLORS = re.compile(rf"\r|\x1b\[[0-9;]*[mA]|({_CONTROLS.pattern})")


def escaped(text: str) -> str:
    r"""``text`` with control, bidirectional and surrogate characters as ``\x1b`` or ``\u202e``."""
    return _CONTROLS.sub(lambda found: _backslashed(found[0]), text)


def escaped_but_for_bars(text: str) -> str:
    """:func:`escaped`, except for carriage returns, colors and the moves of progress bars."""
    return _BARS_AND_COLORS.sub(
        lambda found: _backslashed(found[1]) if found[1] else found[0], text
    )


class Output(io.TextIOWrapper):
    """A standard stream that drops what cannot be written, and escapes what is.

    It writes each line at once. Characters that the encoding lacks come out as backslash escapes.
    Every write is attempted, so that lines appear again once a full disk has room.

    Attributes:
        escape: applied to all text.
    """

    def __init__(self, descriptor: int, encoding: str, escape: Callable[[str], str]) -> None:
        self._descriptor = _Descriptor(descriptor)
        self.escape = escape
        super().__init__(
            io.BufferedWriter(self._descriptor),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=True,
        )

    @property
    def lost(self) -> OSError | None:
        """Why something was dropped, at the first time that it was; None if nothing was."""
        return self._descriptor.lost

    def write(self, text: str) -> int:
        """Write ``text``, escaped."""
        super().write(self.escape(text))
        return len(text)


class _Descriptor(io.RawIOBase):
    """An open file descriptor that swallows what it cannot write. It is not closed with this."""

    def __init__(self, descriptor: int) -> None:
        self._number = descriptor
        self.lost: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        return os.isatty(self._number)

    def write(self, data: Any) -> int:
        """Write some of ``data``; returns how many bytes are dealt with."""
        while True:
            try:
                return os.write(self._number, data)
            except BlockingIOError:  # a pipe that whoever reads it has made non-blocking
                select.select([], [self._number], [])
            except OSError as error:
                self.lost = self.lost or error
                return memoryview(data).nbytes


def open_output() -> None:
    """Put :class:`Output` in the place of ``sys.stdout`` and ``sys.stderr``.

    Standard descriptors that are closed are opened on /dev/null first, since a file would get their
    numbers otherwise, and with them what others print. Streams without a descriptor stay.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Not for writing: then it is known that what is printed is lost.
            os.open(os.devnull, os.O_RDONLY)
    sys.stdout = _output(sys.stdout, 1, escaped_but_for_bars)
    sys.stderr = _output(sys.stderr, 2, escaped_but_for_bars)


def _output(stream: TextIO | None, number: int, escape: Callable[[str], str]) -> TextIO:
    if isinstance(stream, Output):
        return stream
    if stream is None:  # it was closed when the interpreter started
        return Output(number, "utf-8", escape)
    try:
        return Output(stream.fileno(), stream.encoding, escape)
    except io.UnsupportedOperation:
        return stream


def escape_everything_printed() -> None:
    """From now on what is printed to ``sys.stdout`` may come from data, and is escaped in full."""
    if isinstance(sys.stdout, Output):
        sys.stdout.escape = escaped


def lost_output() -> OSError | None:
    """Why some of what was printed to ``sys.stdout`` is lost; None if nothing is."""
    sys.stdout.flush()
    return sys.stdout.lost if isinstance(sys.stdout, Output) else None


def reader_has_left(error: OSError) -> bool:
    """Whether output was lost because its reader closed the pipe, as in ``tool | head``."""
    return error.errno == errno.EPIPE


def _backslashed(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
