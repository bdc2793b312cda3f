"""What tools/discover_domains.py was asked for, with the artifacts it names, all checked."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import SPLITS, Corpus, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.checkpoint.reader import require_tokenizer, shape_of
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.corpus.options import is_domain_name
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.embedding.documents import DocumentRecipe, DocumentVectors
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.chosen import chosen_domains
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import check_layer, check_window
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.discover import DiscoverOptions
from megatron_chameleon.options.ranges import check_ranges


@dataclasses.dataclass(frozen=True)
class DiscoverPlan:
    """The options with the artifacts they name, all checked."""

    options: DiscoverOptions
    corpus: Corpus
    names: list[str]
    """The domains that are divided."""
    numbers: list[int]
    """Of clusters, each to be tried, rising."""
    checkpoint: CheckpointRecord
    shape: ModelShape
    vectors: DocumentVectors
    provenance: Provenance


def plan_discovery(options: DiscoverOptions) -> DiscoverPlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    check_ranges(options)
    numbers = cluster_numbers(options.discover)
    if Corpus.exists(options.output):
        raise UserError(f"{options.output} already holds a corpus; choose another --output")
    corpus = Corpus.load(options.corpus)
    checkpoint = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(checkpoint, corpus)
    names = chosen_domains(options.domains, corpus)
    _check_names(options, corpus, names, numbers)
    _check_documents(corpus, names, numbers)
    _check_tokens(corpus, names, options.min_tokens_per_split)
    if numbers[-1] > options.embedding.fit_windows:
        raise UserError(
            f"--fit-windows {options.embedding.fit_windows}: fewer than the {numbers[-1]} clusters "
            "of --discover; give more"
        )
    corpus_tokenizer(corpus)  # it is needed in the end: a missing file shows at once
    shape = shape_of(checkpoint)
    embedding = options.embedding
    recipe = DocumentRecipe(
        model_hash=checkpoint.hash,
        layer=check_layer(shape, embedding.layer),
        window_length=check_window(shape, embedding.window_length),
        windows_per_document=embedding.windows_per_document,
    )
    check_model_layout(shape.size, options.parallel, recipe.window_length)
    store = options.store or options.output.with_name(f"{options.output.name}.embeddings")
    inputs = {"corpus": corpus.hash, "checkpoint": checkpoint.hash}
    return DiscoverPlan(
        options=options,
        corpus=corpus,
        names=names,
        numbers=numbers,
        checkpoint=checkpoint,
        shape=shape,
        vectors=DocumentVectors(store, corpus, recipe, shape.size.hidden_size),
        provenance=provenance(options, inputs),
    )


def cluster_numbers(given: str) -> list[int]:
    """The numbers in ``given``, such as 4,8,16, each once and rising.

    Raises:
        UserError: unless they are whole numbers from 2 on.
    """
    try:
        numbers = sorted({int(part) for part in given.split(",")})
    except ValueError:
        raise UserError(
            f"--discover {given}: give a number of clusters, or several as in 4,8,16"
        ) from None
    if numbers[0] < 2:
        raise UserError(
            f"--discover {given}: {numbers[0]} divides nothing; give 2 or more clusters"
        )
    return numbers


def _check_names(
    options: DiscoverOptions, corpus: Corpus, names: list[str], numbers: list[int]
) -> None:
    name = options.cluster_name
    if not is_domain_name(name) or not name.isprintable() or "," in name:
        raise UserError(
            f"--cluster-name {options.cluster_name!r}: give a name of a domain, on one line and "
            "without commas"
        )
    new = set(cluster_names(options.cluster_name, numbers[-1], numbers[-1]))
    taken = [name for name in corpus.names if name in new and name not in names]
    if taken:
        raise UserError(
            f"--cluster-name {options.cluster_name}: the corpus keeps a domain '{taken[0]}'; give "
            "another name"
        )


def cluster_names(name: str, count: int, most: int) -> list[str]:
    """``name-00``, ``name-01`` and so on, with the digits that ``most`` of them need, 2 at least.

    Of those that are checked before anything is embedded, whatever number is left in the end.
    """
    digits = max(2, len(str(most - 1)))
    return [f"{name}-{number:0{digits}d}" for number in range(count)]


def _check_documents(corpus: Corpus, names: list[str], numbers: list[int]) -> None:
    """Every cluster could have a document, and every document a window."""
    documents = sum(corpus.domains[name].train.documents for name in names)
    if numbers[-1] > documents:
        raise UserError(
            f"--discover {numbers[-1]}: there are {documents} training documents to divide; give "
            "fewer clusters"
        )
    for name in names:
        for split in SPLITS:
            lengths = open_tokens(corpus, name, split).lengths
            if len(lengths) and lengths.min() == 0:
                raise UserError(
                    f"{corpus.prefix(name, split)}.idx has a document without tokens, which has no "
                    "embedding; preprocess again"
                )


def _check_tokens(corpus: Corpus, names: list[str], least: int) -> None:
    """Two clusters could have ``least`` tokens in each split."""
    for split in SPLITS:
        tokens = sum(corpus.domains[name].split(split).tokens for name in names)
        if tokens < 2 * least:
            raise UserError(
                f"--min-tokens-per-split {least}: the text to divide has {tokens} {split} tokens, "
                "too few for two clusters; give a smaller number, or a corpus with more"
            )
