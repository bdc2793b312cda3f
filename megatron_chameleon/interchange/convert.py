"""Convert a mixture: read it, match its domains with a corpus, and write another format."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    DomainSource,
    Mixture,
    MixtureStage,
    MixtureWarning,
    provenance,
)
from megatron_chameleon.artifacts.files import replacing, require_new, sha256_of_files, writing
from megatron_chameleon.artifacts.mixture import BRIDGE_SUFFIX
from megatron_chameleon.errors import UserError, quoted
from megatron_chameleon.interchange.amounts import mixture_of, token_amounts
from megatron_chameleon.interchange.formats import FORMATS, read_mixture, write_mixture
from megatron_chameleon.interchange.megatron import split_option, words
from megatron_chameleon.interchange.options import ConvertOptions
from megatron_chameleon.storage import absolute

# Longer arguments are written to a file instead of being printed.
MAX_LINE = 1000


def convert_mixture(options: ConvertOptions) -> None:
    """Write or print the mixture in the requested format.

    Raises:
        UserError: if the mixture cannot be read, does not match the corpus, or has a part that the
            format cannot hold; or if the output cannot be written.
    """
    if options.output is not None and not options.overwrite:
        require_new([options.output], "choose another --output or pass --overwrite")
    text = converted_text(options)
    if options.output is None:
        sys.stdout.write(text)
        return
    _write(options.output, text)
    print(f"written to {options.output}")


def converted_text(options: ConvertOptions) -> str:
    """Return the text that :func:`convert_mixture` writes.

    Raises:
        UserError: as :func:`convert_mixture`.
    """
    corpus = None if options.corpus is None else Corpus.load(options.corpus)
    mixture = _mixture_of(options, corpus)
    mixture = renamed(mixture, options.renames)
    if options.at_step is not None:
        mixture = without_results(mixture.at_step(options.at_step))
    if options.drop_max_repetition:
        mixture = dataclasses.replace(mixture, max_repetition=None)
    if corpus is not None:
        # Raises for a name that the corpus does not have, and warns of a domain without weight.
        mixture.weights_for(corpus.names, str(corpus.root), corpus.held_out)
        mixture = with_corpus(mixture, corpus)
    if options.token_budget is not None:
        mixture = dataclasses.replace(mixture, token_budget=options.token_budget)
    if options.mixture is None and not FORMATS[options.format].has_budget:
        warnings.warn(
            f"--format {options.format} holds the shares of the tokens, but not their number: "
            f"train on {mixture.token_budget:,} tokens",
            MixtureWarning,
            stacklevel=2,
        )
    return write_mixture(mixture, options.format, split=options.split or "train")


def _mixture_of(options: ConvertOptions, corpus: Corpus | None) -> Mixture:
    """Return the mixture of ``--mixture``, ``--tokens`` or ``--epochs``, with its provenance."""
    if options.mixture is None:
        sizes, where = (corpus.train_tokens, str(corpus.root)) if corpus else ({}, "")
        _, amounts = token_amounts(options.tokens, options.epochs, sizes, where)
        return dataclasses.replace(
            mixture_of(amounts),
            parameters={"tokens": amounts},
            provenance=provenance(options, {"corpus": corpus.hash} if corpus else {}),
        )
    try:
        mixture = read_mixture(
            options.mixture, options.mixture_format, split=options.split, corpus=corpus
        )
    except UserError as error:
        if options.mixture_format != "json" or not options.mixture.is_file():
            raise
        others = ", ".join(name for name in FORMATS if name != "json")
        raise UserError(
            f"{error}; if the file has another format, pass --mixture-format with one of {others}"
        ) from error
    if options.mixture_format == "json":
        return mixture
    inputs = {"mixture": sha256_of_files(options.mixture)}
    source = {"file": str(options.mixture), "format": options.mixture_format}
    return dataclasses.replace(mixture, parameters=source, provenance=provenance(options, inputs))


def renamed(mixture: Mixture, renames: Sequence[str]) -> Mixture:
    """Rename domains; each of ``renames`` is OLD=NEW.

    Raises:
        UserError: for an unknown OLD, or if two domains would have the same name.
    """
    table = {name: name for name in mixture.weights}
    for rename in renames:
        old, _, new = rename.partition("=")
        if table.get(old) != old or not new:  # unknown, or renamed before
            raise UserError(
                f"--rename {rename}: must be OLD=NEW, once for each OLD of {quoted(list(table))}"
            )
        table[old] = new
    if len(set(table.values())) < len(table):
        twice = Counter(table.values()).most_common(1)[0][0]
        raise UserError(f"--rename: two domains would be called '{twice}'; choose other names")
    if not renames:
        return mixture
    stages = [
        MixtureStage(stage.step, {table[name]: w for name, w in stage.weights.items()})
        for stage in mixture.stages or ()
    ]
    caps, sources = mixture.max_repetition, mixture.sources
    return dataclasses.replace(
        without_results(mixture),
        weights={table[name]: weight for name, weight in mixture.weights.items()},
        stages=stages or None,
        max_repetition=caps and {table[name]: cap for name, cap in caps.items()},
        sources=sources and {table[name]: source for name, source in sources.items()},
    )


def without_results(mixture: Mixture) -> Mixture:
    """Leave out the method's results, which refer to other names or weights."""
    empty: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Mixture)}
    results = ("scores", "intervals", "confidence", "outweighs", "affinity", "epochs", "max_epochs")
    changed = {name: empty[name] for name in (*results, "unconstrained", "capped")}
    return dataclasses.replace(mixture, **changed)


def with_corpus(mixture: Mixture, corpus: Corpus) -> Mixture:
    """Return the mixture of all domains of ``corpus``, with their files and tokens.

    The weight of a domain that the mixture does not have is 0.
    """
    if set(mixture.weights) != set(corpus.names):
        mixture = without_results(mixture)
    sources = {}
    for name in corpus.names:
        domain = corpus.domains[name]
        tokens = {split: domain.split(split).tokens for split in SPLITS}
        files = {
            split: [f"{absolute(str(corpus.prefix(name, split)))}.bin"] if tokens[split] else []
            for split in SPLITS
        }
        imported = domain.imported.split if domain.imported else None
        sources[name] = DomainSource(files, tokens, imported)
    stages = [
        MixtureStage(stage.step, {name: stage.weights.get(name, 0.0) for name in corpus.names})
        for stage in mixture.stages or ()
    ]
    weights = {name: mixture.weights.get(name, 0.0) for name in corpus.names}
    return dataclasses.replace(mixture, weights=weights, stages=stages or None, sources=sources)


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
    split, note = "", ""
    if corpus is None:
        # Megatron must not divide the files of an unknown corpus, so they have one split.
        named = {name: DomainSource({"train": [f"{name}.bin"]}) for name in mixture.weights}
        mixture = dataclasses.replace(mixture, sources=named)
        note = " (replace each name by the prefix of its .bin and .idx files)"
    else:
        mixture = with_corpus(mixture, corpus)
    bridge_path = output.with_name(f"{output.stem}{BRIDGE_SUFFIX}")
    arguments_path = output.with_name(f"{output.stem}.data-args.txt")
    for path in (bridge_path, arguments_path):
        with writing(path):
            path.unlink(missing_ok=True)  # of the mixture that was replaced
    try:
        bridge = write_mixture(mixture, "megatron-bridge")
        if corpus is not None:
            # Without --split, Megatron would divide the training files again.
            split = f" --split {split_option(mixture) or '100,0,0'}"
    except UserError as error:
        return [f"no blend for Megatron: {error}"]
    _write(bridge_path, bridge)
    arguments = f"--data-path {shlex.join(words(mixture, 'train'))}"
    if len(arguments) > MAX_LINE:
        try:
            _write(arguments_path, write_mixture(mixture, "megatron-data-args"))
            arguments = f"--data-args-path {shlex.quote(str(arguments_path))}"
        except UserError as error:
            arguments, split = f"no file of arguments: {error}", ""
    return [
        f"for Megatron Bridge: {bridge_path}{note}",
        f"for Megatron-LM: {arguments}{split}{note}",
    ]


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")
