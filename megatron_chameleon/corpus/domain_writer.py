"""The domains while they are written: three splits each, and what was counted on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Domain, DomainSplit, Split
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.corpus.folder import TOKENS_NAME
from megatron_chameleon.corpus.indexed import IndexedWriter, TokenType
from megatron_chameleon.corpus.split import split_of, text_digest
from megatron_chameleon.errors import UserError

# Megatron's blended index numbers the domains in int16.
MAX_DOMAINS = 32_767


class DomainWriter:
    """Sends the documents of one domain to its train, valid and test files.

    Exact duplicates are told by a digest of 16 bytes per document, which is what grows in memory:
    about 100 bytes a document.

    Attributes:
        duplicates: documents whose text came before in this domain.
        empty: documents without text, which are left out.
        text_bytes: UTF-8 bytes of the text written, per split.

    Args:
        folder: the corpus folder (or where it is prepared).
        file_name: what the domain's files are called.
        dtype: integer type of a token on disk.
        shares: of train, valid and test.
        drop_duplicates: whether duplicates are left out.
    """

    def __init__(
        self,
        folder: Path,
        file_name: str,
        dtype: TokenType,
        shares: tuple[float, float, float],
        drop_duplicates: bool,
    ) -> None:
        self._prefixes = {name: f"{TOKENS_NAME}/{file_name}-{name}" for name in SPLITS}
        self._writers = {
            name: IndexedWriter(folder / prefix, dtype) for name, prefix in self._prefixes.items()
        }
        self._shares = shares
        self._drop_duplicates = drop_duplicates
        self._seen: set[bytes] = set()
        self.duplicates = 0
        self.empty = 0
        self.text_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)

    def admit(self, text: str) -> Split | None:
        """The split that ``text`` goes to, or None if it is empty or a duplicate to be dropped."""
        if not text:
            self.empty += 1
            return None
        encoded = text.encode("utf-8")
        digest = text_digest(encoded)
        if digest in self._seen:
            self.duplicates += 1
            if self._drop_duplicates:
                return None
        self._seen.add(digest)
        split = split_of(digest, self._shares)
        self.text_bytes[split] += len(encoded)
        return split

    def add(self, split: Split, tokens: NDArray[np.int32]) -> None:
        """Write the tokens [num_tokens] of a text that was admitted to ``split``."""
        self._writers[split].add(tokens)

    def documents(self, split: Split) -> int:
        """Documents written to ``split`` so far."""
        return self._writers[split].documents

    def tokens(self, split: Split) -> int:
        """Tokens written to ``split`` so far, end-of-document tokens included."""
        return self._writers[split].tokens

    def finish(self) -> Domain:
        """Close the files and say what is in them."""
        return Domain(**{name: self._finished(name) for name in SPLITS})

    def _finished(self, name: Split) -> DomainSplit:
        writer = self._writers[name]
        return DomainSplit(
            prefix=self._prefixes[name],
            documents=writer.documents,
            tokens=writer.tokens,
            text_bytes=self.text_bytes[name],
            sha256=writer.finish(),
        )


class DomainWriters:
    """The writers of all domains, made as their names come up.

    Args:
        folder: the corpus folder (or where it is prepared).
        dtype: integer type of a token on disk.
        shares: of train, valid and test.
        drop_duplicates: whether duplicates within a domain are left out.
    """

    def __init__(
        self,
        folder: Path,
        dtype: TokenType,
        shares: tuple[float, float, float],
        drop_duplicates: bool,
    ) -> None:
        (folder / TOKENS_NAME).mkdir()
        self._folder = folder
        self._dtype = dtype
        self._shares = shares
        self._drop_duplicates = drop_duplicates
        self._writers: dict[str, DomainWriter] = {}

    def of(self, name: str) -> DomainWriter:
        """The writer of domain ``name``.

        Raises:
            UserError: if it is one domain too many.
        """
        if name not in self._writers:
            self._writers[name] = self._new(name)
        return self._writers[name]

    def items(self) -> Iterator[tuple[str, DomainWriter]]:
        """Name and writer of each domain, in the order of their first mention."""
        yield from self._writers.items()

    def _new(self, name: str) -> DomainWriter:
        if len(self._writers) == MAX_DOMAINS:
            raise UserError(
                f"there are more than {MAX_DOMAINS} domains, '{name}' among them; "
                "is --domain-key the right one?"
            )
        return DomainWriter(
            self._folder, file_name_of(name), self._dtype, self._shares, self._drop_duplicates
        )
