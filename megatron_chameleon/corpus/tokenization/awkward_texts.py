"""Texts at which two libraries for the same tokenizer may part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

_MOST_SPECIAL_TOKENS = 300


def awkward_texts(special_tokens: Iterable[str]) -> list[str]:
    """Some 500 texts of 50 KB in all; ``special_tokens`` are put into some of them."""
    runs = _runs_of_space()
    names = list(itertools.islice(special_tokens, _MOST_SPECIAL_TOKENS))
    special = [text for name in names for text in (name, f"a{name} b")]
    return ["", *runs, *[f"x{run}y" for run in runs], *_every_byte(), *_words(), *special]


def _runs_of_space() -> list[str]:
    spaces = [" ", "\n", "\t", "\r\n", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\v\f\x85"]
    return [space * count for space in spaces for count in (1, 2, 3, 300)]


def _every_byte() -> list[str]:
    characters = [
        *range(0x100, 0x800, 17),
        *range(0x800, 0xD800, 611),
        *range(0xE000, 0x10000, 611),
    ]
    characters += range(0x10000, 0x110000, 5003)
    # One in each: a text with a character that not all know is not compared.
    return ["".join(map(chr, range(256))), *[f"a{chr(n)}b 1{chr(n)}" for n in characters]]


def _words() -> list[str]:
    return [
        "It's we'LL I'm they'Re 'tis x'y''s d'accord",
        "1 12 123 1234 12345678901234567890 1.5e-3 ½ Ⅳ ٣٤٥ 12ab34",
        "snake_case camelCase SHOUTING mixedCASEWords http://a.b/c?d=e&f#g <html></html> $x^{2}$",
        "世界你好。こんにちは、テスト。안녕하세요 สวัสดี नमस्ते שלום مرحبا Здравствуйте",
        "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 ☎️ 🫨",
        "e\u0301 \u00e9 a\u0308\u0323 \u1e69 \u0327\u0307 \ufb01 \u212b \uff21 \u200b\u200d\ufeff",
        "\ue000 \uf8ff \ufffd \U000e0041 \x00 \x7f",
        "\ufffe \U0010ffff a\U00010940b",
        "a" * 5_000,
        "ab" * 2_000 + "1" * 1_000 + "=" * 1_000 + "世" * 1_000 + "😀" * 300,
        "word " * 500 + "\n" * 300 + " word" * 500,
    ]
