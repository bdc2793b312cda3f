"""The text that MixMin reads: samples of the domains, and the documents of the target."""

from __future__ import annotations

import dataclasses
import functools
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.corpus import file_name_of
from megatron_chameleon.artifacts.files import replacing, sha256_of_json, writing
from megatron_chameleon.corpus import domains
from megatron_chameleon.corpus.indexed import TokenFile, in_memory
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.sample import sample_documents
from megatron_chameleon.corpus.sources import Source, source_identity
from megatron_chameleon.corpus.target import CHARACTERS_PER_TOKEN, SAMPLED_DOCUMENTS
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.gold_answers import GoldAnswer
from megatron_chameleon.methods.output import warn
from megatron_chameleon.mixture.ngram import Ids

# Places of a corpus's domain from which its sample is taken.
PLACES = 64
ENCODED_TOGETHER = 64
# One of so many sampled documents is held out if a domain of raw text is part of the target.
HELD_OUT_EVERY = 20
# Long documents of the target are divided into blocks, of which some are chosen.
BLOCK_TOKENS = 2048
# A target of fewer documents is divided into blocks that take the role of documents.
FEWEST_DOCUMENTS, SMALL_BLOCK_TOKENS = 10, 256


class TextCoder(Protocol):
    """A tokenizer that encodes whole documents, and decodes ids."""

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of everything that determines the ids."""

    @property
    def vocab_size(self) -> int:
        """The largest id plus one."""

    @property
    def eod_id(self) -> int:
        """Id of the end-of-document token."""

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        """Encode texts: their concatenated tokens, and the number of tokens of each, at least 1."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text."""


class ByteCoder:
    """The bytes of UTF-8 as tokens; id 256 ends a document."""

    sha256 = sha256_of_json("bytes")
    vocab_size, eod_id = 257, 256

    def encode_documents(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        """Encode texts, each followed by the end of the document."""
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int32, len(encoded)) + np.int32(1)
        tokens = np.full(int(lengths.sum(dtype=np.int64)), 256, np.uint16)
        is_text = np.ones(len(tokens), np.bool_)
        is_text[np.cumsum(lengths, dtype=np.int64) - 1] = False
        tokens[is_text] = np.frombuffer(b"".join(encoded), np.uint8)
        return tokens, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Decode bytes; bytes that are not UTF-8 become replacement characters."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class CorpusDomains:
    """The domains of a corpus: their training text is sampled, their validation text predicted."""

    corpus: Corpus
    names: list[str]

    @functools.cached_property
    def _opened(self) -> domains.Domains:
        return domains.open_domains(self.corpus)

    @property
    def where(self) -> str:
        """The corpus's folder."""
        return str(self.corpus.root)

    @property
    def sizes(self) -> Mapping[str, float | None]:
        """Domain -> training tokens."""
        return {name: float(self.corpus.domains[name].train.tokens) for name in self.names}

    @property
    def hash(self) -> str:
        """The corpus's hash."""
        return self.corpus.hash

    def sample(self, name: str, most: int) -> TokenFile:
        """Return training text of a domain: all of it, or up to ``most`` tokens at 64 places."""
        file = self._opened.open(name)
        size = file.tokens.size
        if size <= most:
            return file
        places = min(PLACES, most)
        length = most // places
        starts = np.linspace(0, size - length, places).astype(np.int64)
        parts = [file.tokens[start : start + length] for start in starts.tolist()]
        return in_memory(file.prefix, np.concatenate(parts), np.full(places, length, np.int32))

    def held_out(self, name: str) -> TokenFile:
        """Open the validation text of a domain."""
        return self._opened.open(name, "valid")

    def training_text(self, name: str) -> TokenFile:
        """Open the training text of a domain."""
        return self._opened.open(name)


@dataclasses.dataclass(frozen=True)
class RawDomains:
    """Domains of raw text; a sample of each is read once and kept in ``store``.

    Attributes:
        source: options of the text.
        names: the domains to weigh, in the order of ``--input``.
        sources: domain -> its files or shards of data sets, of all domains of ``--input``.
        coder: tokenizer of the samples.
        store: folder of the samples.
        sample_tokens: maximum tokens of a sample.
        seed: seed of the samples.
        targets: domains of the target. Of those to weigh, a part of the sample is held out.
    """

    source: SourceOptions
    names: list[str]
    sources: Mapping[str, Sequence[Source]]
    coder: TextCoder
    store: Path
    sample_tokens: int
    seed: int
    targets: tuple[str, ...]
    where: str = "--input"

    @functools.cached_property
    def sizes(self) -> Mapping[str, float | None]:
        """Domain -> estimated bytes of text, from its sample; None if unknown."""
        return {name: self._read(name)[1] for name in self.names}

    @property
    def hash(self) -> str:
        """Hash of the identities of all domains that are read."""
        names = [*self.names, *(name for name in self.targets if name not in self.names)]
        return sha256_of_json([[name, self._identity(name)] for name in names])

    def sample(self, name: str, most: int) -> TokenFile:
        """Return sampled text of a domain without the documents that are held out."""
        return _part(self._read(name)[0], most, held_out=False, holds_out=name in self.targets)

    def held_out(self, name: str) -> TokenFile:
        """Return the sampled documents that are held out: all of a domain that has no weight."""
        is_weighed = name in self.names
        return _part(
            self._read(name)[0], self.sample_tokens, held_out=is_weighed, holds_out=is_weighed
        )

    def training_text(self, name: str) -> TokenFile:
        """Return the sampled text of a domain."""
        return self.sample(name, self.sample_tokens)

    def _identity(self, name: str) -> str:
        files = [source_identity(source) for source in self.sources[name]]
        options = self.source.text_key, self.source.max_document_bytes
        settings = self.coder.sha256, self.sample_tokens, self.seed
        return sha256_of_json([files, options, settings])

    def _path(self, name: str) -> Path:
        return self.store / f"{file_name_of(name)}.npz"

    def _load(self, name: str) -> tuple[TokenFile, float | None] | None:
        """Return what :meth:`_read` has stored; None if it is missing, damaged or of other text."""
        path = self._path(name)
        try:
            with np.load(path, allow_pickle=False) as stored:
                if str(stored["identity"]) != self._identity(name):
                    return None
                size = float(stored["text_bytes"])
                file = in_memory(path, stored["tokens"], stored["lengths"])
                return file, None if math.isnan(size) else size
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError):
            return None

    def _read(self, name: str) -> tuple[TokenFile, float | None]:
        """Return the sample of a domain, and the bytes of its text; None if unknown."""
        stored = self._load(name)
        if stored is not None:
            return stored
        path = self._path(name)
        characters = self.sample_tokens * CHARACTERS_PER_TOKEN
        sample = sample_documents(
            self.source, self.sources[name], name, SAMPLED_DOCUMENTS, characters, self.seed
        )
        file = in_memory(path, *_encode_up_to(self.coder, sample.texts, self.sample_tokens))
        with writing(path):
            self.store.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("wb") as stream:
            np.savez(
                stream,
                identity=np.array(self._identity(name)),
                tokens=file.tokens[:],
                lengths=file.lengths,
                text_bytes=np.array(math.nan if sample.text_bytes is None else sample.text_bytes),
            )
        return file, sample.text_bytes


Domains = CorpusDomains | RawDomains


def _encode_up_to(
    coder: TextCoder, texts: Sequence[str], most: int
) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
    """Encode documents in random order until they have ``most`` tokens.

    Long documents are truncated to a sixteenth of about ``most`` tokens.
    """
    longest = max(most * CHARACTERS_PER_TOKEN // 16, 1)
    order, tokens, lengths, total = np.random.default_rng(0).permutation(len(texts)), [], [], 0
    for some in np.array_split(order, max(len(order) // ENCODED_TOGETHER, 1)):
        encoded, sizes = coder.encode_documents([texts[number][:longest] for number in some])
        tokens.append(encoded)
        lengths.append(sizes)
        total += len(encoded)
        if total >= most:
            break
    return np.concatenate(tokens), np.concatenate(lengths)


def _part(file: TokenFile, most: int, *, held_out: bool, holds_out: bool) -> TokenFile:
    """Return the held-out documents of a sample, or the other ones, up to ``most`` tokens."""
    numbers = np.arange(len(file))
    is_held_out = numbers % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
    if len(file) < HELD_OUT_EVERY:
        is_held_out = numbers == len(file) - 1
    if not holds_out:
        is_held_out = np.zeros(len(file), np.bool_)
    chosen = np.flatnonzero(is_held_out == held_out)
    if len(chosen) == 0:  # a single document
        raise UserError(
            f"{file.prefix}: a domain of one document cannot be divided; pass --target, or more "
            "documents"
        )
    lengths = file.lengths[chosen]
    chosen = chosen[: int(np.searchsorted(np.cumsum(lengths, dtype=np.int64), most)) + 1]
    tokens = np.concatenate([file.get(int(number)) for number in chosen])[:most]
    lengths = np.diff(np.minimum(np.cumsum(file.lengths[chosen], dtype=np.int64), most), prepend=0)
    return in_memory(file.prefix, tokens, lengths.astype(np.int32))


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Chosen blocks of a target's documents, concatenated.

    Attributes:
        tokens: [n] ids.
        documents: [n] number of the document of each token, ascending from 0 without gaps; a target
            of few documents has blocks in their place.
        starts: [documents] position in ``tokens`` of the first token of each document.
        weights: [n] relative weight of each token in the likelihood; 0 for tokens that are context
            only.
        passages: [p] tokens of each passage: adjacent blocks of a document, or a question with its
            answer.
    """

    tokens: Ids
    documents: NDArray[np.int64]
    weights: NDArray[np.float64]
    passages: NDArray[np.int64]

    @property
    def is_scored(self) -> NDArray[np.bool_]:
        """[n] whether the token has a weight."""
        return self.weights > 0

    @property
    def starts(self) -> NDArray[np.int64]:
        """[documents] position of the first token of each document."""
        return np.flatnonzero(np.diff(self.documents, prepend=-1))


def choose_blocks(file: TokenFile, most: int, seed: int, name: str) -> Blocks:
    """Choose blocks of the documents of ``file`` in random order, up to ``most`` tokens.

    Args:
        file: documents of a target.
        most: maximum number of tokens.
        seed: random seed.
        name: name of the text, for messages.

    Raises:
        UserError: if one document, or block, is chosen.
    """
    filled = np.flatnonzero(file.lengths > 0)
    is_short = len(filled) < FEWEST_DOCUMENTS
    if is_short:
        warn(
            f"--target: '{name}' has {len(filled)} document(s), so blocks of {SMALL_BLOCK_TOKENS} "
            "tokens count as documents, and the intervals may be too narrow"
        )
    # Blocks are so small that several of them fit.
    size = min(SMALL_BLOCK_TOKENS if is_short else BLOCK_TOKENS, max(most // FEWEST_DOCUMENTS, 1))
    counts = -(-file.lengths[filled].astype(np.int64) // size)
    document = np.repeat(filled, counts)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    length = np.minimum(file.lengths[document] - offset, size)
    order = np.random.default_rng(seed).permutation(len(document))
    kept = np.sort(order[: int(np.searchsorted(np.cumsum(length[order]), most, side="right"))])
    if not len(kept):
        kept = order[:1]
    tokens = np.concatenate(
        [file.get(int(document[at]), int(offset[at]), int(length[at])) for at in kept]
    )
    units = np.arange(len(kept)) if is_short else document[kept]
    numbers = np.cumsum(np.diff(units, prepend=units[0]) != 0)
    if numbers[-1] == 0:
        raise UserError(
            f"--target: one document of '{name}' is chosen, but at least two are needed; raise "
            "--target-text-tokens"
        )
    documents = np.repeat(numbers, length[kept])
    follows = (np.diff(document[kept]) == 0) & (np.diff(offset[kept]) == length[kept][:-1])
    passages = np.add.reduceat(length[kept], np.flatnonzero(np.append(True, ~follows)))
    return Blocks(tokens.astype(np.int64), documents, np.ones(len(tokens)), passages)


def answer_blocks(
    answers: Sequence[GoldAnswer],
    coder: TextCoder,
    most: int,
    longest: int,
    seed: int,
    name: str,
) -> Blocks:
    """Encode gold answers of a task with their contexts, of questions in random order.

    Each question is a document, and each answer has a weight of 1, divided among its bytes, as in
    bits per byte. Contexts are encoded as by lm-eval.

    Args:
        answers: answers of the task.
        coder: tokenizer.
        most: maximum number of tokens, contexts included.
        longest: tokens of an answer with its context, which is truncated on the left.
        seed: random seed.
        name: name of the task, for messages.

    Raises:
        UserError: if fewer than two questions are chosen.
    """
    pairs = []
    for answer in answers:
        space = len(answer.context) - len(answer.context.rstrip())
        split = len(answer.context) - space
        pairs.append((answer.context[:split], answer.context[split:] + answer.continuation))
    texts = list(dict.fromkeys(each for c, a in pairs for each in (c, c + a)))
    encoded, lengths = coder.encode_documents(texts)
    ends = np.cumsum(lengths, dtype=np.int64)
    # Each text ends with the end-of-document token, which is not part of it.
    of = {
        text: encoded[end - length : end - 1].astype(np.int64)
        for text, length, end in zip(texts, lengths.tolist(), ends.tolist(), strict=True)
    }
    tokens, weights, total = list[Ids](), list[NDArray[np.float64]](), 0
    for number in np.random.default_rng(seed).permutation(len(answers)).tolist():
        context, whole = (of[each] for each in (pairs[number][0], "".join(pairs[number])))
        is_answer = np.arange(len(whole)) >= len(context)
        if not is_answer.any():  # the tokenizer merges the answer into the context
            continue
        start = max(0, min(len(context), len(whole) - longest))  # the answer is kept whole
        tokens.append(whole[start:])
        weights.append(is_answer[start:] / answers[number].num_bytes)
        total += len(tokens[-1])
        if total >= most:
            break
    if len(tokens) < 2:
        raise UserError(
            f"--target: fewer than two answers of '{name}' are chosen; raise --target-text-tokens, "
            "or pass more questions"
        )
    passages = np.array(list(map(len, tokens)), np.int64)
    documents = np.repeat(np.arange(len(tokens)), passages)
    return Blocks(np.concatenate(tokens), documents, np.concatenate(weights), passages)
