"""Lines that are no documents: counted, shown, and too many of them refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.errors import UserError

LINES_SHOWN = 10
# A file that begins with this many lines, all without the key, is not read to its end.
LINES_BEFORE_GIVING_UP = 1000


class MalformedLineError(ValueError):
    """One line is no document; the message says why."""


class MissingKeyError(MalformedLineError):
    """One line lacks the key that ``flag`` asks for; it has the keys ``present``."""

    def __init__(self, flag: str, key: str, present: Sequence[str]) -> None:
        super().__init__(f"has no key '{key}'")
        self.flag = flag
        self.key = key
        self.present = present


class MalformedLines:
    """What was left out of the lines read so far.

    Attributes:
        lines: lines read, blank ones aside.
        count: malformed lines among them.
        by_domain: the same by domain, None where the line was to name it itself.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.count = 0
        self.by_domain: Counter[str | None] = Counter()
        self._first: list[str] = []

    def add(self, where: str, reason: str, domain: str | None) -> None:
        """Count the line at ``where`` (file:line)."""
        self.count += 1
        self.by_domain[domain] += 1
        if len(self._first) < LINES_SHOWN:
            self._first.append(f"{where} {reason}")

    def describe(self) -> str:
        """How many, and where the first are, on one line."""
        more = f"; and {self.count - LINES_SHOWN} more" if self.count > LINES_SHOWN else ""
        return f"{self.count} of {self.lines} lines are malformed: {'; '.join(self._first)}{more}"

    def check(self, max_share: float) -> None:
        """Refuse more than ``max_share`` of the lines.

        Raises:
            UserError: saying how many, and where the first are.
        """
        if self.count > max_share * self.lines:
            raise UserError(
                f"{self.describe()}; that is more than --max-malformed-share {max_share:g}: "
                "correct them, or allow a larger share"
            )


class KeyCheck:
    """Tells a key that one file does not have from a key that some of its lines lack."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines_without = 0
        self._last: MissingKeyError | None = None
        self._any_document = False

    def found(self) -> None:
        """A line of the file is a document."""
        self._any_document = True

    def failed(self, problem: MalformedLineError) -> None:
        """A line is none. Raises UserError where the file begins with too many without the key."""
        if isinstance(problem, MissingKeyError):
            self._last = problem
            self._lines_without += 1
            if self._lines_without >= LINES_BEFORE_GIVING_UP:
                self.check()

    def check(self) -> None:
        """Raise UserError, naming the keys there are, if no line so far was a document."""
        if self._last is not None and not self._any_document:
            raise UserError(
                f"{self._path}: no line has the key '{self._last.key}'; the keys there are "
                f"{', '.join(self._last.present) or '(none)'}: correct {self._last.flag}"
            )
