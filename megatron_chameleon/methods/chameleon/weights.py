"""From window vectors to Chameleon's mixture: weights, confidence intervals and warnings."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import EmbeddingStore, Mixture
from megatron_chameleon.artifacts.mixture import MAX_AFFINITY_DOMAINS
from megatron_chameleon.methods.chameleon.plan import MixturePlan
from megatron_chameleon.methods.chameleon.target import EmbeddedText
from megatron_chameleon.methods.domains import format_names
from megatron_chameleon.methods.output import epoch_limit
from megatron_chameleon.mixture import (
    BootstrapResult,
    DegenerateScoreWarning,
    Mode,
    Recipe,
    WeightResult,
    bootstrap_weights,
    chameleon_weight_fn,
    chameleon_weights,
    group_size,
    grouped_windows,
    is_one_hot,
    is_within_noise_of_uniform,
    outweighing_probability,
    placed_weights,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.flops import PaperSettings, paper_flops
from megatron_chameleon.progress import progress_bar

PROGRESS_DELAY_SECONDS = 2.0
# Smallest gain of the target's domains without a warning, as a fraction of an average weight.
MIN_TARGET_GAIN = 0.05

Prior = Callable[[Array], Array] | None
"""Domain embeddings [k, h] -> prior [k]; None without a target."""


@dataclasses.dataclass(frozen=True, eq=False)
class DomainWindows:
    """Statistics of the windows of k domains.

    Attributes:
        means: [k, h] float64, the domain embeddings.
        means_of_half: [k, h] float64, of a random half of each domain's windows.
        resampled: k arrays [n_i, h] for the bootstrap: windows, or means over groups of them.
        counts: windows per domain.
        group: windows per group; 1 without grouping.
    """

    means: Array
    means_of_half: Array
    resampled: list[NDArray[np.floating]]
    counts: tuple[int, ...]
    group: int


def read_windows(store: EmbeddingStore, names: Sequence[str], seed: int) -> DomainWindows:
    """Read the vectors of ``names`` one domain at a time, in bounded memory.

    Args:
        store: with all these domains.
        names: in the order of the result.
        seed: of the random halves and groups.

    Raises:
        UserError: if a file of the store is damaged.
    """
    means, halves, resampled, counts = [], [], [], []
    most = max(store.domains[name].windows for name in names)
    group = group_size(len(names), most, store.hidden_size)
    for name in names:
        vectors = store.vectors(name)
        order = np.random.default_rng([seed, len(vectors)]).permutation(len(vectors))
        half = vectors[order[: max(1, len(vectors) // 2)]]
        means.append(vectors.mean(axis=0, dtype=np.float64))
        halves.append(half.mean(axis=0, dtype=np.float64))
        resampled.append(grouped_windows(vectors, group, seed))
        counts.append(len(vectors))
    return DomainWindows(np.stack(means), np.stack(halves), resampled, tuple(counts), group)


def weigh_means(means: Array, mode: Mode, recipe: Recipe, prior: Prior) -> WeightResult:
    """Chameleon's weights of the domain embeddings ``means`` [k, h], without a warning."""
    with warnings.catch_warnings():
        # It gives positions; the caller warns with the domains' names.
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        return chameleon_weights(means, mode, recipe, prior=prior and prior(means))


def resolve_prior(plan: MixturePlan, embedded: EmbeddedText | None) -> Prior:
    """The prior of ``--target``."""
    return plan.target.prior(plan.names, embedded) if plan.target else None


def weigh(plan: MixturePlan, windows: DomainWindows, embedded: EmbeddedText | None) -> Mixture:
    """Compute the mixture, without its cost. Runs on one rank, in float64.

    Args:
        plan: checked options.
        windows: of ``plan.names``.
        embedded: the target text, if the target is one.
    """
    options, names, recipe = plan.options, plan.names, plan.recipe
    prior = resolve_prior(plan, embedded)
    result = weigh_means(windows.means, options.mode, recipe, prior)
    limit, place = epoch_limit(options, plan.corpus, names), _placement(plan)

    def constrained(weights: Array) -> Array:
        return limit.apply(place(weights)).weights

    bootstrap = _bootstrap(plan, windows, prior, constrained)
    _warn_degenerate(names, result)
    _warn_uncertain(bootstrap)
    parameters: dict[str, Any] = {}
    if plan.target is not None and prior is not None:
        plain = weigh_means(windows.means, options.mode, recipe, None)
        values = prior(windows.means)
        _warn_ineffective_target(result, plain, values)
        parameters = {
            "given": plan.target.value,
            "strength": plan.target.strength,
            "prior": dict(zip(names, values.tolist(), strict=True)),
            "weights_without": dict(zip(names, constrained(plain.weights).tolist(), strict=True)),
        }
        if embedded is not None:
            parameters["windows"] = embedded.windows
        parameters = {"target": parameters}
    fields = limit.mixture_fields(place(result.weights))
    weights = list(fields["weights"].values())
    return Mixture(
        **fields,
        method=f"chameleon-{options.mode}",
        parameters={
            "mode": options.mode,
            "recipe": {
                field: None if value == math.inf else value  # JSON has no infinity
                for field, value in dataclasses.asdict(recipe).items()
            },
            "embedding": dataclasses.asdict(plan.embedding),
            "effective_ridge": result.effective_ridge,
            "effective_temperature": result.effective_temperature,
            "effective_dimension": result.effective_dimension,
            "windows": dict(zip(names, windows.counts, strict=True)),
            "bootstrap_resamples": options.weighting.bootstrap_resamples,
            "bootstrap_group": windows.group,
            "paper_flops": _paper_flops(plan, windows),
            **parameters,
        },
        scores=dict(zip(names, result.scores.tolist(), strict=True)),
        intervals={
            name: (float(low), float(high))
            for name, low, high in zip(names, bootstrap.low, bootstrap.high, strict=True)
        },
        confidence=bootstrap.confidence,
        outweighs=_outweighing_pairs(names, weights, bootstrap),
        affinity=result.affinity.tolist() if len(names) <= MAX_AFFINITY_DOMAINS else None,
        provenance=plan.provenance,
    )


def _placement(plan: MixturePlan) -> Callable[[Array], Array]:
    """Weights of all domains -> weights in which those of ``--keep`` retain their ratios."""
    if plan.kept is None:
        return lambda weights: weights
    before = np.array([plan.kept.weights.get(name, 0.0) for name in plan.names])
    is_old = np.array([name in plan.kept.weights for name in plan.names])
    return lambda weights: placed_weights(weights, before, is_old)


def _bootstrap(
    plan: MixturePlan,
    windows: DomainWindows,
    prior: Prior,
    constrained: Callable[[Array], Array],
) -> BootstrapResult:
    """The constrained weights over resamples of the windows."""
    options = plan.options
    weigh_resample = chameleon_weight_fn(options.mode, plan.recipe, prior=prior)
    resamples = options.weighting.bootstrap_resamples
    with progress_bar(
        resamples, " resamples", "intervals", delay=PROGRESS_DELAY_SECONDS
    ) as progress:

        def weigh_and_count(means: Array) -> Array:
            progress.update()
            return constrained(weigh_resample(means))

        return bootstrap_weights(
            windows.resampled,
            weigh_and_count,
            num_resamples=resamples,
            seed=options.extraction.extraction_seed,
            confidence=options.weighting.confidence,
        )


def _paper_flops(plan: MixturePlan, windows: DomainWindows) -> float:
    """Includes the proxy's training, even if the proxy serves several mixtures."""
    settings = PaperSettings(
        model_size=plan.shape.size,
        trained_tokens=sum(plan.checkpoint.domain_tokens.values()),
        embedded_tokens=sum(windows.counts) * plan.embedding.window_length,
    )
    return paper_flops("chameleon", settings)


def _outweighing_pairs(
    names: Sequence[str], weights: Sequence[float], bootstrap: BootstrapResult
) -> list[tuple[str, str, float]]:
    """Each domain, the one of the next smaller weight, and P(the first outweighs the second)."""
    order = sorted(range(len(names)), key=lambda i: -weights[i])
    likely = outweighing_probability(bootstrap, order[:-1], order[1:]).tolist()
    pairs = itertools.pairwise(names[i] for i in order)
    return [(one, other, share) for (one, other), share in zip(pairs, likely, strict=True)]


def _warn_degenerate(names: Sequence[str], result: WeightResult) -> None:
    if not result.degenerate:
        return
    hints = ["a smaller --target-strength"] if result.prior is not None else []
    hints += [] if result.recipe.name == "scaled" else ["--recipe scaled"]
    clipped = format_names([f"'{names[position]}'" for position in result.degenerate])
    warnings.warn(
        f"the leverage scores of {clipped} were clipped at their limits, so that these weights are "
        f"bounds, not estimates: {''.join(f'try {hint}, or ' for hint in hints)}see --explain",
        DegenerateScoreWarning,
        stacklevel=3,
    )


def _warn_uncertain(bootstrap: BootstrapResult) -> None:
    """Warn if the weights are within noise of uniform, or one-hot."""
    if len(bootstrap.low) > 1 and is_within_noise_of_uniform(bootstrap):
        warnings.warn(
            "no weight differs significantly from uniform: use more windows (--num-windows) or a "
            "proxy trained for longer, or train uniformly",
            stacklevel=3,
        )
    if is_one_hot(bootstrap):
        warnings.warn(
            "one domain has nearly all of the weight, as with an undertrained proxy: train it for "
            "longer, or use --recipe scaled or a higher --temperature",
            stacklevel=3,
        )


def _warn_ineffective_target(result: WeightResult, plain: WeightResult, prior: Array) -> None:
    """Warn if the domains with an above-average ``prior`` gain no weight."""
    above = np.maximum(prior - 1.0, 0.0)
    gain = len(prior) * float(above @ (result.weights - plain.weights))  # 1 is an average weight
    if result.prior is None:
        warnings.warn(
            "--target has no effect, since its shares of all domains are equal: name fewer "
            "domains, or pass a text that resembles some of them",
            stacklevel=3,
        )
    elif gain < MIN_TARGET_GAIN * float(above.sum()):
        hint = "a larger --ridge"
        if result.mode == "pretrain":
            scaled = "" if result.recipe.name == "scaled" else " or --recipe scaled"
            hint = f"a smaller --ridge{scaled}"
        warnings.warn(
            f"--target has almost no effect, or the opposite one, with ridge "
            f"{result.effective_ridge:.3g}: try {hint}",
            stacklevel=3,
        )
