"""Megatron's ``--data-path`` and ``--split``: prefixes of .bin/.idx files with their weights."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Sequence
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
# Number and size of the evenly spaced blocks hashed of a larger .bin: 16 MiB, a second or two even
# on network storage.
HASHED_BLOCKS, HASHED_BLOCK_BYTES = 1024, 1 << 14


@dataclasses.dataclass(frozen=True)
class DataPath:
    """Value of ``--data-path``: prefixes, and their weights; None if it has no weights."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """Parse '0.3 PREFIX 0.7 PREFIX', or prefixes without weights.

        Raises:
            UserError: for another form, or a repeated prefix.
        """
        words = text.split()
        weights = [_number(word) for word in words[::2]]
        pairs = len(words) % 2 == 0 and None not in weights
        prefixes = words[1::2] if pairs else words
        if not prefixes or any(_number(word) is not None for word in prefixes):
            raise UserError(
                f"--data-path '{text}': must be 'WEIGHT PREFIX WEIGHT PREFIX ...' or prefixes only"
            )
        files = [Path(prefix).resolve() for prefix in prefixes]
        twice = [
            prefix for prefix, file in zip(prefixes, files, strict=True) if files.count(file) > 1
        ]
        if twice:
            raise UserError(f"--data-path names {twice[0]} twice; add its weights up")
        return cls(tuple(prefixes), tuple(map(float, weights)) if pairs else None)  # type: ignore[arg-type]


def data_path_tokens(
    path: DataPath, split: str, tokenizer: TokenizerIdentity, part: Split = "train"
) -> TokenData:
    """One split of Megatron data sets, by ``--split`` as in Megatron-LM.

    Neither the hash nor the order of the samples depends on where the files are, only on their
    :func:`hash_token_file`.

    Raises:
        UserError: for damaged files, or a split that leaves nothing for ``part``.
    """
    bounds = split_range(split, part)
    prefixes = [Path(prefix) for prefix in path.prefixes]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        cuts = list(pool.map(lambda prefix: _cut(prefix, *bounds), prefixes))
    hashes = [cut.sha256 for cut in cuts]
    domains = [
        DomainData(
            name,
            prefix,
            cut.first,
            cut.stop,
            cut.tokens,
            # The same text under two prefixes is read in two orders.
            order_key=f"{cut.sha256} {hashes[:number].count(cut.sha256)}",
            vocab_size=tokenizer.vocab_size,
        )
        for number, (name, prefix, cut) in enumerate(
            zip(domain_names(path.prefixes), prefixes, cuts, strict=True)
        )
    ]
    made_by = [tokenizer.sha256, tokenizer.eod_id]
    contents = [dataclasses.astuple(cut) for cut in cuts]
    digest = sha256_of_json({"tokenizer": made_by, "files": contents})
    return TokenData("--data-path", tuple(domains), tokenizer, digest)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Sequences ``first`` to ``stop`` of a file, their tokens, and the hash of the whole file."""

    first: int
    stop: int
    tokens: int
    sha256: str


def _cut(prefix: Path, begin: float, end: float) -> _Cut:
    file = open_token_file(prefix)
    # Rounded as in Megatron's BlendedMegatronDatasetBuilder.
    first, stop = round(begin * float(len(file))), round(end * float(len(file)))
    return _Cut(first, stop, tokens_between(file, first, stop), hash_token_file(prefix))


def domain_names(prefixes: Sequence[str]) -> list[str]:
    """Domain names: of each path, as many of its last parts as make it unique.

    ``data/news_document`` and ``data/code_document`` are ``news_document`` and ``code_document``;
    ``news/train`` and ``code/train`` keep both parts. So names stay the same when a folder moves.
    """
    parts = [Path(os.path.abspath(prefix)).parts for prefix in prefixes]
    assert len(set(parts)) == len(parts), "a data path names no file twice"
    names: dict[int, str] = {}
    depth = 0
    while len(names) < len(parts):
        depth += 1
        tails = [path[-depth:] for path in parts]
        for number, tail in enumerate(tails):
            if number not in names and tails.count(tail) == 1:
                names[number] = str(Path(*tail))
    return [names[number] for number in range(len(parts))]


def hash_token_file(prefix: Path) -> str:
    """Hex SHA-256 of a pair of files: the whole .idx, and blocks of the .bin.

    A .bin of up to 16 MiB is hashed whole; of a larger one its size and 16 MiB of evenly spaced
    blocks, the first and the last included.
    """
    bin_path = Path(f"{prefix}.bin")
    size = bin_path.stat().st_size
    digest = hashlib.sha256(f"{sha256_of_files(Path(f'{prefix}.idx'))} {size} ".encode())
    with bin_path.open("rb", buffering=0) as stream:
        for place in _hashed_places(size):
            stream.seek(place)
            digest.update(stream.read(HASHED_BLOCK_BYTES))
    return digest.hexdigest()


def _hashed_places(size: int) -> Sequence[int]:
    """First bytes of the hashed blocks of a file."""
    if size <= HASHED_BLOCKS * HASHED_BLOCK_BYTES:
        return range(0, size, HASHED_BLOCK_BYTES)
    last, intervals = size - HASHED_BLOCK_BYTES, HASHED_BLOCKS - 1
    return [last * block // intervals for block in range(HASHED_BLOCKS)]


def split_range(split: str, part: Split) -> tuple[float, float]:
    """Begin and end of ``part`` as fractions of all sequences, by Megatron's ``--split``.

    Raises:
        UserError: unless ``split`` is one to three numbers, none negative, and that of ``part`` is
            above 0.
    """
    # No exponents: Megatron parses digits and dots only.
    words = split.split(",")
    shares = [_number(word) if PLAIN_NUMBER.fullmatch(word.strip()) else None for word in words]
    if not 1 <= len(shares) <= len(SPLITS) or None in shares:
        raise UserError(
            f"--split {split}: must be up to three numbers separated by commas, e.g. 969,30,1"
        )
    if min(share for share in shares if share is not None) < 0 or not any(shares):
        raise UserError(f"--split {split}: shares must not be negative, nor all zero")
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
