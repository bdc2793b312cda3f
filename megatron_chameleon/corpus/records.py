"""Parse records into documents: dotted keys, domain names, malformed-line counts."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from megatron_chameleon.artifacts import Split
from megatron_chameleon.corpus.options import (
    ALL_OTHERS,
    MAX_DOMAIN_BYTES,
    DomainOptions,
    SourceOptions,
    is_domain_name,
)
from megatron_chameleon.errors import UserError

LINES_SHOWN = 10
# Reading stops early if a file begins with this many lines, all without the key.
LINES_BEFORE_GIVING_UP = 1000
TEXT_FLAG, DOMAIN_FLAG = "--text-key", "--domain-key"
_NAMES_SHOWN = 10
_KEYS_SHOWN = 20
_LONGEST_CHARACTER = 4  # bytes in UTF-8
_MISSING = object()


class MalformedLineError(ValueError):
    """A line is not a valid document; the message is the reason."""


class MissingKeyError(MalformedLineError):
    """One line lacks the ``key`` of the option ``flag``; it has the keys ``present``."""

    def __init__(self, flag: str, key: str, present: Sequence[str]) -> None:
        super().__init__(f"has no key '{key}'")
        self.flag = flag
        self.key = key
        self.present = present


class LineTooLong:
    """Placeholder for a line of ``length`` bytes that exceeded the limit."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length


# A line longer than a block is gathered in a bytearray, which grows without a second copy.
Line = bytes | bytearray | LineTooLong


class Document(NamedTuple):
    """One text; ``domain`` is empty if not requested, ``split`` None if the text's hash decides."""

    domain: str
    text: str
    split: Split | None = None


@dataclasses.dataclass(frozen=True)
class MalformedRecord:
    """Counts of :class:`MalformedLines` in JSON types."""

    lines: int
    count: int
    by_domain: list[tuple[str | None, int]]
    first: list[str]
    unwanted: list[tuple[str, int]]


class MalformedLines:
    """Counts of the lines that were skipped so far.

    Attributes:
        lines: lines read, blank ones excepted.
        count: malformed lines among them.
        by_domain: malformed lines by domain; None if the line should have named the domain.
        unwanted: source's name of a domain -> documents left out by --rename-domain; they are not
            malformed.
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
        """The counts so far."""
        by_domain = list(self.by_domain.items())
        unwanted = list(self.unwanted.items())
        return MalformedRecord(self.lines, self.count, by_domain, list(self._first), unwanted)

    def add_record(self, record: MalformedRecord) -> None:
        """Add the counts of lines that come after these."""
        self.lines += record.lines
        self.count += record.count
        self.by_domain.update(dict(record.by_domain))
        self.unwanted.update(dict(record.unwanted))
        self._first += record.first[: LINES_SHOWN - len(self._first)]

    def describe(self) -> str:
        """One line with the count and the first locations."""
        more = f"; and {self.count - LINES_SHOWN} more" if self.count > LINES_SHOWN else ""
        return f"{self.count} of {self.lines} lines are malformed: {'; '.join(self._first)}{more}"

    def describe_unwanted(self) -> str:
        """One line with number and domains of the excluded documents; '' if none."""
        return describe_left_out(self.unwanted, "documents") if self.unwanted else ""

    def check(self, max_share: float) -> None:
        """Raise UserError if more than ``max_share`` of the lines are malformed."""
        if self.count > max_share * self.lines:
            raise UserError(
                f"{self.describe()}; this exceeds --max-malformed-share {max_share:g}: correct "
                "them, or allow a larger share"
            )


class KeyCheck:
    """Distinguish a key that a file never has from one that some of its lines lack."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lines_without = 0
        self._last: MissingKeyError | None = None
        self._any_document = False

    def found(self) -> None:
        """Record that a line of the file is a document."""
        self._any_document = True

    def failed(self, problem: MalformedLineError) -> None:
        """Record a malformed line. Raises UserError if the file begins with too many of them."""
        if isinstance(problem, MissingKeyError):
            self._last = problem
            self._lines_without += 1
            if self._lines_without >= LINES_BEFORE_GIVING_UP:
                self.check()

    def check(self) -> None:
        """Raise UserError, listing the keys that exist, if no line so far was a document."""
        if self._last is not None and not self._any_document:
            raise UserError(
                f"{self._name}: no line has the key '{self._last.key}'; existing keys: "
                f"{', '.join(self._last.present) or '(none)'}; correct {self._last.flag}"
            )


class DomainNames:
    """Rename the domains of a source.

    Attributes:
        renamed: the OLD of ``--rename-domain OLD=NEW`` that have occurred so far.
    """

    def __init__(self, options: DomainOptions) -> None:
        self._table = options.rename_table
        self.renamed: set[str] = set()

    def final(self, name: str) -> str | None:
        """The domain for the source's ``name``, None if its text is left out."""
        if name in self._table:
            self.renamed.add(name)
            return self._table[name]
        return self._table.get(ALL_OTHERS, name)


def describe_unused(options: DomainOptions, renamed: Collection[str]) -> str:
    """One line with the OLD names not in ``renamed``, except '*'; '' if none."""
    unused = [name for name in options.rename_table if name not in {*renamed, ALL_OTHERS}]
    return f"--rename-domain: no domain is called {_listed(unused)}" if unused else ""


def describe_left_out(counts: Mapping[str, int], what: str) -> str:
    """Number of documents or files (``what``) left out and their domains, on one line."""
    return f"--rename-domain leaves out {sum(counts.values()):,} {what}, of {_listed(counts)}"


def _listed(names: Collection[str]) -> str:
    shown = [f"'{name}'" for name in list(names)[:_NAMES_SHOWN]]
    more = [f"{len(names) - _NAMES_SHOWN} more"] if len(names) > _NAMES_SHOWN else []
    return ", ".join(shown + more)


class DocumentMaker:
    """Turn the records of one source into documents.

    :meth:`from_record` is the reference. The other methods convert many at once, far faster, and
    return None where any of them is unusual: :meth:`from_record` then determines the result.

    Attributes:
        keys: flag -> key, of the values that a record must have.
        max_bytes: upper limit per document.

    Args:
        domain: of all documents of the source; None if each record names its own.
        split: of all documents of the source; None if their texts decide.
        options: the text to read.
        domain_key: key of the domain's name, None if domains are not requested.
        names: renames domains.
        unwanted: counts documents of domains that are left out, by the source's name.
    """

    def __init__(
        self,
        domain: str | None,
        split: Split | None,
        options: SourceOptions,
        domain_key: str | None,
        names: DomainNames | None,
        unwanted: Counter[str],
    ) -> None:
        self.max_bytes = options.max_document_bytes
        self._domain = domain
        self._split = split
        self._text_key = options.text_key
        self._names = names
        self._domain_key = domain_key if domain is None else None
        self._final: dict[str, str | None] = {}
        self._unwanted = unwanted
        self.keys = {TEXT_FLAG: options.text_key}
        if self._domain_key is not None:
            self.keys[DOMAIN_FLAG] = self._domain_key

    def from_record(self, record: dict[str, Any]) -> Document | None:
        """The document in ``record``, None if its domain is to be left out.

        Raises:
            MalformedLineError: if there is none.
        """
        text = text_at(record, self._text_key, TEXT_FLAG)
        if self._may_be_too_long(text) and (length := len(text.encode())) > self.max_bytes:
            raise MalformedLineError(
                f"has {length:,} bytes of text, more than --max-document-bytes"
            )
        if self._domain_key is None:
            return Document(self._domain or "", text, self._split)
        name = text_at(record, self._domain_key, DOMAIN_FLAG)
        if not is_domain_name(name):
            raise MalformedLineError(
                f"has {len(name.encode())} bytes of domain name at '{self._domain_key}', not 1 to "
                f"{MAX_DOMAIN_BYTES}"
            )
        domain = self._final_name(name)
        if domain is None:
            self._unwanted[name] += 1
            return None
        return Document(domain, text, self._split)

    def from_lines(self, lines: Sequence[Line]) -> list[Document] | None:
        """The documents in ``lines`` of JSON, or None."""
        text_of = _value_getter(self._text_key)
        loads: Callable[[Any], Any] = orjson.loads  # which rejects a LineTooLong as invalid JSON
        try:
            if self._domain_key is None:
                return self.from_strings([text_of(loads(line)) for line in lines])
            name_of = _value_getter(self._domain_key)
            records = [loads(line) for line in lines]
            texts = [text_of(record) for record in records]
            return self.from_strings(texts, [name_of(record) for record in records])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None

    def from_strings(
        self, texts: Sequence[Any], names: Sequence[Any] | None = None
    ) -> list[Document] | None:
        """The documents of ``texts`` and of the ``names`` of their domains, or None."""
        if not set(map(type, texts)) <= {str} or any(map(self._may_be_too_long, texts)):
            return None
        split = self._split
        if names is None:
            same = self._domain or ""
            return [Document(same, text, split) for text in texts]
        if not set(map(type, names)) <= {str} or not all(map(is_domain_name, set(names))):
            return None
        for name in set(names):
            self._final.setdefault(name, self._final_name(name))
        final = self._final
        documents = [
            Document(domain, text, split)
            for text, name in zip(texts, names, strict=True)
            if (domain := final[name]) is not None
        ]
        if len(documents) < len(texts):
            self._unwanted.update(name for name in names if final[name] is None)
        return documents

    def _may_be_too_long(self, text: str) -> bool:
        return len(text) > self.max_bytes // _LONGEST_CHARACTER

    def _final_name(self, name: str) -> str | None:
        assert self._names is not None, "domains have a key only where they are requested"
        return self._names.final(name)


def object_in(line: Line) -> dict[str, Any]:
    """The JSON object in ``line``.

    Raises:
        MalformedLineError: naming the actual content.
        UserError: if memory runs out.
    """
    if isinstance(line, LineTooLong):
        raise MalformedLineError(f"has {len(line):,} bytes, more than --max-document-bytes")
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if "Not enough memory" in error.msg:  # whether it is malformed must not depend on that
            raise UserError(
                f"not enough memory to read a line of {len(line):,} bytes; use a smaller "
                "--max-document-bytes"
            ) from error
        _decoded(line)  # raises if this is the reason
        raise MalformedLineError(f"is not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(record, dict):
        raise MalformedLineError(f"is not a JSON object but {_kind(record)}")
    return record


def text_at(record: dict[str, Any], key: str, flag: str) -> str:
    """The text at ``key``, a path with dots; null is an empty text.

    Raises:
        MissingKeyError: if there is no such key; ``flag`` requested it.
        MalformedLineError: if the value is of another type.
    """
    value = _value_at(record, key)
    if value is _MISSING:
        raise MissingKeyError(flag, key, _keys_of(record)[:_KEYS_SHOWN])
    if value is None:
        return ""
    if isinstance(value, bytes):  # a column of a table that is not marked as text
        return _decoded(value)
    if not isinstance(value, str):
        raise MalformedLineError(f"has {_kind(value)} at '{key}', not a string")
    return value


def _value_getter(key: str) -> Callable[[Any], Any]:
    """Return a fast getter of the value at ``key`` of a regular record.

    It raises KeyError, TypeError or AttributeError, or returns a non-string, for records that need
    :func:`text_at`.
    """
    if "." not in key:
        return operator.itemgetter(key)
    return lambda record: _value_at(record, key)


def _decoded(value: bytes | bytearray) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as invalid:
        raise MalformedLineError(f"is not valid UTF-8 at byte {invalid.start + 1}") from None


def _value_at(record: dict[str, Any], key: str) -> Any:
    """The value at ``key``: a key of that name or, if there is none, a path with dots."""
    if key in record:
        return record[key]
    first, dot, rest = key.partition(".")
    inside = _parsed(record.get(first)) if dot else None
    return _value_at(inside, rest) if isinstance(inside, dict) else _MISSING


def _parsed(value: Any) -> Any:
    """An object that is written as a JSON string, parsed; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def _keys_of(record: dict[str, Any], prefix: str = "") -> list[str]:
    """Every possible key, nested ones with dots."""
    keys = []
    for key, value in record.items():
        keys.append(prefix + key)
        inside = _parsed(value)
        if isinstance(inside, dict):
            keys += _keys_of(inside, f"{prefix}{key}.")
    return keys


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}.get(
        type(value), "a number"
    )
