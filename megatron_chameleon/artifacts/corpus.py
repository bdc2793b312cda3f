"""The corpus: tokenized text per domain and split, in Megatron's .bin/.idx format."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import (
    Count,
    HashedFiles,
    HashedFolderRecord,
    InnerPath,
    Positive,
)
from megatron_chameleon.errors import UserError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

# Bytes of .bin or .idx per checksum. Blocks are small, since a sample reads a few KiB at a random
# position and verifies every block that it touches.
BLOCK_BYTES = 1 << 14

# Maximum bytes of a file name without suffixes. File systems allow 255 bytes with suffixes.
MAX_FILE_NAME = 200


@dataclasses.dataclass(frozen=True)
class TokenizerIdentity:
    """The tokenizer that made the tokens. ``file`` is relative to the corpus folder.

    ``pattern`` (a regular expression that splits text into words) and ``special_tokens`` (name ->
    id) are set if the file does not contain them; ``sha256`` covers everything that determines ids.
    """

    kind: Literal["tokenizers", "sentencepiece", "tiktoken"]
    file: InnerPath
    sha256: str
    vocab_size: Positive
    eod_id: Count
    pattern: str | None = None
    special_tokens: dict[str, Count] | None = None


def tokenizer_hash(
    content: bytes, pattern: str | None, special_tokens: Mapping[str, int] | None
) -> str:
    """Hex SHA-256 of everything that determines ids.

    Without a pattern, only ``content`` is hashed.
    """
    sha256 = hashlib.sha256(content).hexdigest()
    if pattern is None:
        return sha256
    special = special_tokens and dict(special_tokens)
    return sha256_of_json({"content": sha256, "pattern": pattern, "special_tokens": special})


@dataclasses.dataclass(frozen=True)
class DomainSplit:
    """One pair of .bin/.idx files. ``prefix`` is relative to the corpus folder, without suffix.

    ``tokens`` counts the end-of-document token of every document; ``text_bytes`` counts the UTF-8
    bytes of the text, for losses per byte. ``sha256`` is the hash of .bin and .idx, concatenated.
    ``block_checksums`` is the hash of PREFIX.xxh3, which holds a checksum for each block of .bin
    and .idx; None in a corpus of an earlier release, which lacks that file.
    """

    prefix: InnerPath
    documents: Count
    tokens: Count
    text_bytes: Count
    sha256: str
    block_checksums: str | None = None


@dataclasses.dataclass(frozen=True)
class NotWritten:
    """Counts of a domain's documents and lines that were not written to its splits.

    Attributes:
        duplicates: documents that repeat a text of the domain; counted also if duplicates are kept.
        held_out: documents left out because their text is in the valid or test split of this or
            another domain.
        empty: documents without text or without tokens.
        malformed: malformed lines, which hold no document.
    """

    duplicates: Count = 0
    held_out: Count = 0
    empty: Count = 0
    malformed: Count = 0


@dataclasses.dataclass(frozen=True)
class Domain:
    """The three splits of a domain; no document is in two of them."""

    train: DomainSplit
    valid: DomainSplit
    test: DomainSplit

    def split(self, name: Split) -> DomainSplit:
        """The split called ``name``."""
        split: DomainSplit = getattr(self, name)
        return split


@dataclasses.dataclass(frozen=True)
class Corpus(HashedFolderRecord):
    """The contents of ``corpus.json``; ``root`` is its folder.

    ``not_written`` maps domains to counts of documents and lines that were left out; it is empty if
    there are none.
    """

    KIND = "corpus"
    FILE_NAME = "corpus.json"
    MADE_BY = "tools/preprocess_data.py writes it"
    RESTORE = "restore it or preprocess again"

    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "int32"]
    domains: dict[str, Domain]
    provenance: Provenance
    cost: Cost
    not_written: dict[str, NotWritten] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Read ``folder/corpus.json``; check its tokenizer and the sizes of its token files.

        The copy of the tokenizer may be missing, since tokens can be used without it.

        Raises:
            UserError: if corpus.json is invalid, or if the tokenizer or a token file does not match
                it; the message names the file and the fix.
        """
        corpus = super().load(folder.parent if folder.name == cls.FILE_NAME else folder)
        if not corpus.domains:
            raise UserError(f"{corpus.root / cls.FILE_NAME}: field domains is empty; {cls.MADE_BY}")
        identity = corpus.tokenizer
        path = corpus.root / identity.file
        if path.is_file():
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}; restore it") from error
            settings = identity.pattern, identity.special_tokens
            if tokenizer_hash(content, *settings) != identity.sha256:
                raise UserError(
                    f"{path} is not the tokenizer that made the corpus (its hash differs from that "
                    f"in {cls.FILE_NAME}); {cls.RESTORE}"
                )
        corpus.check_sizes()
        return corpus

    @property
    def names(self) -> list[str]:
        """Domain names, in the order in which every weight vector lists them."""
        return list(self.domains)

    @property
    def train_tokens(self) -> dict[str, int]:
        """Domain -> tokens of its train split."""
        return {name: domain.train.tokens for name, domain in self.domains.items()}

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the tokenizer and of every token file; independent of the folder."""
        return sha256_of_json(
            {
                "tokenizer": self.tokenizer.sha256,
                # A list, since the order of the domains decides the order of samples.
                "domains": [[name, self.domain_hash(name)] for name in self.names],
            }
        )

    def domain_hash(self, name: str) -> str:
        """Hex SHA-256 of one domain's token files."""
        return sha256_of_json({split: self.domains[name].split(split).sha256 for split in SPLITS})

    def prefix(self, name: str, split: Split) -> Path:
        """Path of the split's files without the .bin/.idx suffix."""
        return self.root / self.domains[name].split(split).prefix

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on disk."""
        return {"uint16": 2, "int32": 4}[self.dtype]

    def hashed_files(self) -> list[HashedFiles]:
        """The .bin and .idx of each split, and their block checksums."""
        found = []
        for name, domain in self.domains.items():
            for split_name in SPLITS:
                split, prefix = domain.split(split_name), self.prefix(name, split_name)
                size = split.tokens * self.token_bytes
                index_size = index_file_bytes(split.documents)
                pair = {Path(f"{prefix}.bin"): size, Path(f"{prefix}.idx"): index_size}
                found.append(HashedFiles(pair, split.sha256))
                if split.block_checksums is not None:
                    checksums_size = 8 * (num_blocks(size) + num_blocks(index_size))
                    checksums = {Path(f"{prefix}.xxh3"): checksums_size}
                    found.append(HashedFiles(checksums, split.block_checksums))
        return found


def file_name_of(domain: str) -> str:
    """A unique file name for any domain name, percent-encoded where necessary.

    It never leads to another folder or to a hidden file.
    """
    name = quote(domain, safe="+-_.,()")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) <= MAX_FILE_NAME:
        return name or "%"
    # percent-encoding yields neither '%-' nor a lone '%', so these names are unique.
    return f"{name[:MAX_FILE_NAME]}%-{sha256_of_json(domain)[:16]}"


def num_blocks(size: int) -> int:
    """Number of checksummed blocks in a file of ``size`` bytes."""
    return -(-size // BLOCK_BYTES)


def index_file_bytes(documents: int) -> int:
    """Bytes of an .idx with one sequence per document: header, lengths, pointers, documents."""
    header = 9 + 8 + 1 + 8 + 8
    return header + 4 * documents + 8 * documents + 8 * (documents + 1)
