"""The text of ``--target``: read, tokenised as the corpus was, and embedded as its domains are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, Cost, EmbeddingRecipe, Stopwatch
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.corpus.input_files import size_and_time
from megatron_chameleon.corpus.records import MalformedLineError, object_in, text_at
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.embedding.embed import drawn_windows, embed_windows, windows_flops
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.progress import progress_bar

TEXT_KEY = "text"
# What the draw of the windows calls it, wherever the file lies.
DRAWN_AS = "--target"


@dataclasses.dataclass(frozen=True)
class EmbeddedTarget:
    """A target text as the proxy sees it."""

    vector: NDArray[np.float64]
    """[h], the mean over its windows."""
    windows: int
    cost: Cost


def read_target(path: Path, corpus: Corpus) -> TokenFile:
    """The tokens of a text: one document of a ``.txt``, one a line of a ``.jsonl``.

    Raises:
        UserError: if it cannot be read, a line is no document, or it has no text.
    """
    try:
        texts = [text for text in _documents(path) if text]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--target {path}: cannot be read as UTF-8 text ({error})") from error
    if not texts:
        raise UserError(f"--target {path}: it holds no text; give one with some documents")
    tokens, lengths = corpus_tokenizer(corpus).encode_documents(texts)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    pointers = starts * tokens.dtype.itemsize
    return TokenFile(path, BlockTokens(path, tokens), lengths, pointers, boundaries)


def embed_target(
    tokens: TokenFile, recipe: EmbeddingRecipe, reader: Reader, batch_size: int
) -> EmbeddedTarget:
    """The mean of a text's window vectors. Every rank calls this.

    Args:
        tokens: of the text.
        recipe: that of the domains' embeddings.
        reader: the proxy.
        batch_size: windows per forward pass and rank.

    Raises:
        UserError: if the proxy's hidden states are not finite.
    """
    stopwatch = Stopwatch()
    windows = drawn_windows(recipe, DRAWN_AS, tokens)
    quiet = not reader.layout.is_main
    with progress_bar(len(windows), " windows", "embedding --target", quiet=quiet) as progress:
        vectors = embed_windows(
            reader,
            tokens,
            windows,
            recipe.layer,
            batch_size,
            progress,
            DRAWN_AS,
            final_norm=recipe.final_norm,
        )
    flops = windows_flops(reader.shape, recipe.layer, windows)
    return EmbeddedTarget(
        vectors.mean(axis=0, dtype=np.float64),
        len(windows),
        stopwatch.cost(flops, reader.layout.world_size),
    )


def _documents(path: Path) -> Iterator[str]:
    size_and_time(str(path))  # raises for what is not a regular file
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8")
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield text_at(object_in(line), TEXT_KEY, "--target")
            except MalformedLineError as problem:
                raise UserError(
                    f"--target {path}: line {number} {problem}; correct it, or give a .txt"
                ) from problem
