"""Mixtures in the formats of other trainers, for export_mixture. Loads no torch.

Each split of a corpus has its own files, so Megatron must not divide them again with ``--split``.
Export either a format that lists all splits, or one file per split (:attr:`ExportOptions.split`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_chameleon.artifacts import SPLITS, Corpus, Mixture, MixtureWarning, Split
from megatron_chameleon.artifacts.files import replacing, require_new, writing
from megatron_chameleon.artifacts.mixture import BRIDGE_SUFFIX
from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import CheckedOptions, LargeCount
from megatron_chameleon.storage import absolute

ExportFormat = Literal[
    "megatron-data-path",
    "megatron-data-args",
    "megatron-per-split",
    "megatron-bridge",
    "torchtitan",
    "olmo-core",
    "litgpt",
    "csv",
    "json",
]
# Option -> formats to which the option applies.
APPLIES_TO: dict[str, tuple[ExportFormat, ...]] = {
    "split": ("megatron-data-path", "megatron-data-args", "olmo-core"),
    "token_budget": ("olmo-core",),
}
# Characters at which a shell splits or changes a path in $(...) or double quotes.
UNSAFE_IN_SHELL = re.compile(r"""[\s*?\[\\$`"']""")
# Megatron-LM splits the content of a --data-args-path file at white space and has no quoting.
UNSAFE_IN_ARGS_FILE = re.compile(r"\s")
# Longer arguments are written to a file instead of being printed.
MAX_LINE = 1000
_ONLY_TRAIN: dict[Split, int] = {"train": 1, "valid": 0, "test": 0}


@dataclasses.dataclass(frozen=True)
class ExportOptions(CheckedOptions):
    """Write a mixture in another trainer's format. Paths are absolute, and weights are exact.

    Raises:
        UserError: for an option that does not apply to the format, or a number out of range.
    """

    mixture: Path
    """A mixture.json, from compute_mixture or written by hand."""
    corpus: Path
    """Folder written by preprocess_data, with the mixture's domains."""
    format: ExportFormat
    """'megatron-data-path': the arguments of --data-path or --train-data-path, on one line.

    'megatron-data-args': the same arguments for --data-args-path, one domain per line.

    'megatron-per-split': a file for --per-split-data-args-path, with train, valid and test.

    'megatron-bridge': the blend_per_split of Megatron Bridge's GPTDatasetConfig.

    'torchtitan': the sources of its InterleavedHuggingFaceTextDataLoader.

    'olmo-core': OLMo-core's SourceMixtureList.

    'litgpt': arguments of CombinedStreamingDataset, with which litgpt's data modules mix text.

    'csv' and 'json': a table of all domains."""
    output: Path | None = None
    """The file to write; default: standard output."""
    overwrite: bool = False
    """Replace an existing output file."""
    split: Literal["train", "valid", "test"] | None = None
    """The split whose files megatron-data-path, megatron-data-args and olmo-core list; default:
    train. The other formats list either all splits or none."""
    token_budget: LargeCount | None = None
    """Training tokens; only for olmo-core, which computes its limit on repeated text from this
    number; default: the token budget of the mixture."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        for name, formats in APPLIES_TO.items():
            if self.format not in formats:
                self.reject_changed([name], f"applies only to --format {', '.join(formats)}")
        if self.output is not None and self.output.resolve() == self.mixture.resolve():
            raise UserError(f"--output {self.output} is the mixture itself; choose another name")


@dataclasses.dataclass(frozen=True)
class WeightedDomain:
    """A domain of the corpus.

    Attributes:
        name: name in the corpus.
        weight: share of the sampled tokens; sums to 1 over domains, may be 0.
        tokens: split -> tokens.
        prefixes: split -> absolute path of its .bin and .idx files, without the suffix.
        megatron_split: Megatron's ``--split`` that divides the files of an imported domain; None if
            each split has its own files.
    """

    name: str
    weight: float
    tokens: dict[Split, int]
    prefixes: dict[Split, str]
    megatron_split: str | None = None


@dataclasses.dataclass(frozen=True)
class Export:
    """The domains and settings from which an export is written.

    Attributes:
        domains: all domains of the corpus, in its order.
        split: split to list, for formats that list a single split.
        token_budget: training tokens, if known.
    """

    domains: tuple[WeightedDomain, ...]
    split: Split = "train"
    token_budget: int | None = None

    def sampled(self) -> list[WeightedDomain]:
        """The domains with a weight above 0; most readers reject a weight of 0."""
        return [domain for domain in self.domains if domain.weight > 0]

    @property
    def megatron_split(self) -> str | None:
        """Megatron's ``--split`` for the sampled domains; None if each split has its own files.

        Raises:
            UserError: if the sampled domains differ in it.
        """
        found = {domain.megatron_split: domain.name for domain in self.sampled()}
        if len(found) > 1:
            one, other = list(found.values())[:2]
            raise UserError(
                f"'{one}' and '{other}' are divided into splits differently, which Megatron "
                "cannot express; use --format csv, or set one of the weights to 0"
            )
        return next(iter(found), None)

    def sampled_from(self, split: Split) -> list[WeightedDomain]:
        """The domains with a weight above 0 and tokens in ``split``.

        Domains without valid or test tokens are left out, which raises the shares of the remaining
        domains.

        Raises:
            UserError: for a domain with a weight above 0 and no training tokens.
        """
        sampled = self.sampled()
        empty = [domain.name for domain in sampled if domain.tokens[split] == 0]
        if empty and split == "train":
            raise UserError(
                f"the mixture gives '{empty[0]}' a weight, but the corpus has no training tokens "
                "of this domain; add text, or set its weight to 0"
            )
        if not empty:
            return sampled
        warnings.warn(
            f"no {split} tokens of {', '.join(empty)}: left out of {split}; their weight goes to "
            "the other domains",
            MixtureWarning,
            stacklevel=2,
        )
        left = [domain for domain in sampled if domain.tokens[split] > 0]
        total = math.fsum(domain.weight for domain in left)
        return [dataclasses.replace(domain, weight=domain.weight / total) for domain in left]


def export_mixture(options: ExportOptions) -> None:
    """Write or print the mixture in the requested format.

    Raises:
        UserError: for a mixture and a corpus that do not match, a path that the format cannot
            hold, or a file that cannot be written.
    """
    if options.output is not None and not options.overwrite:
        require_new([options.output], "choose another --output or pass --overwrite")
    text = exported_text(options)
    if options.output is None:
        sys.stdout.write(text)
        return
    _write(options.output, text)
    print(f"written to {options.output}")


def exported_text(options: ExportOptions) -> str:
    """Return the text that :func:`export_mixture` writes.

    Raises:
        UserError: as :func:`export_mixture`, or for a weight on a domain that the corpus does not
            have.
    """
    mixture, corpus = Mixture.load(options.mixture), Corpus.load(options.corpus)
    weights = mixture.weights_for(corpus.names, str(corpus.root))
    domains = _weighted_domains(corpus, weights)
    budget = mixture.token_budget if options.token_budget is None else options.token_budget
    return FORMATS[options.format](Export(domains, options.split or "train", budget))


def write_blend(output: Path, mixture: Mixture, corpus: Corpus | None) -> list[str]:
    """Write Megatron Bridge's blend next to the mixture ``output``.

    Args:
        output: path of the mixture; ``mixture.json`` has its blend in ``mixture.bridge.json``.
        mixture: weights of domains.
        corpus: corpus of these domains; without a corpus, domain names are in place of prefixes.

    Returns:
        Lines to print: the path of the blend, and the arguments of Megatron-LM's ``--data-path``.
        Arguments of more than ``MAX_LINE`` characters are written to ``mixture.data-args.txt``. If
        Megatron cannot express the mixture, the reason.
    """
    if corpus is None:
        export = Export(
            tuple(
                # Any number of training tokens except 0.
                WeightedDomain(name, weight, _ONLY_TRAIN, dict.fromkeys(SPLITS, name))
                for name, weight in mixture.weights.items()
            )
        )
        note = " (replace each name by the prefix of its .bin and .idx files)"
        split = ""
    else:
        weights = [mixture.weights.get(name, 0.0) for name in corpus.names]
        export, note = Export(_weighted_domains(corpus, weights)), ""
    bridge_path = output.with_name(f"{output.stem}{BRIDGE_SUFFIX}")
    arguments_path = output.with_name(f"{output.stem}.data-args.txt")
    for path in (bridge_path, arguments_path):
        with writing(path):
            path.unlink(missing_ok=True)  # of the mixture that was replaced
    try:
        if corpus is None:
            bridge = _json({"blend": _blend(export, "train"), "blend_per_split": None})
        else:
            bridge = megatron_bridge(export)
            # Without --split, Megatron would divide the training files again.
            split = f" --split {export.megatron_split or '100,0,0'}"
    except UserError as error:
        return [f"no blend for Megatron: {error}"]
    _write(bridge_path, bridge)
    arguments = f"--data-path {shlex.join(_words(export, 'train'))}"
    if len(arguments) > MAX_LINE:
        try:
            _write(arguments_path, megatron_data_args(export))
            arguments = f"--data-args-path {shlex.quote(str(arguments_path))}"
        except UserError as error:
            arguments, split = f"no file of arguments: {error}", ""
    return [
        f"for Megatron Bridge: {bridge_path}{note}",
        f"for Megatron-LM: {arguments}{split}{note}",
    ]


def _weighted_domains(corpus: Corpus, weights: Sequence[float]) -> tuple[WeightedDomain, ...]:
    return tuple(
        WeightedDomain(
            name,
            weight,
            {split: corpus.domains[name].split(split).tokens for split in SPLITS},
            {split: absolute(str(corpus.prefix(name, split))) for split in SPLITS},
            file.split if (file := corpus.domains[name].imported) else None,
        )
        for name, weight in zip(corpus.names, weights, strict=True)
    )


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def megatron_data_path(export: Export) -> str:
    """Format ``WEIGHT PREFIX WEIGHT PREFIX ...`` on one line, for ``--train-data-path``.

    Raises:
        UserError: for a path that a shell or Megatron-LM would split.
    """
    return " ".join(_bare_words(export, UNSAFE_IN_SHELL)) + "\n"


def megatron_data_args(export: Export) -> str:
    """Format the file for ``--data-args-path``, with a weight and a prefix per line.

    Raises:
        UserError: for a path with white space, at which Megatron-LM would split it.
    """
    words = _bare_words(export, UNSAFE_IN_ARGS_FILE)
    lines = zip(words[::2], words[1::2], strict=True)
    return "".join(f"{weight} {prefix}\n" for weight, prefix in lines)


def megatron_per_split(export: Export) -> str:
    """Format the JSON for ``--per-split-data-args-path``: split -> arguments; null if empty.

    The arguments are a list, so that paths may contain white space.

    Raises:
        UserError: for a path that ends in white space, which Megatron-LM strips, or imported files.
    """
    if export.megatron_split is not None:
        raise UserError(
            "the splits of imported files are not in separate files; use --format "
            f"megatron-data-args, and pass --split {export.megatron_split} to Megatron-LM"
        )
    return _json({split: _words(export, split) or None for split in SPLITS})


def megatron_bridge(export: Export) -> str:
    """Format keyword arguments of Megatron Bridge's ``GPTDatasetConfig`` as JSON.

    ``blend_per_split`` has the list of prefixes and the list of weights for train, valid and test;
    ``blend`` and ``split`` must then be null, whatever the recipe sets. For imported files,
    ``blend`` and ``split`` are set instead.

    Raises:
        UserError: for a path that ends in white space, which Megatron strips.
    """
    if (split_option := export.megatron_split) is not None:
        blend = _blend(export, "train")
        return _json({"blend": blend, "blend_per_split": None, "split": split_option})
    blends = [_blend(export, split) for split in SPLITS]
    return _json({"blend": None, "blend_per_split": blends, "split": None})


def _blend(export: Export, split: Split) -> list[list[Any]] | None:
    """List the prefixes and the weights of ``split``; None without text."""
    words = _words(export, split)
    return [words[1::2], [float(weight) for weight in words[::2]]] if words else None


def _words(export: Export, split: Split) -> list[str]:
    """List the weight and prefix of each domain in turn, for the files of ``split``."""
    words = []
    for domain in export.sampled_from(split):
        prefix = domain.prefixes[split]
        if prefix != prefix.strip():
            raise UserError(
                f"'{prefix}.bin': Megatron strips white space at the end of a path; rename the file"
            )
        words += [repr(domain.weight), prefix]
    return words


def _bare_words(export: Export, unsafe: re.Pattern[str]) -> list[str]:
    if (split_option := export.megatron_split) is not None:
        warnings.warn(
            f"Megatron must divide the files as the corpus does: pass --split {split_option}",
            stacklevel=2,
        )
    words = _words(export, export.split)
    if not words:
        raise UserError(
            f"no domain with a weight above 0 has {export.split} tokens; preprocess again with a "
            f"larger share of {export.split} in --split"
        )
    for prefix in words[1::2]:
        if found := unsafe.search(prefix):
            raise UserError(
                f"{prefix}: {found[0]!r} in a path is not preserved in this format; use --format "
                "megatron-per-split, which takes any path, or move the corpus"
            )
    return words


def torchtitan(export: Export) -> str:
    """Format JSON whose ``sources`` has the keyword arguments of one ``HFDataSource`` per domain.

    ``InterleavedHuggingFaceTextDataLoader`` samples packed sequences by these weights, so they are
    shares of the tokens. torchtitan reads text, not .bin files: each domain must be registered in
    its ``DATASETS``, which it looks up in lower case.

    Raises:
        UserError: for two domains whose names differ in case only.
    """
    sampled = export.sampled()
    names: dict[str, str] = {}
    for domain in sampled:
        other = names.setdefault(domain.name.lower(), domain.name)
        if other != domain.name:
            raise UserError(
                f"'{other}' and '{domain.name}' are the same name for torchtitan, which ignores "
                "case; rename one of them when preprocessing (--rename-domain)"
            )
    listed = [{"dataset": domain.name.lower(), "weight": domain.weight} for domain in sampled]
    return _json({"sources": listed})


def olmo_core(export: Export) -> str:
    """Format a ``SourceMixtureList`` as JSON, with the .bin files of the corpus.

    OLMo-core reads these files as they are: token ids without a header, each document ended by the
    end-of-document token. Its ``dtype`` is ``uint16`` or ``uint32``; int32 files are read as
    ``uint32``, since no id is negative. With a token budget, ``max_repetition_ratio`` is the number
    of epochs over the domain, rounded up; without it no text is repeated.

    Raises:
        UserError: for a path that OLMo-core would read as a pattern, or a split without text.
    """
    sampled = export.sampled_from(export.split)
    if not sampled:
        raise UserError(f"no domain with a weight above 0 has {export.split} tokens")
    sources = []
    for domain in sampled:
        path = f"{domain.prefixes[export.split]}.bin"
        if "*" in path:
            raise UserError(f"{path}: OLMo-core reads '*' as a pattern; move the corpus")
        if domain.megatron_split is not None:
            warnings.warn(
                f"OLMo-core reads the whole {path}, including its valid and test text", stacklevel=2
            )
        source: dict[str, Any] = {
            "source_name": domain.name,
            "target_ratio": domain.weight,
            "paths": [path],
        }
        if export.token_budget is not None:
            epochs = export.token_budget * domain.weight / domain.tokens[export.split]
            source["max_repetition_ratio"] = float(max(1, math.ceil(epochs)))
        sources.append(source)
    return _json({"sources": sources})


def litgpt(export: Export) -> str:
    """Format arguments of litdata's ``CombinedStreamingDataset`` as JSON, with domain names.

    litdata reads its own chunks, not .bin files: replace each domain's name by a
    ``StreamingDataset``. ``iterate_over_all`` is false because litdata rejects weights otherwise.
    """
    sampled = export.sampled()
    arguments = {
        "datasets": [domain.name for domain in sampled],
        "weights": [domain.weight for domain in sampled],
        "iterate_over_all": False,
    }
    return _json(arguments)


def csv_table(export: Export) -> str:
    """Format as CSV (RFC 4180) with a header: domain, weight, tokens and prefixes."""
    import pandas as pd

    table: str = pd.DataFrame(_rows(export)).to_csv(index=False, lineterminator="\n")
    return table


def json_table(export: Export) -> str:
    """Format the rows of the CSV format as a JSON list of objects."""
    return _json(_rows(export))


def _rows(export: Export) -> list[dict[str, Any]]:
    """One row per domain of the corpus, including domains without weight."""
    return [
        {"domain": domain.name, "weight": domain.weight}
        | {f"{split}_tokens": domain.tokens[split] for split in SPLITS}
        | {f"{split}_prefix": domain.prefixes[split] for split in SPLITS}
        for domain in export.domains
    ]


FORMATS: dict[ExportFormat, Callable[[Export], str]] = {
    "megatron-data-path": megatron_data_path,
    "megatron-data-args": megatron_data_args,
    "megatron-per-split": megatron_per_split,
    "megatron-bridge": megatron_bridge,
    "torchtitan": torchtitan,
    "olmo-core": olmo_core,
    "litgpt": litgpt,
    "csv": csv_table,
    "json": json_table,
}
