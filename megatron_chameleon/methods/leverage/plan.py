"""What tools/compute_mixture.py was asked for, with the artifacts it names, all checked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe, Mixture, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.mixture import KIND
from megatron_chameleon.artifacts.output_path import check_output
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.checkpoint.load import require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.common.check_text import check_text
from megatron_chameleon.methods.common.chosen import chosen_domains
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.methods.leverage.target import Target, resolve_target
from megatron_chameleon.mixture import Recipe, resolve_recipe
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import check_layer, check_window
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from megatron_chameleon.options.ranges import check_ranges


@dataclasses.dataclass(frozen=True)
class MixturePlan:
    """The options with the artifacts they name, all checked."""

    options: ChameleonOptions
    corpus: Corpus
    names: list[str]
    """The domains that are weighed."""
    kept: Mixture | None
    """Its domains keep their ratios."""
    target: Target | None
    """What the mixture is for."""
    checkpoint: CheckpointRecord
    shape: ModelShape
    recipe: Recipe
    embedding: EmbeddingRecipe
    store: Path
    provenance: Provenance


def plan_mixture(options: ChameleonOptions) -> MixturePlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    check_output(options.output, KIND)
    recipe = resolve_options(options.weighting)
    corpus = Corpus.load(options.corpus)
    checkpoint = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(checkpoint, corpus)
    shape = shape_of(checkpoint)
    check_ranges(options)
    names = chosen_domains(options.domains, corpus)
    check_text(corpus, names, "to embed")
    limit_of(options, corpus, names).check()
    kept = None if options.keep is None else kept_mixture(options.keep, names)
    target = resolve_target(options.target, options.target_strength, names)
    embedding = embedding_recipe(
        options.extraction, shape, checkpoint.hash, corpus.tokenizer.sha256
    )
    check_model_layout(shape.size, options.parallel, embedding.window_length)
    return MixturePlan(
        options=options,
        corpus=corpus,
        names=names,
        kept=kept,
        target=target,
        checkpoint=checkpoint,
        shape=shape,
        recipe=recipe,
        embedding=embedding,
        store=options.store or options.output.parent / "embeddings",
        provenance=provenance(options, _inputs(corpus, checkpoint, kept, target)),
    )


def embedding_recipe(
    options: ExtractionOptions, shape: ModelShape, model_hash: str, tokenizer_hash: str
) -> EmbeddingRecipe:
    """What the vectors depend on.

    Raises:
        UserError: for a layer or a window that the model does not have.
    """
    return EmbeddingRecipe(
        model_hash=model_hash,
        layer=check_layer(shape, options.layer),
        window_length=check_window(shape, options.window_length),
        num_windows=options.num_windows,
        seed=options.extraction_seed,
        tokenizer_hash=tokenizer_hash,
        cross_documents=options.cross_documents,
        dtype=options.embedding_dtype,
        final_norm=options.final_norm,
    )


def _inputs(
    corpus: Corpus, checkpoint: CheckpointRecord, kept: Mixture | None, target: Target | None
) -> dict[str, str]:
    """Name of each thing that the weights come from -> its hash."""
    inputs = {"corpus": corpus.hash, "checkpoint": checkpoint.hash}
    if kept is not None:
        inputs["kept mixture"] = kept.hash
    if target is not None and target.text is not None:
        inputs["target text"] = sha256_of_files(target.text)
    return inputs


def kept_mixture(path: Path, names: list[str]) -> Mixture:
    """The mixture at ``path``, whose domains are to keep their ratios.

    Raises:
        UserError: if it has a weight for none of ``names``.
    """
    mixture = Mixture.load(path)
    if not any(mixture.weights.get(name, 0.0) > 0 for name in names):
        raise UserError(
            f"--keep {path}: it has a weight for none of {listed(names)}; give a mixture of "
            "some of them, or leave --keep out"
        )
    return mixture


def resolve_options(options: RecipeOptions) -> Recipe:
    """The recipe with the knobs that were given in place of its own.

    Raises:
        UserError: for a value that no recipe can have.
    """
    check_ranges(options)
    try:
        return resolve_recipe(
            options.recipe,
            center=options.center,
            normalize=options.normalize,
            ridge=options.ridge,
            # A ridge or temperature that a person gives is an absolute one.
            ridge_relative=None if options.ridge is None else False,
            temperature_pretrain=options.temperature,
            temperature_finetune=options.temperature,
            temperature_relative=None if options.temperature is None else False,
        )
    except ValueError as error:
        raise UserError(f"--recipe {options.recipe} and its knobs: {error}") from error
