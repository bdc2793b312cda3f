"""Megatron's ``--data-path`` and ``--split``: prefixes of .bin/.idx files with their weights."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_chameleon.artifacts import SPLITS, Split, TokenizerIdentity
from megatron_chameleon.artifacts.files import sha256_of_files, sha256_of_json
from megatron_chameleon.blend.token_data import DomainData, TokenData, tokens_between
from megatron_chameleon.corpus.indexed import open_token_file
from megatron_chameleon.errors import UserError

PLAIN_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")
# Number and size of the evenly spaced blocks that are hashed if a .bin is larger than 16 MiB.
# Hashing them takes a second or two even on network storage.
HASHED_BLOCKS, HASHED_BLOCK_BYTES = 1024, 1 << 14


@dataclasses.dataclass(frozen=True)
class DataPath:
    """Value of ``--data-path``: prefixes and their weights, or None without weights."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """Parse '0.3 PREFIX 0.7 PREFIX', or prefixes without weights.

        Raises:
            UserError: if the text has another form, or a prefix is repeated.
        """
        words = text.split()
        weights = [_number(word) for word in words[::2]]
        pairs = len(words) % 2 == 0 and None not in weights
        prefixes = words[1::2] if pairs else words
        if not prefixes or any(_number(word) is not None for word in prefixes):
            raise UserError(
                f"--data-path '{text}': must be 'WEIGHT PREFIX WEIGHT PREFIX ...' or prefixes only"
            )
        counts = Counter(Path(prefix).resolve() for prefix in prefixes)
        twice = [prefix for prefix in prefixes if counts[Path(prefix).resolve()] > 1]
        if twice:
            raise UserError(f"--data-path names {twice[0]} twice; add up the weights")
        return cls(tuple(prefixes), tuple(map(float, weights)) if pairs else None)  # type: ignore[arg-type]


def data_path_tokens(
    path: DataPath, split: str, tokenizer: TokenizerIdentity, part: Split = "train"
) -> TokenData:
    """Select one split of Megatron data sets, by ``--split`` as in Megatron-LM.

    The hash and the order of the samples depend on the contents (:func:`hash_token_file`), not on
    the paths.

    Raises:
        UserError: for damaged files, or a split that leaves nothing for ``part``.
    """
    begin, end = split_range(split, part)

    def cut(prefix: str) -> tuple[int, int, int, str]:
        """Return the split's first and end sequence, its tokens, and the whole file's hash."""
        file = open_token_file(Path(prefix))
        # Round as Megatron's BlendedMegatronDatasetBuilder does, so that splits are equal.
        first, stop = round(begin * float(len(file))), round(end * float(len(file)))
        return first, stop, tokens_between(file, first, stop), hash_token_file(Path(prefix))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        cuts = list(pool.map(cut, path.prefixes))
    domains = []
    copies: Counter[str] = Counter()
    for name, prefix, (first, stop, tokens, sha256) in zip(
        domain_names(path.prefixes), path.prefixes, cuts, strict=True
    ):
        # Number the copies of a file, so that they get different sample orders.
        order_key = f"{sha256} {copies[sha256]}"
        copies[sha256] += 1
        domains.append(
            DomainData(name, Path(prefix), first, stop, tokens, order_key, tokenizer.vocab_size)
        )
    identity = {"tokenizer": [tokenizer.sha256, tokenizer.eod_id], "files": cuts}
    return TokenData("--data-path", tuple(domains), tokenizer, sha256_of_json(identity))


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


def hash_token_file(prefix: Path) -> str:
    """Hex SHA-256 of a pair of files: the whole .idx, and blocks of the .bin.

    A .bin of up to 16 MiB is hashed completely. For a larger .bin, the hash covers its size and 16
    MiB of evenly spaced blocks, including the first and the last one.
    """
    bin_path = Path(f"{prefix}.bin")
    size = bin_path.stat().st_size
    digest = hashlib.sha256(f"{sha256_of_files(Path(f'{prefix}.idx'))} {size} ".encode())
    places: Iterable[int] = range(0, size, HASHED_BLOCK_BYTES)
    if size > HASHED_BLOCKS * HASHED_BLOCK_BYTES:
        last, intervals = size - HASHED_BLOCK_BYTES, HASHED_BLOCKS - 1
        places = (last * block // intervals for block in range(HASHED_BLOCKS))
    with bin_path.open("rb", buffering=0) as stream:
        for place in places:
            stream.seek(place)
            digest.update(stream.read(HASHED_BLOCK_BYTES))
    return digest.hexdigest()


def split_range(split: str, part: Split) -> tuple[float, float]:
    """Parse Megatron's ``--split``: start and end of ``part`` as fractions of all sequences.

    Raises:
        UserError: for an invalid split, or one that leaves nothing for ``part``.
    """
    # Exponents are invalid, since Megatron parses only digits and dots.
    words = [word.strip() for word in split.split(",")]
    numbers = [float(word) for word in words if PLAIN_NUMBER.fullmatch(word)]
    if not len(numbers) == len(words) <= len(SPLITS) or not any(numbers):
        raise UserError(
            f"--split {split}: must be up to three numbers separated by commas, not negative and "
            "not all zero, e.g. 969,30,1"
        )
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    found = bounds[SPLITS.index(part)]
    if found is None:
        raise UserError(f"--split {split} leaves nothing for {part}; its share must be above 0")
    return float(found[0]), float(found[1])


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
