"""``--target``: a prior over the domains, from named domains or from the embedding of a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus, Cost, EmbeddingRecipe
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.corpus.records import MalformedLineError, object_in, text_at
from megatron_chameleon.corpus.sources import size_and_time
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.embedding.embed import embed_by_recipe, sample_windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.domains import format_names, parse_share
from megatron_chameleon.mixture import similarity_shares, target_prior
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.target import DEFAULT_STRENGTH
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.progress import progress_bar

TEXT_SUFFIXES = (".txt", ".jsonl")
TEXT_KEY = "text"
# In place of a domain name where windows are sampled, so that the sample does not depend on a path.
WINDOW_KEY = "--target"


@dataclasses.dataclass(frozen=True)
class EmbeddedText:
    """The embedding of a target text.

    Attributes:
        vector: [h], mean over its windows.
        windows: number of windows.
        cost: of embedding it.
    """

    vector: NDArray[np.float64]
    windows: int
    cost: Cost


@dataclasses.dataclass(frozen=True)
class Target:
    """A parsed ``--target``.

    Attributes:
        value: of the option.
        strength: in (0, 1).
        shares: domain -> share of the target, for a target of domains; the others have share 0.
        text: the file, for a target text.
    """

    value: str
    strength: float
    shares: dict[str, float] | None = None
    text: Path | None = None

    def prior(
        self, names: Sequence[str], embedded: EmbeddedText | None
    ) -> Callable[[Array], Array]:
        """The function from domain embeddings [k, h] to the prior [k].

        Args:
            names: the k domains.
            embedded: the target text, if the target is one.
        """
        if embedded is not None:
            vector = embedded.vector
            return lambda means: target_prior(similarity_shares(means, vector), self.strength)
        shares = self.shares or {}
        fixed = target_prior([shares.get(name, 0.0) for name in names], self.strength)
        return lambda means: fixed


def parse_target(value: str | None, strength: float | None, names: Sequence[str]) -> Target | None:
    """Parse ``--target`` for a mixture of the domains ``names``; None without a target.

    Raises:
        UserError: for an unknown or repeated domain, a share that is not above 0, or a missing
            text file.
    """
    if value is None:
        return None
    strength = DEFAULT_STRENGTH if strength is None else strength
    if value not in names and value.endswith(TEXT_SUFFIXES):
        if not Path(value).is_file():
            raise UserError(f"--target {value}: no such file; pass a text file or domains")
        return Target(value, strength, text=Path(value))
    shares: dict[str, float] = {}
    for item in filter(None, map(str.strip, value.split(","))):
        name, share = parse_share(item, value, names)
        if name not in names:
            raise UserError(
                f"--target {value}: unknown domain '{name}'; choose among {format_names(names)}, "
                f"or pass a file that ends with {' or '.join(TEXT_SUFFIXES)}"
            )
        if name in shares:
            raise UserError(f"--target {value}: duplicate domain '{name}'; name it once")
        shares[name] = share
    if not shares:
        raise UserError(f"--target {value}: no domain; choose among {format_names(names)}")
    return Target(value, strength, shares=shares)


def read_text(path: Path, corpus: Corpus) -> TokenFile:
    """Tokenize a target text: a ``.txt`` is one document, a ``.jsonl`` has one per line.

    Raises:
        UserError: for an unreadable file, a malformed line, or a file without text.
    """
    try:
        texts = [text for text in _documents(path) if text]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--target {path}: cannot be read as UTF-8 text ({error})") from error
    if not texts:
        raise UserError(f"--target {path}: no text; pass a file with some documents")
    tokens, lengths = corpus_tokenizer(corpus).encode_documents(texts)
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    pointers = starts * tokens.dtype.itemsize
    return TokenFile(path, BlockTokens(path, tokens), lengths, pointers, boundaries)


def _documents(path: Path) -> Iterator[str]:
    size_and_time(str(path))  # raises unless it is a regular file
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
                    f"--target {path}: line {number} {problem}; correct it, or pass a .txt"
                ) from problem


def embed_text(
    tokens: TokenFile, recipe: EmbeddingRecipe, reader: Reader, batch_size: int
) -> EmbeddedText:
    """Embed a target text like a domain. Collective.

    Args:
        tokens: of the text.
        recipe: of the domain embeddings.
        reader: the proxy.
        batch_size: windows per forward pass and rank.

    Raises:
        UserError: if the proxy's hidden states are not finite.
    """
    windows = sample_windows(recipe, WINDOW_KEY, tokens)
    quiet = not reader.layout.is_main
    with progress_bar(len(windows), " windows", "embedding --target", quiet=quiet) as progress:
        vectors, cost = embed_by_recipe(
            reader, tokens, windows, recipe, batch_size, progress, WINDOW_KEY
        )
    return EmbeddedText(vectors.mean(axis=0, dtype=np.float64), len(windows), cost)
