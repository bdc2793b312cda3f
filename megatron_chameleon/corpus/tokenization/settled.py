"""Characters that every release of Unicode in use knows alike.

Libraries carry the tables of different releases. A character that one of them knows as a letter and
another does not know at all is split from its neighbours by one and not by the other. A character
that has been given a meaning keeps it, so the doubt is about those that had none in release 14,
the oldest in use.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from numpy.typing import NDArray

_UNKNOWN, _SETTLED, _UNSETTLED = 0, 1, 2
# U+0378 is the first character without a meaning.
_ALL_SETTLED_BELOW = 0x378
_NUM_CHARACTERS = 0x110000
# Where the pictographs are, new ones come each year; as a letter or a digit none is ever taken.
_PICTOGRAPHS = range(0x1F300, 0x1FB00)
# Letters, digits, marks and spaces since release 14: where this Python's own tables are newer.
_NEW = """
558 58B-58C 5C8-5C9 88F 897 B53-B54 C5C CDC CF3 ECE 1ACF-1AF0 1C89-1C8A 208F 209D-209F A7CB-A7CF
A7D2 A7D4 A7DA-A7F1 AB6C-AB6D 105C0-105F3 107BB-107BF 10940-10959 10D40-10D85 10EC2-10EFF
1123F-11241 11380-113E2 116D0-116E3 11B0A-11BF9 11DB0-11DF1 11F00-11F5A 1246F 12475-1247F
12550-12686 1342F 13440-143FA 16100-16139 16D40-16D79 16EA0-16ED3 16FF2-16FF6 187F8-187FF
18CD6-18CFF 18D09-191D2 1B123-1B132 1B155 1B168 1CCF0-1CCF9 1D127-1D128 1D250-1D2D3 1D6A6
1DF1F-1DFFF 1E030-1E08F 1E4D0-1E6FF 2B739-2B73F 2B81E 2CEA2-2CEAD 2EBF0-2EE5D 31350-3FC3F
"""


def _ranges(text: str) -> tuple[range, ...]:
    ends = [[int(end, 16) for end in part.split("-")] for part in text.split()]
    return tuple(range(pair[0], pair[-1] + 1) for pair in ends)


_NEW_RANGES = _ranges(_NEW)


class SettledCharacters:
    """Tells the texts all of whose characters are settled.

    What was once asked of a character is remembered: 1 byte for each of the 1.1 million.
    """

    def __init__(self) -> None:
        self._known: NDArray[np.uint8] = np.zeros(_NUM_CHARACTERS, dtype=np.uint8)

    def all_in(self, text: str) -> bool:
        """Whether all characters of ``text`` are settled. Fast: numpy, and nothing for ASCII."""
        if text.isascii():
            return True
        characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        high = characters[characters >= _ALL_SETTLED_BELOW]
        known = self._known[high]
        if not known.all():
            for number in np.unique(high[known == _UNKNOWN]).tolist():
                self._known[number] = _SETTLED if is_settled(chr(number)) else _UNSETTLED
            known = self._known[high]
        return not bool((known == _UNSETTLED).any())


def is_settled(character: str) -> bool:
    """Whether a character is; the plain reference of :class:`SettledCharacters`."""
    number = ord(character)
    if number in _PICTOGRAPHS:
        return True
    if any(number in some for some in _NEW_RANGES):
        return False
    return unicodedata.category(character) != "Cn"
