"""Standard output and error of a tool, and tables on them.

Writes never fail, and text cannot control the terminal.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TextIO

# Control characters other than tab and newline, bidirectional controls and line separators: in a
# name or a document, they could rewrite what the terminal shows.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# The group matches characters to escape. The other alternatives match sequences to keep: carriage
# returns and cursor movements of progress bars, and colors from libraries.
_BARS_AND_COLORS = re.compile(rf"\r|\x1b\[[0-9;]*[mA]|({_CONTROLS.pattern})")
# A longer word is no path. Of such a word, and of a longer message, the ends are printed.
MAX_PATH = 4096
ENDS_OF_WORD = 400
MAX_MESSAGE = 8192


def message_line(text: str) -> str:
    """Escape a message; cut the middle out of long words, and of a long message."""
    words = re.sub(rf"\S{{{MAX_PATH + 1},}}", lambda found: _cut(found[0], ENDS_OF_WORD), text)
    return escaped(_cut(words, MAX_MESSAGE))


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[-half:]}"


def escaped(text: str) -> str:
    r"""Write control, bidirectional and surrogate characters as ``\x1b`` or ``\u202e``."""
    return _CONTROLS.sub(lambda found: _backslashed(found[0]), text)


def escaped_but_for_bars(text: str) -> str:
    """Like :func:`escaped`, but keep carriage returns, colors and cursor movements."""
    return _BARS_AND_COLORS.sub(
        lambda found: _backslashed(found[1]) if found[1] else found[0], text
    )


def display_width(text: str) -> int:
    """Width of ``text`` in terminal columns: wide characters take two, combining characters 0."""
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        for sign in text
    )


def align_columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines: first column left-aligned, other columns right-aligned."""
    cells = list(rows)
    widths = [max(map(display_width, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        blanks = [" " * (width - display_width(t)) for t, width in zip(row, widths, strict=True)]
        others = [blank + text for text, blank in zip(row[1:], blanks[1:], strict=True)]
        lines.append("  ".join([row[0] + blanks[0], *others]))
    return lines


class Output(io.TextIOWrapper):
    """A line-buffered standard stream that escapes text and drops what cannot be written.

    Characters that the encoding lacks become backslash escapes. Every write is attempted, so lines
    appear again once a full disk has space.

    Attributes:
        escape: applied to all text.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        self._descriptor = _Descriptor(descriptor)
        self.escape: Callable[[str], str] = escaped_but_for_bars
        super().__init__(
            io.BufferedWriter(self._descriptor),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=True,
        )

    @property
    def lost(self) -> OSError | None:
        """The first error for which output was dropped; None if no output was dropped."""
        return self._descriptor.lost

    def write(self, text: str) -> int:
        """Write ``text``, escaped."""
        super().write(self.escape(text))
        return len(text)


class _Descriptor(io.RawIOBase):
    """Raw writer to a file descriptor, which stays open; drops data that cannot be written."""

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
        """Write some of ``data``; returns the number of bytes written or dropped."""
        while True:
            try:
                return os.write(self._number, data)
            except BlockingIOError:  # the stream is a pipe that its reader made non-blocking
                select.select([], [self._number], [])
            except OSError as error:
                self.lost = self.lost or error
                return memoryview(data).nbytes


def open_output() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by :class:`Output`.

    Closed standard descriptors are opened on /dev/null first: otherwise a file opened later could
    get such a descriptor, and printed text would be written to the file. Streams without a
    descriptor are unchanged.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Opened read-only, so that writing fails and lost output is reported.
            os.open(os.devnull, os.O_RDONLY)
    sys.stdout, sys.stderr = _output(sys.stdout, 1), _output(sys.stderr, 2)


def _output(stream: TextIO | None, number: int) -> TextIO:
    if isinstance(stream, Output):
        return stream
    # The stream is None if its descriptor was closed when the interpreter started.
    if stream is None:
        return Output(number, "utf-8")
    try:
        return Output(stream.fileno(), stream.encoding)
    except io.UnsupportedOperation:
        return stream


def escape_everything_printed() -> None:
    """Escape cursor movements and colors in ``sys.stdout`` too, since its text may be data."""
    if isinstance(sys.stdout, Output):
        sys.stdout.escape = escaped


def lost_output() -> OSError | None:
    """The first error for which ``sys.stdout`` lost output; None if no output was lost."""
    sys.stdout.flush()
    return sys.stdout.lost if isinstance(sys.stdout, Output) else None


def _backslashed(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
