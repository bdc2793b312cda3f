"""Whether gigatoken may encode: it is compared with the tokenizer's own library at the start."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator

from megatron_chameleon.corpus.tokenization.awkward_texts import awkward_texts
from megatron_chameleon.corpus.tokenization.fast_encoder import (
    CannotEncodeError,
    GigatokenEncoder,
)
from megatron_chameleon.corpus.tokenization.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.tokenizer import EncoderChoice

_SAMPLE_CHARACTERS = 1 << 20
# The sample is the beginnings and middles of texts, so that it is of many.
_SAMPLE_PIECE = 1 << 13


class EncoderTrial:
    """The library that ``choice`` asks for, used while it is compared with the tokenizer's own.

    Comparing takes a quarter of a second, in a thread of its own.

    Args:
        tokenizer: as it was loaded.
        choice: see EncoderOptions.
        texts: of what is to be encoded, in which the two libraries are compared; about a million
            characters are taken of the first ones.

    Attributes:
        tokenizer: the one to use meanwhile. What it encodes counts only if :meth:`settle` gives it.
    """

    def __init__(self, tokenizer: Tokenizer, choice: EncoderChoice, texts: Iterable[str]) -> None:
        self._own = dataclasses.replace(tokenizer, stand_in=None)
        self._choice = choice
        self._differing: Callable[[], str | None] = lambda: None
        self._cannot: CannotEncodeError | None = None
        self.tokenizer = self._own
        if choice == "own":
            return
        own = tokenizer.encoder
        sample = [*awkward_texts(own.special_tokens()), *_sample(texts)]
        with _closing_later() as pool:
            by_own = pool.submit(own.encode_batch, sample)
            try:
                stand_in = GigatokenEncoder(tokenizer.file, own, tokenizer.eod_id)
                differing = stand_in.comparison(sample)
            except (CannotEncodeError, UserError) as error:
                self._cannot = CannotEncodeError(str(error))
                return
        self._differing = lambda: differing(by_own.result())
        self.tokenizer = dataclasses.replace(tokenizer, stand_in=stand_in)

    def settle(self) -> Tokenizer:
        """Wait for the comparison, and return the tokenizer to use from now on.

        Warns, on one line, where gigatoken could not be taken although it was allowed.

        Raises:
            UserError: if ``choice`` is gigatoken and it cannot be used.
        """
        differing = self._differing()
        if differing is not None:
            self._cannot = CannotEncodeError(
                f"gigatoken and {self._own.encoder.kind} encode {differing[:40]!r} otherwise"
            )
        self._differing = lambda: None
        if self._cannot is None:
            return self.tokenizer
        if self._choice == "gigatoken":
            raise UserError(f"--encoder gigatoken: {self._cannot}; give --encoder own")
        kind = self._own.encoder.kind
        warnings.warn(f"{self._cannot}: {kind} encodes, which takes longer", stacklevel=2)
        self.tokenizer, self._cannot = self._own, None
        return self._own


@contextlib.contextmanager
def _closing_later() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """A pool whose work goes on after the block."""
    pool = concurrent.futures.ThreadPoolExecutor(1, "compare")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False)


def with_encoder(tokenizer: Tokenizer, choice: EncoderChoice, texts: Iterable[str]) -> Tokenizer:
    """``tokenizer`` with the library in it that ``choice`` asks for; see :class:`EncoderTrial`."""
    return EncoderTrial(tokenizer, choice, texts).settle()


def _sample(texts: Iterable[str]) -> Iterator[str]:
    taken = 0
    for text in texts:
        middle = max(_SAMPLE_PIECE, (len(text) - _SAMPLE_PIECE) // 2)
        for start in (0, middle):
            piece = text[start : start + _SAMPLE_PIECE]
            taken += len(piece)
            yield piece
        if taken >= _SAMPLE_CHARACTERS:
            return
