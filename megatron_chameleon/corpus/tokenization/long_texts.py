"""Very long texts are encoded in parts, for flat memory and for what the libraries can bear."""

from __future__ import annotations

import re
from collections.abc import Iterator

# tokenizers takes about 100 bytes of memory a character, and tiktoken gives up on a million spaces
# in a row. A part is long enough for a cut in an unlucky place to make no difference.
LONGEST_PART = 500_000
# How far back from the end of a part a good place is looked for.
_WINDOW = 4096

# Where every known way of splitting text into words has a boundary, best first: at a space between
# two words, at the last of several spaces, and after a line.
_BETWEEN_WORDS = re.compile(r"(?<=\S)(?= \S)")
_PLACES = (_BETWEEN_WORDS, re.compile(r"(?= \S)"), re.compile(r"(?<=\S\n)(?=\S)"))


def parts(text: str, drop_space: bool, longest: int = LONGEST_PART) -> Iterator[str]:
    """Parts of at most ``longest`` characters whose tokens, one after the other, are the text's.

    They are where there is a word or a line to cut before in the last 4096 characters of each part.
    Where there is none (millions of spaces, or a text without any), the cut is at the end of the
    part, and a token or two differ from those of the text as a whole.

    Args:
        text: to be cut.
        drop_space: whether a space between two words is left out where it is cut at, because the
            tokenizer puts one before every text.
        longest: characters of a part.
    """
    start = 0
    while len(text) - start > longest:
        end = start + longest
        cut, pattern = _last_place(text, max(start + 1, end - _WINDOW), end)
        yield text[start:cut]
        start = cut + (1 if drop_space and pattern is _BETWEEN_WORDS else 0)
    yield text[start:]


def _last_place(text: str, start: int, end: int) -> tuple[int, re.Pattern[str] | None]:
    """Where to cut ``text`` between ``start`` and ``end``, and what was found there."""
    for pattern in _PLACES:
        places = [place.start() for place in pattern.finditer(text, start, end)]
        if places:
            return places[-1], pattern
    return end, None
