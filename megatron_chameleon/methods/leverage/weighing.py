"""From window vectors to the mixture: weights, intervals, and what has to be said of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.mixture import MAX_AFFINITY_DOMAINS
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.methods.leverage.domain_windows import DomainWindows
from megatron_chameleon.methods.leverage.plan import MixturePlan
from megatron_chameleon.methods.leverage.target_text import EmbeddedTarget
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
from megatron_chameleon.mixture.recipes import SCALED
from megatron_chameleon.model.paper_flops import PaperSettings, paper_flops
from megatron_chameleon.progress import progress_bar

# A shorter bootstrap shows no bar.
SECONDS_BEFORE_BAR = 2.0
# A target whose domains gain less than this part of an average weight did nothing to speak of.
LEAST_GAIN = 0.05


def weigh(plan: MixturePlan, windows: DomainWindows, target: EmbeddedTarget | None) -> Mixture:
    """The mixture, its cost not yet told. Runs on one rank, in float64.

    Args:
        plan: what was asked for.
        windows: of ``plan.names``.
        target: the text of ``--target``, if one was given.
    """
    options, names, recipe = plan.options, plan.names, plan.recipe
    prior = prior_of(plan, target)
    eta = None if prior is None else prior(windows.means)
    with warnings.catch_warnings():
        # Told below, by the domains' names instead of their positions.
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        result = chameleon_weights(windows.means, options.mode, recipe, prior=eta)
        plain = chameleon_weights(windows.means, options.mode, recipe)
    bootstrap = _bootstrap(plan, windows, prior)
    warn_of_degenerate(names, result)
    warn_of_little(bootstrap)
    if eta is not None:
        warn_of_vain_target(result, plain, eta)
    limit, place = limit_of(options, plan.corpus, names), _placing(plan)
    fields = limit.fields(place(result.weights))
    without_target = limit.apply(place(plain.weights)).weights
    keep_affinity = len(names) <= MAX_AFFINITY_DOMAINS
    return Mixture(
        **fields,
        method=f"chameleon-{options.mode}",
        parameters={
            "mode": options.mode,
            "recipe": _finite(dataclasses.asdict(recipe)),
            "embedding": dataclasses.asdict(plan.embedding),
            "effective_ridge": result.effective_ridge,
            "effective_temperature": result.effective_temperature,
            "effective_dimension": result.effective_dimension,
            "windows": dict(zip(names, windows.counts, strict=True)),
            "bootstrap_resamples": options.weighting.bootstrap_resamples,
            "bootstrap_group": windows.group,
            "paper_flops": _paper_flops(plan, windows),
            **_target_parameters(plan, target, eta, without_target),
        },
        scores=dict(zip(names, result.scores.tolist(), strict=True)),
        intervals={
            name: (float(low), float(high))
            for name, low, high in zip(names, bootstrap.low, bootstrap.high, strict=True)
        },
        confidence=bootstrap.confidence,
        outweighs=neighbours(fields["weights"], bootstrap),
        affinity=result.affinity.tolist() if keep_affinity else None,
        provenance=plan.provenance,
    )


def _paper_flops(plan: MixturePlan, windows: DomainWindows) -> float:
    """With the proxy's training, whether or not it was trained for this mixture alone."""
    settings = PaperSettings(
        model_size=plan.shape.size,
        trained_tokens=sum(plan.checkpoint.domain_tokens.values()),
        embedded_tokens=sum(windows.counts) * plan.embedding.window_length,
    )
    return paper_flops("chameleon", settings)


def prior_of(plan: MixturePlan, target: EmbeddedTarget | None) -> Callable[[Array], Array] | None:
    """The map from domain embeddings [k, h] to the prior [k]; none without ``--target``."""
    if plan.target is None:
        return None
    return plan.target.prior(plan.names, None if target is None else target.vector)


def _bootstrap(
    plan: MixturePlan, windows: DomainWindows, prior: Callable[[Array], Array] | None
) -> BootstrapResult:
    """The weights over resamples, after ``--keep`` and ``--max-epochs``."""
    options = plan.options
    limit, place = limit_of(options, plan.corpus, plan.names), _placing(plan)
    weigh_all = chameleon_weight_fn(options.mode, plan.recipe, prior=prior)
    resamples = options.weighting.bootstrap_resamples
    with progress_bar(resamples, " resamples", "intervals", delay=SECONDS_BEFORE_BAR) as progress:

        def weigh_resample(means: Array) -> Array:
            progress.update()
            return limit.apply(place(weigh_all(means))).weights

        return bootstrap_weights(
            windows.resampled,
            weigh_resample,
            num_resamples=resamples,
            seed=options.extraction.extraction_seed,
            confidence=options.weighting.confidence,
        )


def _target_parameters(
    plan: MixturePlan, target: EmbeddedTarget | None, eta: Array | None, plain: Array
) -> dict[str, Any]:
    if plan.target is None or eta is None:
        return {}
    asked = {
        "given": plan.target.given,
        "strength": plan.target.strength,
        "prior": dict(zip(plan.names, eta.tolist(), strict=True)),
        "weights_without": dict(zip(plan.names, plain.tolist(), strict=True)),
    }
    return {"target": asked if target is None else {**asked, "windows": target.windows}}


def _placing(plan: MixturePlan) -> Callable[[Array], Array]:
    """From the weights of all domains to those in which the old ones keep their ratios."""
    if plan.kept is None:
        return lambda weights: weights
    before = np.array([plan.kept.weights.get(name, 0.0) for name in plan.names])
    is_old = np.array([name in plan.kept.weights for name in plan.names])
    return lambda weights: placed_weights(weights, before, is_old)


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


def warn_of_degenerate(names: list[str], result: WeightResult) -> None:
    """Say which domains' weights are bounds rather than estimates."""
    if result.degenerate:
        held = listed([f"'{names[position]}'" for position in result.degenerate])
        ways = ["look at the affinity (--explain)"]
        if result.recipe.name != SCALED.name:
            ways.insert(0, "try --recipe scaled")
        if result.prior is not None:
            ways.insert(0, "try a smaller --target-strength")
        warnings.warn(
            f"the leverage score of {held} is so near zero or so high that it was held at a limit; "
            f"these weights say little: {', or '.join(ways)}",
            DegenerateScoreWarning,
            stacklevel=2,
        )


def warn_of_vain_target(result: WeightResult, plain: WeightResult, eta: Array) -> None:
    """Say so where the domains that the prior puts above the mean do not gain by it."""
    above = np.maximum(eta - 1.0, 0.0)
    gain = len(eta) * float(above @ (result.weights - plain.weights))  # 1 is an average weight
    if result.prior is None:
        warnings.warn(
            "--target counts all domains alike, so the weights are those without it: name some of "
            "the domains, or give a text that is more like some than like others",
            stacklevel=2,
        )
    elif gain < LEAST_GAIN * float(above.sum()):
        way_out = "fine-tuning weights feel it at a larger --ridge"
        if result.mode == "pretrain":
            scaled = "" if result.recipe.name == SCALED.name else ", or with --recipe scaled"
            way_out = f"pretraining weights feel it at a smaller --ridge{scaled}"
        warnings.warn(
            f"--target hardly moves the weights, or not its way, at the ridge "
            f"{result.effective_ridge:.3g}: {way_out}",
            stacklevel=2,
        )


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
            "one domain takes nearly all of the weight, as by a proxy that has learnt little: "
            "train it for longer; --recipe scaled or a higher --temperature gives the others more",
            stacklevel=2,
        )
