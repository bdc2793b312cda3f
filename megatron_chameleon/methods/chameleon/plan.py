"""Checked options of Chameleon, with the artifacts that they name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, EmbeddingRecipe, Mixture, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.checkpoint.load import require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon.options import ChameleonOptions, ExtractionOptions
from megatron_chameleon.methods.chameleon.target import Target, parse_target
from megatron_chameleon.methods.domains import format_names, require_training_tokens, select_domains
from megatron_chameleon.methods.output import epoch_limit
from megatron_chameleon.mixture import Recipe
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import check_layer, check_window
from megatron_chameleon.model.sizes import ModelShape


@dataclasses.dataclass(frozen=True)
class MixturePlan:
    """Checked options with their artifacts.

    Attributes:
        options: of the method.
        corpus: of the domains.
        names: the domains to weigh.
        kept: the mixture of ``--keep``, whose domains retain their ratios.
        target: of the mixture.
        checkpoint: of the proxy.
        shape: of the proxy.
        recipe: with user-supplied hyperparameters.
        embedding: recipe of the embedding store.
        store: its folder.
        provenance: of the mixture.
    """

    options: ChameleonOptions
    corpus: Corpus
    names: list[str]
    kept: Mixture | None
    target: Target | None
    checkpoint: CheckpointRecord
    shape: ModelShape
    recipe: Recipe
    embedding: EmbeddingRecipe
    store: Path
    provenance: Provenance


def plan_mixture(options: ChameleonOptions) -> MixturePlan:
    """Load and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    check_output(options.output, Mixture.KIND)
    recipe = options.weighting.resolve()
    corpus = Corpus.load(options.corpus)
    checkpoint = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(checkpoint, corpus)
    shape = shape_of(checkpoint)
    names = select_domains(options.domains, corpus)
    require_training_tokens(corpus, names, "to embed")
    epoch_limit(options, corpus, names).check()
    inputs = {"corpus": corpus.hash, "checkpoint": checkpoint.hash}
    kept = None
    if options.keep is not None:
        kept = Mixture.load(options.keep)
        inputs["kept mixture"] = kept.hash
        if not any(kept.weights.get(name, 0.0) > 0 for name in names):
            raise UserError(
                f"--keep {options.keep}: no weight for any of {format_names(names)}; pass a "
                "mixture of some of them, or leave --keep out"
            )
    target = parse_target(options.target, options.target_strength, names)
    if target is not None and target.text is not None:
        inputs["target text"] = sha256_of_files(target.text)
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
        provenance=provenance(options, inputs),
    )


def embedding_recipe(
    options: ExtractionOptions, shape: ModelShape, model_hash: str, tokenizer_hash: str
) -> EmbeddingRecipe:
    """The recipe of an embedding store for a proxy of this shape.

    Raises:
        UserError: for a layer or a window length that the model does not have.
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
