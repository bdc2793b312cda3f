"""Mixtures in the formats of Megatron-LM, Megatron Bridge and NeMo Automodel.

These formats list prefixes of .bin and .idx files instead of names. A prefix that belongs to a
corpus has the name of its domain; otherwise, the name is the shortest unique end of the path.

Each split of a corpus has its own files, so Megatron must not divide them again with ``--split``.
Write either a format that lists all splits, or one file per split.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    DomainSource,
    Mixture,
    MixtureWarning,
    Split,
)
from megatron_chameleon.artifacts.files import read_foreign_json, read_text
from megatron_chameleon.corpus.data_path import DataPath, domain_names
from megatron_chameleon.errors import UserError, quoted
from megatron_chameleon.storage import absolute

# Characters at which a shell splits or changes a path in $(...) or double quotes.
UNSAFE_IN_SHELL = re.compile(r"""[\s*?\[\\$`"']""")
# Megatron-LM splits the content of a --data-args-path file at white space and has no quoting.
UNSAFE_IN_ARGS_FILE = re.compile(r"\s")
TOKENS_SUFFIX = ".bin"
# Automodel's names of the splits: the three that are written, and others that it also reads.
AUTOMODEL_SPLITS: dict[str, Split] = {
    "train": "train",
    "validation": "valid",
    "test": "test",
    "valid": "valid",
    "val": "valid",
    "dev": "valid",
}
# Weights of two splits agree if they differ by rounding only.
SAME_WEIGHT = 1e-9

# Prefixes and their weights; None without weights.
Blend = tuple[Sequence[str], Sequence[float] | None]


def read_data_path(path: Path, split: Split | None, corpus: Corpus | None) -> Mixture:
    """Read ``WEIGHT PREFIX WEIGHT PREFIX ...``, on one or several lines."""
    text = read_text(path, "pass the arguments of --data-path in a text file")
    parsed = DataPath.parse(text, str(path))
    names = None if corpus else parsed.names
    return _mixture({split or "train": (parsed.prefixes, parsed.weights)}, path, corpus, names)


def read_per_split(path: Path, split: Split | None, corpus: Corpus | None) -> Mixture:
    """Read the JSON of ``--per-split-data-args-path``."""
    body = read_foreign_json(path, "pass a file for Megatron-LM's --per-split-data-args-path")
    blends = {part: _blend_of_words(body.get(part), path, part) for part in SPLITS}
    return _mixture(blends, path, corpus, split=split)


def read_automodel(path: Path, split: Split | None, corpus: Corpus | None) -> Mixture:
    """Read the JSON of Automodel's ``paths``, an object of the splits."""
    body = read_foreign_json(
        path, "pass a JSON file for the paths of Automodel's MegatronPretraining"
    )
    if unknown := [key for key in body if key not in AUTOMODEL_SPLITS]:
        raise UserError(
            f"{path}: {quoted(unknown)} is not a split; its splits are train, validation and test"
        )
    blends: dict[Split, Blend | None] = dict.fromkeys(SPLITS)
    for key, listed in body.items():
        part = AUTOMODEL_SPLITS[key]
        if blends[part] is not None:
            raise UserError(f"{path}: two keys list the {part} split; keep one of them")
        blends[part] = _blend_of_words(listed, path, key)
    return _mixture(blends, path, corpus, split=split)


def read_bridge(path: Path, split: Split | None, corpus: Corpus | None) -> Mixture:
    """Read ``blend`` and ``split``, or ``blend_per_split``, of Megatron Bridge's dataset."""
    body = read_foreign_json(path, "pass a JSON object with blend or blend_per_split")
    if (blend := _blend_of_lists(body.get("blend"), path, "blend")) is not None:
        mixture = _mixture({"train": blend}, path, corpus)
        if (divided := body.get("split")) is not None:
            mixture = dataclasses.replace(
                mixture,
                sources={
                    name: dataclasses.replace(source, split=str(divided))
                    for name, source in (mixture.sources or {}).items()
                },
            )
        return mixture
    listed = body.get("blend_per_split")
    if not isinstance(listed, list) or len(listed) != len(SPLITS):
        raise UserError(f"{path}: must have blend, or blend_per_split with train, valid and test")
    blends = {
        part: _blend_of_lists(each, path, f"blend_per_split of {part}")
        for part, each in zip(SPLITS, listed, strict=True)
    }
    return _mixture(blends, path, corpus, split=split)


def _blend_of_words(value: object, path: Path, where: str) -> Blend | None:
    """Parse a list of words, or a string of them, as Megatron-LM does."""
    if isinstance(value, str):
        value = value.split()
    if not value:
        return None
    if not isinstance(value, list) or not all(type(word) in (str, float, int) for word in value):
        raise UserError(f"{path}: {where} must be a list of weights and prefixes in turn")
    listed = [str(word) for word in value]
    try:
        return listed[1::2], [float(word) for word in listed[::2]]
    except ValueError:
        return listed, None


def _blend_of_lists(value: object, path: Path, where: str) -> Blend | None:
    """Parse a list of prefixes and a list of weights."""
    if value is None:
        return None
    prefixes, weights = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if not isinstance(prefixes, list) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise UserError(f"{path}: {where} must be a list of prefixes and a list of weights")
    if weights is None:
        return prefixes, None
    if not isinstance(weights, list) or not all(type(weight) in (int, float) for weight in weights):
        raise UserError(f"{path}: {where} must have a list of numbers as weights")
    return prefixes, [float(weight) for weight in weights]


def _mixture(
    blends: Mapping[Split, Blend | None],
    path: Path,
    corpus: Corpus | None,
    names: Sequence[str] | None = None,
    split: Split | None = None,
) -> Mixture:
    """Return the mixture of the blend of ``split`` (default: the only one, or train).

    Unless ``split`` is chosen, the blends of the other splits must have the same domains and
    weights, apart from domains without text in them.
    """
    only: Split = next(iter(blends))
    main: Split = split or ("train" if len(blends) > 1 else only)
    if (chosen := blends[main]) is None:
        raise UserError(f"{path}: {main} has no weights; choose another --split")
    weights, prefixes = _named(chosen, path, main, corpus, names)
    parts = list(blends) if split is None else [main]
    files: dict[str, dict[Split, list[str]]] = {}
    for name, prefix in prefixes.items():
        files[name] = {part: [] for part in parts}
        files[name][main] = [prefix]
    for part, blend in blends.items():
        if split is not None or part == main or blend is None:
            continue
        others, other_prefixes = _named(blend, path, part, corpus)
        if extra := [name for name in others if name not in weights]:
            raise UserError(
                f"{path}: {part} has {quoted(extra)}, and {main} has {quoted(list(weights))}; pass "
                f"--split {main} to convert only {main}, or --corpus to name the files"
            )
        total = math.fsum(others.values())
        shared = math.fsum(weights[name] for name in others)
        for name, weight in others.items():
            if not math.isclose(weight * shared, weights[name] * total, rel_tol=SAME_WEIGHT):
                raise UserError(
                    f"{path}: {main} and {part} give '{name}' different weights, and a mixture has "
                    f"one weight for a domain; pass --split {main} to convert only {main}"
                )
            files[name][part] = [other_prefixes[name]]
    sources = {
        name: DomainSource(
            {part: [f"{prefix}{TOKENS_SUFFIX}" for prefix in listed] for part, listed in by.items()}
        )
        for name, by in files.items()
    }
    return Mixture(weights, sources=sources)


def _named(
    blend: Blend,
    path: Path,
    split: Split,
    corpus: Corpus | None,
    names: Sequence[str] | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the weights and the prefixes by domain, in the order of ``blend``."""
    prefixes, weights = blend
    if weights is None and len(prefixes) == 1:
        weights = [1.0]
    if weights is None or len(weights) != len(prefixes) or not weights:
        raise UserError(
            f"{path}: {split} has {len(prefixes)} prefixes and {len(weights or ())} weights; each "
            "prefix must have a weight"
        )
    if any("\0" in prefix for prefix in prefixes):
        raise UserError(f"{path}: a prefix of {split} has a NUL character; repair it")
    places = [os.path.realpath(prefix) for prefix in prefixes]
    if len(set(places)) < len(places):
        twice = next(prefix for prefix in prefixes if places.count(os.path.realpath(prefix)) > 1)
        raise UserError(f"{path}: {split} has two weights for '{twice}'; add them up")
    if corpus is not None:
        known = {
            os.path.realpath(absolute(str(corpus.prefix(name, part)))): name
            for name in corpus.names
            for part in SPLITS
        }
        found = [known.get(place) for place in places]
        if unknown := [p for p, name in zip(prefixes, found, strict=True) if name is None]:
            raise UserError(
                f"{path}: the corpus {corpus.root} does not have the files {quoted(unknown)}; its "
                f"domains are {quoted(corpus.names)}"
            )
        names = [str(name) for name in found]
    names = names or domain_names(prefixes)
    return dict(zip(names, weights, strict=True)), dict(zip(names, prefixes, strict=True))


def write_data_path(mixture: Mixture, split: Split) -> str:
    """Format ``WEIGHT PREFIX WEIGHT PREFIX ...`` on one line, for ``--train-data-path``.

    Raises:
        UserError: for a path that a shell or Megatron-LM would split.
    """
    return " ".join(_bare_words(mixture, split, UNSAFE_IN_SHELL)) + "\n"


def write_data_args(mixture: Mixture, split: Split) -> str:
    """Format the file for ``--data-args-path``, with a weight and a prefix per line.

    Raises:
        UserError: for a path with white space, at which Megatron-LM would split it.
    """
    listed = _bare_words(mixture, split, UNSAFE_IN_ARGS_FILE)
    lines = zip(listed[::2], listed[1::2], strict=True)
    return "".join(f"{weight} {prefix}\n" for weight, prefix in lines)


def write_per_split(mixture: Mixture, _split: Split) -> str:
    """Format the JSON for ``--per-split-data-args-path``: split -> arguments; null if empty.

    The arguments are a list, so that paths may contain white space.

    Raises:
        UserError: for a path that ends in white space, which Megatron-LM strips, or imported files.
    """
    return _json(_words_per_split(mixture))


def write_automodel(mixture: Mixture, _split: Split) -> str:
    """Format the JSON of Automodel's ``paths``: split -> arguments, for splits that have text.

    Raises:
        UserError: as :func:`write_per_split`.
    """
    listed = _words_per_split(mixture)
    named = {name: listed[split] for name, split in list(AUTOMODEL_SPLITS.items())[: len(SPLITS)]}
    return _json({name: arguments for name, arguments in named.items() if arguments})


def write_bridge(mixture: Mixture, _split: Split) -> str:
    """Format keyword arguments of Megatron Bridge's ``GPTDatasetConfig`` as JSON.

    ``blend_per_split`` has the list of prefixes and the list of weights for train, valid and test;
    ``blend`` and ``split`` must then be null, whatever the recipe sets. For imported files,
    ``blend`` and ``split`` are set instead. If only training files are known, ``blend`` is set, and
    the recipe's ``split`` applies.

    Raises:
        UserError: for a path that ends in white space, which Megatron strips.
    """
    divided = split_option(mixture)
    if divided is not None or not any(
        split in source.files for source in (mixture.sources or {}).values() for split in SPLITS[1:]
    ):
        body = {"blend": _blend(mixture, "train"), "blend_per_split": None}
        return _json(body if divided is None else {**body, "split": divided})
    blends = [_blend(mixture, split) for split in SPLITS]
    return _json({"blend": None, "blend_per_split": blends, "split": None})


def split_option(mixture: Mixture) -> str | None:
    """Megatron's ``--split`` for the sampled domains; None if each split has its own files.

    Raises:
        UserError: if the sampled domains differ in it.
    """
    sources = mixture.sources or {}
    found = {
        sources[name].split: name
        for name, weight in mixture.weights.items()
        if weight > 0 and name in sources
    }
    if len(found) > 1:
        one, other = list(found.values())[:2]
        raise UserError(
            f"'{one}' and '{other}' are divided into splits differently, which Megatron "
            "cannot express; use --format csv, or set one of the weights to 0"
        )
    return next(iter(found), None)


def sampled_from(mixture: Mixture, split: Split) -> dict[str, tuple[float, list[str]]]:
    """Return weight and files of each domain with a weight above 0 and text in ``split``.

    Domains without valid or test tokens are left out, which raises the shares of the remaining
    domains.

    Raises:
        UserError: if the files of a domain are unknown, or if it has no training tokens.
    """
    sources = mixture.sources or {}
    sampled = {name: weight for name, weight in mixture.weights.items() if weight > 0}
    if unknown := [name for name in sampled if name not in sources or not sources[name].files]:
        raise UserError(
            f"the format lists files, and the mixture has none of {quoted(unknown)}; pass --corpus"
        )
    files = {name: sources[name].files.get(split, []) for name in sampled}
    empty = [name for name in sampled if not files[name]]
    if empty and split == "train":
        raise UserError(
            f"the mixture gives '{empty[0]}' a weight, but the corpus has no training tokens "
            "of this domain; add text, or set its weight to 0"
        )
    left = {name: weight for name, weight in sampled.items() if files[name]}
    if empty:
        warnings.warn(
            f"no {split} tokens of {', '.join(empty)}: left out of {split}; their weight goes to "
            "the other domains",
            MixtureWarning,
            stacklevel=2,
        )
        total = math.fsum(left.values())
        left = {name: weight / total for name, weight in left.items()}
    return {name: (weight, files[name]) for name, weight in left.items()}


def words(mixture: Mixture, split: Split) -> list[str]:
    """List the weight and prefix of each domain in turn, for the files of ``split``.

    Raises:
        UserError: for files that Megatron cannot read.
    """
    listed = []
    for name, (weight, files) in sampled_from(mixture, split).items():
        if len(files) > 1 or not files[0].endswith(TOKENS_SUFFIX):
            raise UserError(
                f"'{name}' has the files {quoted(files)}, but Megatron reads one .bin file with "
                "its .idx; pass --corpus with Megatron's files"
            )
        prefix = files[0].removesuffix(TOKENS_SUFFIX)
        if prefix != prefix.strip():
            raise UserError(
                f"'{prefix}.bin': Megatron strips white space at the end of a path; rename the file"
            )
        listed += [repr(weight), prefix]
    return listed


def _words_per_split(mixture: Mixture) -> dict[Split, list[str] | None]:
    if (divided := split_option(mixture)) is not None:
        raise UserError(
            "the splits of imported files are not in separate files; use --format "
            f"megatron-data-args, and pass --split {divided} to Megatron-LM"
        )
    return {split: words(mixture, split) or None for split in SPLITS}


def _blend(mixture: Mixture, split: Split) -> list[list[Any]] | None:
    """List the prefixes and the weights of ``split``; None without text."""
    listed = words(mixture, split)
    return [listed[1::2], [float(weight) for weight in listed[::2]]] if listed else None


def _bare_words(mixture: Mixture, split: Split, unsafe: re.Pattern[str]) -> list[str]:
    if (divided := split_option(mixture)) is not None:
        warnings.warn(
            f"Megatron must divide the files as the corpus does: pass --split {divided}",
            stacklevel=2,
        )
    listed = words(mixture, split)
    if not listed:
        raise UserError(
            f"no domain with a weight above 0 has {split} tokens; preprocess again with a "
            f"larger share of {split} in --split"
        )
    for prefix in listed[1::2]:
        if found := unsafe.search(prefix):
            raise UserError(
                f"{prefix}: {found[0]!r} in a path is not preserved in this format; use --format "
                "megatron-per-split, which takes any path, or move the corpus"
            )
    return listed


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
