"""Windows of training text held in memory, to be embedded again and again."""

from __future__ import annotations

import dataclasses

import numpy as np

from megatron_chameleon.blend.token_data import DomainData
from megatron_chameleon.corpus.indexed import BlockTokens, TokenFile
from megatron_chameleon.embedding.windows import Windows, draw_windows


@dataclasses.dataclass(frozen=True, eq=False)
class HeldWindows:
    """``windows`` of ``tokens``, which hold nothing else; the longest first."""

    tokens: TokenFile
    windows: Windows


def hold_windows(
    domain: DomainData, window_length: int, num_windows: int, seed: int
) -> HeldWindows:
    """Draw windows of ``domain``, as :func:`draw_windows` does, and read them from disk.

    The draw depends on ``seed`` and the domain's ``order_key`` alone, wherever its files lie.

    Args:
        domain: with one token at least.
        window_length: tokens per window, at most.
        num_windows: windows to draw, at most.
        seed: of the draw.

    Raises:
        UserError: if the tokens are damaged or outside of the vocabulary.
    """
    file = domain.open()
    lengths = file.lengths[domain.first : domain.stop]
    drawn = draw_windows(lengths, window_length, num_windows, seed, domain.order_key)
    drawn = drawn.longest_first()
    places = zip(drawn.document.tolist(), drawn.start.tolist(), drawn.length.tolist(), strict=True)
    tokens = np.concatenate([file.get(domain.first + d, start, n) for d, start, n in places])
    count, ends = len(drawn), np.cumsum(drawn.length)
    return HeldWindows(
        TokenFile(
            prefix=file.prefix,
            tokens=BlockTokens(file.prefix, tokens),
            lengths=drawn.length.astype(np.int32),
            pointers=(ends - drawn.length) * tokens.itemsize,
            document_boundaries=np.arange(count + 1),
        ),
        Windows(np.arange(count), np.zeros(count, np.int64), drawn.length),
    )
