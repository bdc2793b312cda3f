"""Megatron's ``--data-path`` and ``--split``: prefixes of .bin/.idx files with their weights."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import SPLITS, Split
from megatron_chameleon.corpus.options import is_domain_name
from megatron_chameleon.errors import UserError

PLAIN_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")
# A domain name before '='; names with a slash are parts of a path, such as data/lang=en/text.
NAMED = re.compile(r"([^=/]+)=(.+)")


@dataclasses.dataclass(frozen=True)
class DataPath:
    """Value of ``--data-path``: prefixes with domain names, and their weights.

    Attributes:
        prefixes: path or URL of each .bin/.idx pair, without suffix.
        weights: weight of each prefix; None without weights.
        names: domain name of each prefix.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, flag: str = "--data-path") -> DataPath:
        """Parse '0.3 PREFIX 0.7 PREFIX', or prefixes without weights.

        NAME=PREFIX names the domain; by default it is the shortest unique end of the path.

        Args:
            text: the value.
            flag: the option, for messages.

        Raises:
            UserError: if the text has another form, or a prefix or a name is repeated.
        """
        words = text.split()
        weights = [_number(word) for word in words[::2]]
        pairs = len(words) % 2 == 0 and None not in weights
        named = [_split_name(word) for word in (words[1::2] if pairs else words)]
        prefixes = [prefix for _, prefix in named]
        has_nul = "\0" in text
        if not prefixes or has_nul or any(_number(word) is not None for word in prefixes):
            raise UserError(
                f"{flag} '{' '.join(words):.80}': must be 'WEIGHT PREFIX WEIGHT PREFIX ...' or "
                "prefixes only"
            )
        # The system resolves each folder once, since this takes long on network storage.
        folders = {os.path.dirname(prefix) for prefix in prefixes}
        real = {folder: os.path.realpath(folder) for folder in folders}
        paths = [os.path.join(real[os.path.dirname(p)], os.path.basename(p)) for p in prefixes]
        if (twice := _repeated(paths)) is not None:
            raise UserError(f"{flag} names {prefixes[twice]} twice; add up the weights")
        defaults = domain_names(prefixes)
        names = [name or default for (name, _), default in zip(named, defaults, strict=True)]
        if (twice := _repeated(names)) is not None:
            raise UserError(
                f"{flag}: {prefixes[twice]} is not the only file of domain '{names[twice]}'; pass "
                "another NAME=PREFIX, or merge the files with Megatron-LM's tools/merge_datasets.py"
            )
        found = tuple(map(float, weights)) if pairs else None  # type: ignore[arg-type]
        return cls(tuple(prefixes), found, tuple(names))

    @classmethod
    def read(cls, data_path: str | None, data_args_path: Path | None) -> DataPath:
        """Parse the value of ``--data-path``, or else the file ``--data-args-path``.

        Raises:
            UserError: if the file cannot be read, or for an invalid value.
        """
        if data_args_path is None:
            assert data_path is not None
            return cls.parse(data_path)
        flag = f"--data-args-path {data_args_path}"
        try:
            return cls.parse(data_args_path.read_text(encoding="utf-8"), flag)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{flag}: cannot be read ({error}); pass a text file") from error


def domain_names(prefixes: Sequence[str]) -> list[str]:
    """Domain names: the shortest unique suffix of each path.

    ``data/news_document`` and ``data/code_document`` are ``news_document`` and ``code_document``;
    ``news/train`` and ``code/train`` keep both path components. Names do not change when a folder
    moves.
    """
    parts = [Path(os.path.abspath(prefix)).parts for prefix in prefixes]
    names: dict[int, str] = {}
    depth = 0
    while len(names) < len(parts):
        depth += 1
        tails = [path[-depth:] for path in parts]
        counts = Counter(tails)
        for number, tail in enumerate(tails):
            if counts[tail] == 1:
                names.setdefault(number, str(Path(*tail)))
    return [names[number] for number in range(len(parts))]


def split_range(split: str, part: Split) -> tuple[float, float]:
    """Parse Megatron's ``--split``: start and end of ``part`` as fractions of all sequences.

    Raises:
        UserError: for an invalid split, or one that leaves nothing for ``part``.
    """
    found = split_ranges(split)[part]
    if found is None:
        raise UserError(f"--split {split} leaves nothing for {part}; its share must be above 0")
    return found


def split_ranges(split: str) -> dict[Split, tuple[float, float] | None]:
    """Parse Megatron's ``--split``: the range of each split, or None if it is empty.

    Raises:
        UserError: for an invalid split.
    """
    # Exponents are invalid, since Megatron parses only digits and dots.
    words = [word.strip() for word in split.split(",")]
    numbers = [float(word) for word in words if PLAIN_NUMBER.fullmatch(word)]
    if not len(numbers) == len(words) <= len(SPLITS) or not any(numbers):
        raise UserError(
            f"--split {split}: must be up to three numbers separated by commas, not negative and "
            "not all zero, e.g. 969,30,1"
        )
    # The same operations as in Megatron, which takes seconds to import, give the same rounding.
    numbers += [0.0] * (len(SPLITS) - len(numbers))
    edges = [0.0]
    for share in (np.array(numbers) / np.sum(numbers)).tolist():
        edges.append(edges[-1] + share)
    pairs = zip(SPLITS, edges, edges[1:], strict=False)
    return {part: (begin, end) if begin < end else None for part, begin, end in pairs}


def sequence_range(num_sequences: int, bounds: tuple[float, float]) -> tuple[int, int]:
    """Return the first and the end sequence of a split that ranges over fractions ``bounds``.

    The fractions are rounded as in Megatron's BlendedMegatronDatasetBuilder, so splits are equal.
    """
    begin, end = bounds
    return round(begin * float(num_sequences)), round(end * float(num_sequences))


def _repeated(values: Sequence[str]) -> int | None:
    """Return the index of the first value that occurs several times; None if all are distinct."""
    counts = Counter(values)
    return next((i for i, value in enumerate(values) if counts[value] > 1), None)


def _split_name(word: str) -> tuple[str | None, str]:
    match = NAMED.fullmatch(word)
    if match is None or os.path.exists(f"{word}.idx"):  # the path lang=en/text is not named
        return None, word
    if not is_domain_name(match[1]):
        raise UserError(f"{word}: the name before '=' is too long for a domain")
    return match[1], match[2]


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
