"""Chameleon: proxy -> domain embeddings -> kernel ridge leverage scores -> mixture.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1. The proxy is trained before, by
tools/pretrain_gpt.py with uniform weights; for fine-tuning it is the model to be tuned.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import (
    Corpus,
    EmbeddingRecipe,
    EmbeddingStore,
    Mixture,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.checkpoint.reader import open_reader, require_tokenizer, shape_of
from megatron_chameleon.embedding.fill_store import fill_store, missing_domains, open_store
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.epoch_limit import EpochLimit
from megatron_chameleon.methods.table import limit_words, mixture_table
from megatron_chameleon.mixture import (
    DegenerateScoreWarning,
    Recipe,
    WeightResult,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
    resolve_recipe,
)
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import check_layer, check_window
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.mixture import MixtureOptions, RecipeOptions
from megatron_chameleon.parallel.layout import distributed, from_main


@dataclasses.dataclass(frozen=True)
class MixturePlan:
    """The options with the artifacts they name, all checked."""

    options: MixtureOptions
    corpus: Corpus
    checkpoint: CheckpointRecord
    shape: ModelShape
    recipe: Recipe
    embedding: EmbeddingRecipe
    store: Path
    provenance: Provenance


def compute_mixture(options: MixtureOptions) -> None:
    """Embed what the store lacks, weigh the domains and write the mixture. Every rank calls this.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_mixture(options))
        store = from_main(lambda: _open_store(plan))
        missing = missing_domains(store, plan.corpus)
        before = store.cost
        if missing:
            reader = open_reader(plan.checkpoint, layout)
            batch_size = options.extraction.embedding_batch_size
            store = fill_store(store, plan.corpus, reader, missing, batch_size)
        if layout.is_main:
            mixture = weigh(plan, store, layout.world_size)
            mixture.save(options.output)
            print(
                f"Chameleon, {options.mode} weights, recipe {plan.recipe.name}, layer "
                f"{plan.embedding.layer} of {plan.shape.size.num_layers}, "
                f"{len(plan.corpus.names) - len(missing)} domains reused from {plan.store}\n"
                f"{mixture_table(mixture)}{limit_words(mixture)}"
            )
            print(
                f"embedding {len(missing)} domains took "
                f"{store.cost.flops - before.flops:.2e} FLOPs and "
                f"{store.cost.wall_seconds - before.wall_seconds:.1f} s\n"
                f"written to {options.output}; next: tools/pretrain_gpt.py --corpus "
                f"{options.corpus} --mixture {options.output} --run-dir ..."
            )


def plan_mixture(options: MixtureOptions) -> MixturePlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    recipe = resolve_options(options.weighting)
    corpus = Corpus.load(options.corpus)
    checkpoint = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(checkpoint, corpus)
    shape = shape_of(checkpoint)
    extraction = options.extraction
    check_numbers(options)
    check_text(corpus)
    EpochLimit(corpus, options.token_budget, options.max_epochs).check()
    embedding = EmbeddingRecipe(
        model_hash=checkpoint.hash,
        layer=check_layer(shape, extraction.layer),
        window_length=check_window(shape, extraction.window_length),
        num_windows=extraction.num_windows,
        seed=extraction.extraction_seed,
        tokenizer_hash=corpus.tokenizer.sha256,
    )
    check_model_layout(shape.size, options.parallel, embedding.window_length)
    return MixturePlan(
        options=options,
        corpus=corpus,
        checkpoint=checkpoint,
        shape=shape,
        recipe=recipe,
        embedding=embedding,
        store=options.store or options.output.parent / "embeddings",
        provenance=provenance(options, {"corpus": corpus.hash, "checkpoint": checkpoint.hash}),
    )


def check_numbers(options: MixtureOptions) -> None:
    """Raises UserError for a count below 1 or a seed below 0."""
    for flag, value, least in (
        ("--num-windows", options.extraction.num_windows, 1),
        ("--embedding-batch-size", options.extraction.embedding_batch_size, 1),
        ("--extraction-seed", options.extraction.extraction_seed, 0),
    ):
        if value is not None and value < least:
            raise UserError(f"{flag} {value}: give a whole number from {least} on")


def check_text(corpus: Corpus) -> None:
    """Raises UserError for a domain without training text, which has no embedding."""
    for name, domain in corpus.domains.items():
        if domain.train.tokens == 0:
            raise UserError(
                f"domain '{name}' of {corpus.root} has no training tokens to embed; give it text, "
                "or preprocess again without it"
            )


def resolve_options(options: RecipeOptions) -> Recipe:
    """The recipe with the knobs that were given in place of its own.

    Raises:
        UserError: for a value that no recipe can have.
    """
    if options.bootstrap_resamples < 2:
        raise UserError(f"--bootstrap-resamples {options.bootstrap_resamples}: give 2 or more")
    if not 0 < options.confidence < 1:
        raise UserError(f"--confidence {options.confidence}: it lies between 0 and 1, such as 0.95")
    for flag, value in (("--ridge", options.ridge), ("--temperature", options.temperature)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag} {value}: give a finite number above 0")
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


def _open_store(plan: MixturePlan) -> EmbeddingStore:
    hidden_size = plan.shape.size.hidden_size
    return open_store(plan.store, plan.embedding, hidden_size, plan.provenance)


def weigh(plan: MixturePlan, store: EmbeddingStore, num_devices: int) -> Mixture:
    """From the store's window vectors to the mixture.

    Runs on one rank, in float64, while ``num_devices`` are held.
    """
    stopwatch = Stopwatch()
    options, names = plan.options, plan.corpus.names
    vectors = [store.vectors(name) for name in names]
    means = np.stack([rows.mean(axis=0, dtype=np.float64) for rows in vectors])
    with warnings.catch_warnings():
        # Told below, by the domains' names instead of their positions.
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        result = chameleon_weights(means, options.mode, plan.recipe)
    limit = EpochLimit(plan.corpus, options.token_budget, options.max_epochs)
    unlimited = chameleon_weight_fn(options.mode, plan.recipe)
    bootstrap = bootstrap_weights(
        vectors,
        lambda means: limit.apply(unlimited(means)).weights,
        num_resamples=options.weighting.bootstrap_resamples,
        seed=options.extraction.extraction_seed,
        confidence=options.weighting.confidence,
    )
    warn_of_degenerate(names, result)
    return Mixture(
        **limit.fields(result.weights),
        method=f"chameleon-{options.mode}",
        parameters={
            "mode": options.mode,
            "recipe": _finite(dataclasses.asdict(plan.recipe)),
            "embedding": dataclasses.asdict(plan.embedding),
            "effective_ridge": result.effective_ridge,
            "effective_temperature": result.effective_temperature,
            "effective_dimension": result.effective_dimension,
            "windows": dict(zip(names, bootstrap.num_windows, strict=True)),
            "bootstrap_resamples": options.weighting.bootstrap_resamples,
        },
        scores=dict(zip(names, result.scores.tolist(), strict=True)),
        intervals={
            name: (float(low), float(high))
            for name, low, high in zip(names, bootstrap.low, bootstrap.high, strict=True)
        },
        confidence=bootstrap.confidence,
        affinity=result.affinity.tolist(),
        provenance=plan.provenance,
        cost=stopwatch.cost(num_devices=num_devices),
    )


def warn_of_degenerate(names: list[str], result: WeightResult) -> None:
    """Say which domains' weights are bounds rather than estimates."""
    if result.degenerate:
        held = ", ".join(f"'{names[position]}'" for position in result.degenerate)
        warnings.warn(
            f"the leverage score of {held} is so near zero or so high that it was held at a limit; "
            "these weights say little: try --recipe scaled, or look at the affinity",
            DegenerateScoreWarning,
            stacklevel=2,
        )


def _finite(knobs: dict[str, object]) -> dict[str, object]:
    """Knobs as JSON can hold them: an infinite limit is none."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in knobs.items()
    }
