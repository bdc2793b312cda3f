"""From the pieces of one shard to its folder: documents are read, split, tokenised, written."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import SPLITS, Stopwatch
from megatron_chameleon.corpus.reading.documents import Document
from megatron_chameleon.corpus.reading.readers import DocumentReader
from megatron_chameleon.corpus.shards.plan import Plan
from megatron_chameleon.corpus.shards.read_ahead import quick_turns, read_ahead
from megatron_chameleon.corpus.shards.shard import (
    DOCUMENT,
    Shard,
    ShardWriter,
    domain_number,
)
from megatron_chameleon.corpus.split import parse_split, splits_of, text_digest
from megatron_chameleon.corpus.tokenization.tokenizer import Tokenizer
from megatron_chameleon.options.preprocess import PreprocessOptions

# Enough text to keep an encoder busy, little enough to hold with its encodings.
_BATCH_CHARACTERS = 2_000_000
_BATCH_DOCUMENTS = 1 << 14
# A batch that waits while another is encoded; more would only take memory.
_BATCHES_AHEAD = 1
# Tokens, documents and digests, as ShardWriter.add takes them.
_Encoded = tuple[NDArray[np.integer], NDArray[np.void], NDArray[np.uint64]]
_SPLIT_NUMBERS = {name: number for number, name in enumerate(SPLITS)}


class Batch(NamedTuple):
    """Documents that are ready to be encoded, those of one domain and split side by side.

    ``documents`` are DOCUMENT records [num_documents] whose tokens are not counted yet, and
    ``digests`` [num_documents, 2] uint64 the halves of the texts' digests.
    """

    texts: list[str]
    documents: NDArray[np.void]
    digests: NDArray[np.uint64]


class ShardMaker:
    """Makes shards of ``plan``, one after another.

    Args:
        options: of the run.
        plan: which pieces there are, of sources as they are now.
        plan_hash: what the shards say of whose plan they are.
        tokenizer: text in, token ids out.
    """

    def __init__(
        self, options: PreprocessOptions, plan: Plan, plan_hash: str, tokenizer: Tokenizer
    ) -> None:
        self._options = options
        self._plan = plan
        self._plan_hash = plan_hash
        self._tokenizer = tokenizer

    def make(self, number: int, folder: Path, on_bytes: Callable[[int], object]) -> None:
        """Write shard ``number`` into ``folder``, which is there and empty.

        Raises:
            UserError: if a source cannot be read or has changed, or the disk is full.
        """
        stopwatch = Stopwatch()
        dtype = self._tokenizer.token_type
        options, plan = self._options, self._plan
        reader = DocumentReader(options.source, plan.sources, options.domains, on_bytes)
        pieces = plan.shards[number]
        batches = _Batches(self._read(reader, number), parse_split(options.split))
        writer = ShardWriter(folder, dtype, apart=len(plan.shards) == 1)
        empty: Counter[int] = Counter()  # the reading thread counts its own
        with (
            quick_turns(),
            contextlib.closing(read_ahead(batches, _BATCHES_AHEAD)) as ready,
            concurrent.futures.ThreadPoolExecutor(1, "write") as pool,
        ):
            written = pool.submit(lambda: None)
            for batch in ready:
                encoded = self._encode(batch, empty)
                written.result()  # so that no more than one batch waits
                written = pool.submit(writer.add, *encoded)
            written.result()
        writer.finish()
        empty.update(batches.empty)
        Shard(
            root=folder,
            plan=self._plan_hash,
            dtype=dtype,
            domains=list(batches.domains),
            empty=[empty[number] for number in batches.domains.values()],
            documents=writer.documents,
            tokens=writer.tokens,
            runs=writer.runs,
            copies=writer.copies,
            hashes=[reader.hashes[piece] for piece in pieces],
            checksums=writer.checksums,
            malformed=reader.malformed.record,
            seconds=stopwatch.seconds(),
            parts=writer.parts,
            renamed=sorted(reader.renamed),
        ).save()

    def _read(self, reader: DocumentReader, number: int) -> Iterator[Document]:
        for piece in self._plan.shards[number]:
            yield from reader.read(piece)

    def _encode(self, batch: Batch, empty: Counter[int]) -> _Encoded:
        """What the writer is given; documents without a token of their text are counted."""
        tokens, lengths = self._tokenizer.encode_documents(batch.texts)
        documents, digests = batch.documents, batch.digests
        documents["tokens"] = lengths
        kept = lengths > 1  # all have an end-of-document token
        if kept.all():
            return tokens, documents, digests
        empty.update(documents["domain"][~kept].tolist())
        return tokens[np.repeat(kept, lengths)], documents[kept], digests[kept]


class _Batches:
    """Gathers documents to batches; iterate once.

    Attributes:
        domains: name -> number, in the order of their first mention.
        empty: documents without text, by the domain's number.
    """

    def __init__(self, documents: Iterable[Document], shares: tuple[float, float, float]) -> None:
        self._documents = documents
        self._shares = shares
        self.domains: dict[str, int] = {}
        self.empty: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Batch]:
        waiting: list[Document] = []
        characters = 0
        for document in self._documents:
            if not document.text:
                self.empty[domain_number(self.domains, document.domain)] += 1
                continue
            waiting.append(document)
            characters += len(document.text)
            if characters >= _BATCH_CHARACTERS or len(waiting) == _BATCH_DOCUMENTS:
                del document
                yield self._batch(waiting)
                waiting, characters = [], 0
        if waiting:
            yield self._batch(waiting)

    def _batch(self, waiting: list[Document]) -> Batch:
        names, texts, splits = zip(*waiting, strict=True)
        heads, sizes = [], []
        for text in texts:  # one at a time: a text may be most of the memory
            encoded = text.encode()
            heads.append(text_digest(encoded))
            sizes.append(len(encoded))
        digests = np.frombuffer(b"".join(heads), ">u8").reshape(-1, 2).astype(np.uint64)
        documents = np.zeros(len(texts), DOCUMENT)
        documents["text_bytes"] = sizes
        documents["domain"] = [domain_number(self.domains, name) for name in names]
        documents["split"] = splits_of(digests[:, 0], self._shares)
        if any(splits):
            given = np.array([-1 if split is None else _SPLIT_NUMBERS[split] for split in splits])
            documents["given"] = given >= 0
            documents["split"] = np.where(given >= 0, given, documents["split"])
        order = np.lexsort((documents["split"], documents["domain"]))
        ordered = [texts[position] for position in order.tolist()]
        return Batch(ordered, documents[order], digests[order])
