"""Lines that are no documents: counted, shown, and too many of them refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from megatron_chameleon.corpus.reading.domain_names import describe_left_out
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


@dataclasses.dataclass(frozen=True)
class MalformedRecord:
    """What was left out of a part of all lines, in a form that JSON can hold."""

    lines: int
    count: int
    by_domain: list[tuple[str | None, int]]
    first: list[str]
    unwanted: list[tuple[str, int]]


class MalformedLines:
    """What was left out of the lines read so far.

    Attributes:
        lines: lines read, blank ones aside.
        count: malformed lines among them.
        by_domain: the same by domain, None where the line was to name it itself.
        unwanted: source's name of a domain -> documents left out since it is not wanted; they are
            not malformed.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.count = 0
        self.by_domain: Counter[str | None] = Counter()
        self.unwanted: Counter[str] = Counter()
        self._first: list[str] = []

    def add(self, where: str, reason: str, domain: str | None) -> None:
        """Count the line at ``where`` (file:line)."""
        self.count += 1
        self.by_domain[domain] += 1
        if len(self._first) < LINES_SHOWN:
            self._first.append(f"{where} {reason}")

    @property
    def record(self) -> MalformedRecord:
        """What was counted so far."""
        by_domain = list(self.by_domain.items())
        unwanted = list(self.unwanted.items())
        return MalformedRecord(self.lines, self.count, by_domain, list(self._first), unwanted)

    def add_record(self, record: MalformedRecord) -> None:
        """Add what was counted in lines that come after these."""
        self.lines += record.lines
        self.count += record.count
        self.by_domain.update(dict(record.by_domain))
        self.unwanted.update(dict(record.unwanted))
        self._first += record.first[: LINES_SHOWN - len(self._first)]

    def describe(self) -> str:
        """How many, and where the first are, on one line."""
        more = f"; and {self.count - LINES_SHOWN} more" if self.count > LINES_SHOWN else ""
        return f"{self.count} of {self.lines} lines are malformed: {'; '.join(self._first)}{more}"

    def describe_unwanted(self) -> str:
        """Which domains are left out, and how many documents, on one line; '' if none is."""
        return describe_left_out(self.unwanted, "documents") if self.unwanted else ""

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

    def __init__(self, name: str) -> None:
        self._name = name
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
                f"{self._name}: no line has the key '{self._last.key}'; the keys there are "
                f"{', '.join(self._last.present) or '(none)'}: correct {self._last.flag}"
            )
