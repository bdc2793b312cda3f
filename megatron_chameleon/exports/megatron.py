"""Megatron-LM's and Megatron Bridge's blends of .bin/.idx files.

The corpus has train, valid and test in files of their own, so nothing may be cut out of them by
``--split``: a training run takes the forms for all splits, or one form a split.
"""

from __future__ import annotations

import json
import re

from megatron_chameleon.artifacts import SPLITS, Split
from megatron_chameleon.errors import UserError
from megatron_chameleon.exports.content import Export

# What takes a word apart, or turns it into another, in $(...) or between double quotes.
UNSAFE_IN_SHELL = re.compile(r"""[\s*?\[\\$`"']""")
# Megatron-LM splits what is in the file at white space, and takes no quotes.
UNSAFE_IN_ARGS_FILE = re.compile(r"\s")


def data_path(export: Export) -> str:
    """``WEIGHT PREFIX WEIGHT PREFIX ...`` on one line, as ``--train-data-path`` takes them.

    Raises:
        UserError: for a path that a shell or Megatron-LM would take apart.
    """
    return " ".join(_bare_words(export, UNSAFE_IN_SHELL)) + "\n"


def data_args(export: Export) -> str:
    """The same words for ``--data-args-path``, a weight and a prefix a line.

    Raises:
        UserError: for a path with white space, at which Megatron-LM would take it apart.
    """
    words = _bare_words(export, UNSAFE_IN_ARGS_FILE)
    lines = zip(words[::2], words[1::2], strict=True)
    return "".join(f"{weight} {prefix}\n" for weight, prefix in lines)


def per_split(export: Export) -> str:
    """The JSON of ``--per-split-data-args-path``: split -> its words, or null if it has no text.

    The words are a list, which Megatron-LM takes as it is, white space in paths included.

    Raises:
        UserError: for a path that ends in white space, which Megatron-LM removes.
    """
    return _json({split: _words(export, split) or None for split in SPLITS})


def bridge(export: Export) -> str:
    """Keyword arguments of Megatron Bridge's ``GPTDatasetConfig``, as JSON.

    ``blend_per_split`` has, for train, valid and test, the list of prefixes and that of weights;
    ``blend`` and ``split`` must be null beside it, whatever a recipe had put there.

    Raises:
        UserError: for a path that ends in white space, which Megatron removes.
    """
    blends = []
    for split in SPLITS:
        words = _words(export, split)
        blends.append([words[1::2], [float(weight) for weight in words[::2]]] if words else None)
    return _json({"blend": None, "blend_per_split": blends, "split": None})


def _words(export: Export, split: Split) -> list[str]:
    """Weight, prefix, weight, prefix ... of the files of ``split``."""
    words = []
    for domain in export.drawn_from(split):
        prefix = domain.prefixes[split]
        if prefix != prefix.strip():
            raise UserError(
                f"'{prefix}.bin': Megatron takes no path that ends in white space; rename the file"
            )
        words += [repr(domain.weight), prefix]
    return words


def _bare_words(export: Export, unsafe: re.Pattern[str]) -> list[str]:
    words = _words(export, export.split)
    if not words:
        raise UserError(
            f"no domain with a weight has {export.split} tokens; preprocess with a --split that "
            "leaves some"
        )
    for prefix in words[1::2]:
        if found := unsafe.search(prefix):
            raise UserError(
                f"{prefix}: {found[0]!r} in a path does not survive in this form; use --format "
                "megatron-per-split, which takes any path, or move the corpus"
            )
    return words


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
