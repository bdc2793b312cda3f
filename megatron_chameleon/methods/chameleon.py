"""Chameleon: proxy -> domain embeddings -> kernel ridge leverage scores -> mixture.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1. The proxy is trained before, by
tools/pretrain_gpt.py with uniform weights; for fine-tuning it is the model to be tuned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Mapping

import numpy as np

from megatron_chameleon.artifacts import (
    EmbeddingStore,
    Mixture,
    Stopwatch,
)
from megatron_chameleon.checkpoint.reader import open_reader
from megatron_chameleon.embedding.fill_store import fill_store, missing_domains, open_store
from megatron_chameleon.methods.chameleon_plan import MixturePlan, limit_of, plan_mixture
from megatron_chameleon.methods.table import closing_words, mixture_table
from megatron_chameleon.mixture import (
    BootstrapResult,
    DegenerateScoreWarning,
    WeightResult,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
    is_one_hot,
    is_within_noise_of_uniform,
    outweighing_probability,
    placed_weights,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.options.mixture import MixtureOptions
from megatron_chameleon.parallel.layout import distributed, from_main


def compute_mixture(options: MixtureOptions) -> None:
    """Embed what the store lacks, weigh the domains and write the mixture. Every rank calls this.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_mixture(options))
        store = from_main(lambda: _open_store(plan))
        missing = missing_domains(store, plan.corpus, plan.names)
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
                f"{len(plan.names) - len(missing)} domains reused from {plan.store}\n"
                f"{mixture_table(mixture)}\n"
                f"{closing_words(mixture, options.weighting.precision)}"
            )
            print(
                f"embedding {len(missing)} domains took "
                f"{store.cost.flops - before.flops:.2e} FLOPs and "
                f"{store.cost.wall_seconds - before.wall_seconds:.1f} s\n"
                f"written to {options.output}; next: tools/pretrain_gpt.py --corpus "
                f"{options.corpus} --mixture {options.output} --run-dir ..."
            )


def _open_store(plan: MixturePlan) -> EmbeddingStore:
    hidden_size = plan.shape.size.hidden_size
    return open_store(plan.store, plan.embedding, hidden_size, plan.provenance)


def weigh(plan: MixturePlan, store: EmbeddingStore, num_devices: int) -> Mixture:
    """From the store's window vectors to the mixture.

    Runs on one rank, in float64, while ``num_devices`` are held.
    """
    stopwatch = Stopwatch()
    options, names = plan.options, plan.names
    vectors = [store.vectors(name) for name in names]
    means = np.stack([rows.mean(axis=0, dtype=np.float64) for rows in vectors])
    with warnings.catch_warnings():
        # Told below, by the domains' names instead of their positions.
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        result = chameleon_weights(means, options.mode, plan.recipe)
    limit = limit_of(options, plan.corpus, names)
    place, weigh_all = _placing(plan), chameleon_weight_fn(options.mode, plan.recipe)
    bootstrap = bootstrap_weights(
        vectors,
        lambda means: limit.apply(place(weigh_all(means))).weights,
        num_resamples=options.weighting.bootstrap_resamples,
        seed=options.extraction.extraction_seed,
        confidence=options.weighting.confidence,
    )
    warn_of_degenerate(names, result)
    warn_of_little(bootstrap)
    fields = limit.fields(place(result.weights))
    return Mixture(
        **fields,
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
        outweighs=neighbours(fields["weights"], bootstrap),
        affinity=result.affinity.tolist(),
        provenance=plan.provenance,
        cost=stopwatch.cost(num_devices=num_devices),
    )


def _placing(plan: MixturePlan) -> Callable[[Array], Array]:
    """From the weights of all domains to those in which the old ones keep their ratios."""
    if plan.kept is None:
        return lambda weights: weights
    before = np.array([plan.kept.weights.get(name, 0.0) for name in plan.names])
    is_old = np.array([name in plan.kept.weights for name in plan.names])
    return lambda weights: placed_weights(weights, before, is_old)


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


def neighbours(
    weights: Mapping[str, float], bootstrap: BootstrapResult
) -> list[tuple[str, str, float]]:
    """Each domain with the next lighter one, and how likely it is that it outweighs that."""
    names = list(weights)
    order = sorted(range(len(names)), key=lambda i: -weights[names[i]])
    likely = outweighing_probability(bootstrap, order[:-1], order[1:]).tolist()
    pairs = itertools.pairwise(names[i] for i in order)
    return [(one, other, share) for (one, other), share in zip(pairs, likely, strict=True)]


def warn_of_little(bootstrap: BootstrapResult) -> None:
    """Say where the weights are within noise of uniform, or one domain takes nearly all."""
    if len(bootstrap.low) > 1 and is_within_noise_of_uniform(bootstrap):
        warnings.warn(
            "the weights are within noise of uniform: take more windows (--num-windows) or a proxy "
            "that was trained for longer, or train uniformly",
            stacklevel=2,
        )
    if is_one_hot(bootstrap):
        warnings.warn(
            "one domain takes nearly all of the weight: a higher --temperature or --recipe scaled "
            "gives the others more",
            stacklevel=2,
        )
