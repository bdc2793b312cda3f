"""One text with its domain and split, and how it is taken out of a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson

from megatron_chameleon.artifacts import Split
from megatron_chameleon.corpus.reading.domain_names import (
    MAX_DOMAIN_BYTES,
    DomainNames,
    is_domain_name,
)
from megatron_chameleon.corpus.reading.lines import Line
from megatron_chameleon.corpus.reading.malformed import MalformedLineError
from megatron_chameleon.corpus.reading.record_values import text_at, value_getter
from megatron_chameleon.corpus.reading.sources import Source
from megatron_chameleon.options.source import SourceOptions

_LONGEST_CHARACTER = 4  # bytes in UTF-8
TEXT_FLAG, DOMAIN_FLAG = "--text-key", "--domain-key"


class Document(NamedTuple):
    """One text; ``domain`` is empty where none was asked for, ``split`` None where none is set."""

    domain: str
    text: str
    split: Split | None = None


class DocumentMaker:
    """Makes documents of the records of one source.

    :meth:`from_record` is the plain way. The others make many at once, far faster, and give None
    where any of them is not as plain as could be: the plain way then tells what it is.

    Attributes:
        keys: flag -> key, of the values that a record is to have.
        max_bytes: of a document.

    Args:
        source: what the records are of.
        options: which text.
        names: how domains are told, None if they are not asked for.
        unwanted: counts documents of domains that are left out, by the source's name.
    """

    def __init__(
        self,
        source: Source,
        options: SourceOptions,
        names: DomainNames | None,
        unwanted: Counter[str],
    ) -> None:
        self.max_bytes = options.max_document_bytes
        self._source = source
        self._text_key = options.text_key
        self._names = names
        # None where the domain is the same for all.
        self._domain_key = names.key if names and source.domain is None else None
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
            return Document(self._source.domain or "", text, self._source.split)
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
        return Document(domain, text, self._source.split)

    def from_lines(self, lines: Sequence[Line]) -> list[Document] | None:
        """The documents in ``lines`` of JSON, or None."""
        text_of = value_getter(self._text_key)
        loads: Callable[[Any], Any] = orjson.loads  # which refuses a LineTooLong as no JSON
        try:
            if self._domain_key is None:
                return self.from_strings([text_of(loads(line)) for line in lines])
            name_of = value_getter(self._domain_key)
            records = [loads(line) for line in lines]
            texts = [text_of(record) for record in records]
            return self.from_strings(texts, [name_of(record) for record in records])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return None

    def from_strings(
        self, texts: Sequence[Any], names: Sequence[Any] | None = None
    ) -> list[Document] | None:
        """The documents of ``texts`` and of their ``names`` of domains, or None."""
        if not set(map(type, texts)) <= {str} or any(map(self._may_be_too_long, texts)):
            return None
        split = self._source.split
        if names is None:
            same = self._source.domain or ""
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
        assert self._names is not None, "only where domains are asked for is there a key of theirs"
        return self._names.final(name)
