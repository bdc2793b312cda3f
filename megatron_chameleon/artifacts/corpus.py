"""The corpus: tokenized text per domain and split, in Megatron's .bin/.idx format."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json
from megatron_chameleon.artifacts.object_cache import HINT, cached_file
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import (
    Count,
    HashedFiles,
    HashedFolderRecord,
    InnerPath,
    Positive,
    require_inner_path,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.storage import Location, file_state, location, read_ranges, reading

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

# Bytes of .bin or .idx per checksum. Blocks are small, since a sample reads a few KiB at a random
# position and verifies every block that it touches.
BLOCK_BYTES = 1 << 14

# Number and size of the evenly spaced blocks that are hashed if the .bin of an imported file is
# larger than 16 MiB. Hashing them takes a second or two even on network storage.
HASHED_BLOCKS, HASHED_BLOCK_BYTES = 1024, 1 << 14

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
    """One pair of .bin/.idx files, or a range of the sequences of an imported pair.

    Attributes:
        prefix: path of the files without suffix, relative to the corpus folder; an absolute path
            or a URL if the files are imported.
        documents: number of documents.
        tokens: number of tokens, including the end-of-document token of every document.
        text_bytes: UTF-8 bytes of the text, for losses per byte; None if they were not counted.
        sha256: hash of .bin and .idx, concatenated; of imported files, the hash of the file's
            identity (:attr:`ImportedFile.sha256`) and the range, from :func:`hash_range`.
        block_checksums: hash of PREFIX.xxh3, which holds a checksum for each block of .bin and
            .idx; None if there is no such file.
        sequences: first sequence and one past the last sequence; None for all sequences, one per
            document.
    """

    prefix: str
    documents: Count
    tokens: Count
    text_bytes: Count | None
    sha256: str
    block_checksums: str | None = None
    sequences: tuple[Count, Count] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a path outside of the corpus, unless the files are imported."""
        if self.sequences is None:
            require_inner_path(self.prefix)
        elif self.sequences[0] > self.sequences[1]:
            raise ValueError(f"sequences {self.sequences} are not a range")


@dataclasses.dataclass(frozen=True)
class ImportedFile:
    """An existing pair of .bin/.idx files, of which each split of a domain is a range.

    Attributes:
        split: Megatron's ``--split``, which determines the ranges.
        bin_bytes: bytes of the .bin.
        idx_bytes: bytes of the .idx.
        sha256: identity of the files, from :func:`hash_token_file`.
    """

    split: str
    bin_bytes: Count
    idx_bytes: Count
    sha256: str


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
class Repeats:
    """A domain's documents that repeat an earlier document of it.

    Attributes:
        documents: number of documents that were compared. They include the duplicates that were not
            written.
        tokens: number of their tokens.
        exact_documents: documents that repeat an earlier one exactly.
        exact_tokens: number of their tokens.
        near_documents: other documents that nearly repeat an earlier one; None if not counted.
        near_tokens: number of their tokens.
    """

    documents: Count
    tokens: Count
    exact_documents: Count
    exact_tokens: Count
    near_documents: Count | None = None
    near_tokens: Count | None = None

    def kinds(self) -> list[tuple[str, int, int]]:
        """(kind, documents, tokens) for each kind of repetition that was counted."""
        found = [("exact", self.exact_documents, self.exact_tokens)]
        if self.near_documents is not None:
            found.append(("near", self.near_documents, self.near_tokens or 0))
        return found


@dataclasses.dataclass(frozen=True)
class Domain:
    """The three splits of a domain; no document is in two of them.

    Splits of imported files have no sequence in common, as in Megatron; a document of several
    sequences may be divided between two of them. ``imported`` describes the files of an imported
    domain; None if the corpus holds the files.
    """

    train: DomainSplit
    valid: DomainSplit
    test: DomainSplit
    imported: ImportedFile | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raise ValueError unless either all splits are ranges of an imported file or none is."""
        for name in SPLITS:
            if (self.split(name).sequences is None) != (self.imported is None):
                raise ValueError(f"{name}.sequences and imported contradict each other")

    def split(self, name: Split) -> DomainSplit:
        """The split called ``name``."""
        split: DomainSplit = getattr(self, name)
        return split


@dataclasses.dataclass(frozen=True)
class Corpus(HashedFolderRecord):
    """The contents of ``corpus.json``; ``root`` is its folder.

    Attributes:
        tokenizer: tokenizer of the tokens.
        dtype: integer type of a token on disk.
        domains: the domains to train on, in the order in which every weight vector lists them.
        not_written: domain -> counts of documents and lines that were left out.
        held_out: domains that are validated, evaluated and embedded, but never trained on. Their
            train splits are empty.
        max_tokens: for a subset, domain -> train tokens that were wanted; a domain has fewer if its
            text ended before.
        repeats: domain -> repeated documents; empty if not counted.
    """

    KIND = "corpus"
    FILE_NAME = "corpus.json"
    MADE_BY = "megatron-chameleon preprocess_data or import_corpus writes it"
    RESTORE = "restore it, or preprocess or import the data again"

    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "int32"]
    domains: dict[str, Domain]
    provenance: Provenance
    cost: Cost
    not_written: dict[str, NotWritten] = dataclasses.field(default_factory=dict)
    held_out: dict[str, Domain] = dataclasses.field(default_factory=dict)
    max_tokens: dict[str, Count] = dataclasses.field(default_factory=dict)
    repeats: dict[str, Repeats] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for a held-out domain that has training text or a name of another."""
        for name, domain in self.held_out.items():
            if name in self.domains:
                raise ValueError(f"{name!r} is in domains and in held_out")
            if domain.train.documents or domain.train.tokens:
                raise ValueError(f"held_out domain {name!r} has training text")

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
        """Names of the domains to train on, in the order in which every weight vector lists them.

        The names in ``held_out`` are not among them.
        """
        return list(self.domains)

    @functools.cached_property
    def all_domains(self) -> Mapping[str, Domain]:
        """The domains to train on, followed by the held-out domains."""
        return {**self.domains, **self.held_out}

    @property
    def train_tokens(self) -> dict[str, int]:
        """Domain -> tokens of its train split."""
        return {name: domain.train.tokens for name, domain in self.domains.items()}

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the tokenizer and of every token file; independent of the folder."""
        body: dict[str, object] = {
            "tokenizer": self.tokenizer.sha256,
            # A list, since the order of the domains decides the order of samples.
            "domains": [[name, self.domain_hash(name)] for name in self.names],
        }
        if self.held_out:
            body["held_out"] = [[name, self.domain_hash(name)] for name in self.held_out]
        return sha256_of_json(body)

    def domain_hash(self, name: str) -> str:
        """Hex SHA-256 of one domain's token files."""
        domain = self.all_domains[name]
        return sha256_of_json({split: domain.split(split).sha256 for split in SPLITS})

    def prefix(self, name: str, split: Split) -> Location:
        """Path or URL of the split's files without the .bin/.idx suffix."""
        found = location(self.all_domains[name].split(split).prefix)
        return self.root / found if isinstance(found, Path) else found

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on disk."""
        return {"uint16": 2, "int32": 4}[self.dtype]

    def hashed_files(self) -> list[HashedFiles]:
        """The .bin and .idx of each split with their block checksums, and imported files."""
        found: list[HashedFiles] = []
        for name, domain in self.all_domains.items():
            if (file := domain.imported) is not None:
                prefix = self.prefix(name, "train")
                sizes = {
                    location(f"{prefix}.idx"): file.idx_bytes,
                    location(f"{prefix}.bin"): file.bin_bytes,
                }
                found.append(SampledFiles(sizes, file.sha256, prefix))
                continue
            for split_name in SPLITS:
                split, prefix = domain.split(split_name), self.prefix(name, split_name)
                size = split.tokens * self.token_bytes
                index_size = index_file_bytes(split.documents)
                pair: dict[Location, int] = {
                    Path(f"{prefix}.bin"): size,
                    Path(f"{prefix}.idx"): index_size,
                }
                found.append(HashedFiles(pair, split.sha256))
                if split.block_checksums is not None:
                    checksums_size = 8 * (num_blocks(size) + num_blocks(index_size))
                    checksums: dict[Location, int] = {Path(f"{prefix}.xxh3"): checksums_size}
                    found.append(HashedFiles(checksums, split.block_checksums))
        return found


@dataclasses.dataclass(frozen=True)
class SampledFiles(HashedFiles):
    """A pair of .bin/.idx files, identified by :func:`hash_token_file`.

    Attributes:
        prefix: path or URL of the files, without suffix.
    """

    prefix: Location

    @property
    def bytes(self) -> int:
        """Number of bytes that :meth:`digest` reads."""
        index, tokens = self.sizes.values()
        return index + min(tokens, HASHED_BLOCKS * HASHED_BLOCK_BYTES)

    def digest(self, on_bytes: Callable[[int], object] | None = None) -> str:
        """Compute the identity; ``on_bytes`` is called with the number of bytes just read."""
        found = hash_token_file(self.prefix)
        if on_bytes:
            on_bytes(self.bytes)
        return found


def hash_range(file_sha256: str, first: int, stop: int) -> str:
    """Hex SHA-256 of the sequences ``first`` to ``stop`` - 1 of an imported file."""
    return sha256_of_json({"file": file_sha256, "sequences": [first, stop]})


def hash_token_file(prefix: Location, cache: Path | None = None) -> str:
    """Hex SHA-256 of a pair of files: the whole .idx, and blocks of the .bin.

    A .bin of up to 16 MiB is hashed completely. For a larger .bin, the hash covers its size and 16
    MiB of evenly spaced blocks, including the first and the last one. The hash of remote files is
    that of the same local files.

    Args:
        prefix: path or URL of the files, without suffix.
        cache: folder of the local copy of a remote .idx; None for the default folder.
    """
    index, bin_path = location(f"{prefix}.idx"), location(f"{prefix}.bin")
    index = index if isinstance(index, Path) else cached_file(index, cache)
    with reading(bin_path, HINT):
        size = file_state(bin_path).bytes
    digest = hashlib.sha256(f"{sha256_of_files(index)} {size} ".encode())
    places: Iterable[int] = range(0, size, HASHED_BLOCK_BYTES)
    if size > HASHED_BLOCKS * HASHED_BLOCK_BYTES:
        last, intervals = size - HASHED_BLOCK_BYTES, HASHED_BLOCKS - 1
        places = (last * block // intervals for block in range(HASHED_BLOCKS))
    ranges = [(place, min(place + HASHED_BLOCK_BYTES, size)) for place in places]
    with reading(bin_path, HINT):
        for block in read_ranges(bin_path, ranges):
            digest.update(block)
    return digest.hexdigest()


def table_label(name: str, held_out: Container[str]) -> str:
    """Name of a domain in tables, which mark the domains in ``held_out``."""
    return f"{name} (held-out)" if name in held_out else name


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
