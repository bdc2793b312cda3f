"""Chameleon's weights from domain embeddings: the paper's formula, then adjustments.

:func:`weigh_means` is the formula of the paper, with a prior of the domains for a target. The
result is then shrunk (``--shrink``), placed next to the weights of ``--keep``, and moved within
``--max-epochs``. The bootstrap repeats all of this with resampled windows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import EmbeddingRecipe, EmbeddingStore, Mixture
from megatron_chameleon.artifacts.mixture import MAX_AFFINITY_DOMAINS
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.corpus.target import Target
from megatron_chameleon.errors import format_names
from megatron_chameleon.methods.chameleon import WeightingOptions
from megatron_chameleon.methods.chameleon.explain import explain
from megatron_chameleon.methods.limits import EpochLimit, KeptRatios
from megatron_chameleon.methods.output import ONE_HOT, by_name, format_weight, warn
from megatron_chameleon.mixture import (
    DegenerateScoreWarning,
    Recipe,
    WeightResult,
    bootstrap_weights,
    chameleon_weights,
)
from megatron_chameleon.mixture.bootstrap import (
    BootstrapResult,
    group_size,
    grouped_windows,
    outweighing_probability,
)
from megatron_chameleon.mixture.checks import Array, Mode
from megatron_chameleon.mixture.shrinkage import (
    MOST_DIRECTIONS,
    effective_directions,
    shrinkage_factor,
    shrunk_weights,
)
from megatron_chameleon.mixture.target import similarity_shares, target_prior
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar

# Warn if the target raises the weights of its domains by less than this share of the mean weight.
MIN_TARGET_GAIN = 0.05
# A temperature that a warning names is at most 2^MOST_DOUBLINGS times the present one. Higher ones
# give nearly uniform weights.
MOST_DOUBLINGS = 10
# Intervals of weights that resampling does not change are not exactly 0.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class TargetPrior:
    """The prior of the domains that ``--target`` and ``--target-strength`` determine.

    Attributes:
        target: domains to weigh, held-out domains and texts, with their shares.
        strength: effect of the target, in (0, 1).
        names: the k domains to weigh.
        vectors: name of a held-out domain or text -> its embedding [h] float64, the mean over its
            windows.
        windows: number of these windows.
    """

    target: Target
    strength: float
    names: Sequence[str]
    vectors: Mapping[str, Array]
    windows: int

    @classmethod
    def of(
        cls,
        target: Target,
        strength: float,
        names: Sequence[str],
        windows: Mapping[str, NDArray[np.floating]],
    ) -> TargetPrior:
        """Average the ``windows`` [n, h] of each held-out domain and text of the target."""
        means = {name: rows.mean(axis=0, dtype=np.float64) for name, rows in windows.items()}
        return cls(target, strength, names, means, sum(map(len, windows.values())))

    def __call__(self, means: Array) -> Array:
        """Return the prior [k] of the domains with the embeddings ``means`` [k, h].

        The share of a held-out domain or a text is divided among the domains by
        :func:`similarity_shares`.
        """
        shares = np.zeros(len(means))
        for name, share in self.target.shares.items():
            if name in self.names:
                shares[self.names.index(name)] += share
            else:
                similar = similarity_shares(means, self.vectors[name])
                shares += share * similar / similar.sum()
        return target_prior(shares, self.strength)


@dataclasses.dataclass(frozen=True, eq=False)
class DomainVectors:
    """Embeddings of the k domains.

    Attributes:
        means: [k, h] float64, the mean over the windows of each domain.
        resampled: [n, h] per domain, the windows that the bootstrap resamples, or means over groups
            of windows.
        group: windows per group.
        windows: domain -> number of its windows.
    """

    means: Array
    resampled: Sequence[NDArray[np.floating]]
    group: int
    windows: Mapping[str, int]

    @classmethod
    def read(cls, store: EmbeddingStore, names: Sequence[str], seed: int) -> DomainVectors:
        """Read the vectors of one domain at a time.

        Raises:
            UserError: if a file of the store is damaged.
        """
        windows = {name: store.domains[name].windows for name in names}
        group = group_size(len(names), max(windows.values()), store.hidden_size)
        means, resampled = [], []
        for name in names:
            vectors = store.vectors(name)
            means.append(vectors.mean(axis=0, dtype=np.float64))
            resampled.append(grouped_windows(vectors, group, seed))
        return cls(np.stack(means), resampled, group, windows)


@dataclasses.dataclass(frozen=True)
class Shrinkage:
    """The rule of ``--shrink`` for embeddings that differ in few directions only.

    Attributes:
        directions: r, the effective directions in which the embeddings differ.
        factor: f, by which the rule multiplies log weights; 1 leaves them unchanged.
    """

    directions: float
    factor: float

    @classmethod
    def of(cls, result: WeightResult) -> Shrinkage:
        """Measure the embeddings of ``result``. The prior has no effect."""
        directions = effective_directions(result.features)
        return cls(directions, shrinkage_factor(directions, len(result.features)))

    def explain(self, plain: WeightResult, advice: str | None) -> str:
        """Return why the weights ``plain`` are unreliable, and by how much the rule shrinks them.

        Args:
            plain: weights without the rule.
            advice: what the user should do; None if the rule has been applied.
        """
        most = min(len(plain.weights) - 1, MOST_DIRECTIONS)
        largest = " -> ".join(
            format_weight(shrunk(plain, f).weights.max()) for f in (1.0, self.factor)
        )
        effect = f"log weights by {self.factor:.2f} (largest weight {largest})"
        return (
            f"the domains' embeddings differ in {self.directions:.1f} of at most {most} effective "
            "directions, as with an undertrained proxy, whose weights depend on its seed: "
            + (f"{advice}, which multiplies {effect}" if advice else f"multiplied {effect}")
        )


@dataclasses.dataclass(frozen=True)
class TargetParameters:
    """What ``parameters["target"]`` of a mixture file contains."""

    value: str | None
    shares: Mapping[str, float]
    strength: float
    prior: Mapping[str, float]
    weights_without: Mapping[str, float]
    windows: int


@dataclasses.dataclass(frozen=True)
class ChameleonParameters:
    """What ``parameters`` of a mixture file contains; see docs/method.md."""

    mode: Mode
    recipe: Recipe
    embedding: EmbeddingRecipe
    effective_ridge: float
    effective_temperature: float
    effective_dimension: float
    effective_directions: float
    shrinkage_factor: float
    is_shrunk: bool
    windows: Mapping[str, int]
    bootstrap_resamples: int
    bootstrap_group: int
    paper_flops: float
    paper_flops_of_proxy: float
    target: TargetParameters | None

    def as_json(self) -> dict[str, Any]:
        """Return the fields, without ``target`` if there is none."""
        fields = dataclasses.asdict(self)
        # JSON cannot represent infinity, so an infinite limit is stored as null.
        recipe = fields["recipe"].items()
        fields["recipe"] = {name: None if value == math.inf else value for name, value in recipe}
        if self.target is None:
            del fields["target"]
        return fields


@dataclasses.dataclass(frozen=True)
class Weighting:
    """Everything but the embeddings that determines the weights of the domains.

    Attributes:
        names: the k domains to weigh.
        mode: "pretrain" or "finetune".
        recipe: recipe of the weights, with user-supplied hyperparameters.
        options: whether weights are shrunk, and how their intervals are computed.
        seed: seed of the bootstrap.
        target: prior of the domains, if there is a target.
        kept: ratios of ``--keep``, if any.
        limit: limit on the epochs of each domain.
    """

    names: Sequence[str]
    mode: Mode
    recipe: Recipe
    options: WeightingOptions
    seed: int
    target: TargetPrior | None
    kept: KeptRatios | None
    limit: EpochLimit

    def prior(self, means: Array) -> Array | None:
        """Return the prior [k] of domains with the embeddings ``means`` [k, h], if any."""
        return None if self.target is None else self.target(means)

    def place(self, weights: Array) -> Array:
        """Return ``weights`` [k], in which the domains of ``--keep`` have their earlier ratios."""
        return weights if self.kept is None else self.kept.apply(weights)

    def adjust(self, result: WeightResult, factor: float) -> Array:
        """Return the weights [k] of ``result``, shrunk by ``factor``, placed and within limits."""
        return self.limit.apply(self.place(shrunk(result, factor).weights))

    def spread(self, result: WeightResult, means: Array, factor: float) -> str | None:
        """Find an option with which no domain has more than half of the weight.

        ``--recipe scaled`` suits many domains, and higher temperatures suit the others.

        Args:
            result: the weights of these domains with the user's options.
            means: [k, h] float64, the domain embeddings.
            factor: of :func:`shrunk`.

        Returns:
            The option and the largest weight with it; None if no temperature that is at most
            2^``MOST_DOUBLINGS`` times the present one suffices.
        """
        options, prior = self.options, self.prior(means)
        tried = {}
        # This recipe gives two domains the same weight, whatever their text.
        if len(means) > 2 and options.temperature is None and options.normalize is not False:
            tried["--recipe scaled"] = dataclasses.replace(options, recipe="scaled")
        for power in range(1, MOST_DOUBLINGS + 1):
            temperature = result.effective_temperature * 2**power
            changed = dataclasses.replace(options, temperature=temperature)
            tried[f"--temperature {temperature:g}"] = changed
        most = max(0.5, 1.5 / len(means))  # two domains never have less than 0.5
        for flag, changed in tried.items():
            found = weigh_means(means, self.mode, changed.resolve(), prior)
            if (largest := float(self.adjust(found, factor).max())) <= most:
                return f"{flag} (largest weight {format_weight(largest)})"
        return None

    def bootstrap(self, vectors: DomainVectors, factor: float) -> BootstrapResult:
        """Compute the adjusted weights of resampled windows.

        ``factor`` multiplies log weights. It is measured once, from all windows: resampling noise
        adds directions, and would weaken it.
        """
        count = self.options.bootstrap_resamples
        bar = progress_bar(count, " resamples", "intervals", delay=SECONDS_WITHOUT_BAR)
        with bar as progress:

            def adjusted(means: Array) -> Array:
                progress.update()
                prior = self.prior(means)
                resample = chameleon_weights(means, self.mode, self.recipe, prior=prior)
                return self.adjust(resample, factor)

            return bootstrap_weights(
                vectors.resampled, adjusted, count, self.seed, self.options.confidence
            )


def weigh(
    weighting: Weighting,
    vectors: DomainVectors,
    embedding: EmbeddingRecipe,
    provenance: Provenance,
    *,
    paper_flops: float,
    paper_flops_of_proxy: float,
) -> tuple[Mixture, list[str]]:
    """Compute the mixture, without its cost. Runs on one rank, in float64.

    Args:
        weighting: recipe, target and adjustments.
        vectors: embeddings of the domains.
        embedding: recipe of the embeddings, for the mixture file.
        provenance: provenance of the mixture.
        paper_flops: FLOPs of the embedding, as the paper counts.
        paper_flops_of_proxy: FLOPs of the proxy's training, as the paper counts.

    Returns:
        The mixture, and lines to print: its uncertainty and the tables of ``--explain``.
    """
    names, options = weighting.names, weighting.options
    by_recipe = functools.partial(weigh_means, vectors.means, weighting.mode)
    prior = weighting.prior(vectors.means)
    plain = by_recipe(weighting.recipe, prior)
    shrinkage = Shrinkage.of(plain)
    factor = shrinkage.factor if options.shrink else 1.0
    result = shrunk(plain, factor)
    untargeted = result if prior is None else shrunk(by_recipe(weighting.recipe), factor)
    bootstrap = weighting.bootstrap(vectors, factor)
    warn_uninformative(weighting, result, bootstrap, is_undertrained=shrinkage.factor < 1.0)
    warn_one_hot(weighting, plain, vectors.means, factor, bootstrap.weights)
    if prior is not None:
        warn_target_without_effect(result, untargeted)
    placed = weighting.place(result.weights)
    fields = weighting.limit.mixture_fields(placed, weighting.limit.apply(placed))
    if shrinkage.factor < 1.0:
        advice = None if options.shrink else "train the proxy for longer, or pass --shrink"
        warn(shrinkage.explain(plain, advice))
    target = None
    if weighting.target is not None and prior is not None:
        without = weighting.limit.apply(weighting.place(untargeted.weights))
        target = TargetParameters(
            value=weighting.target.target.value,
            shares=dict(weighting.target.target.shares),
            strength=weighting.target.strength,
            prior=by_name(names, prior),
            weights_without=by_name(names, without),
            windows=weighting.target.windows,
        )
    parameters = ChameleonParameters(
        mode=weighting.mode,
        recipe=weighting.recipe,
        embedding=embedding,
        effective_ridge=result.effective_ridge,
        effective_temperature=result.effective_temperature,
        effective_dimension=result.effective_dimension,
        effective_directions=shrinkage.directions,
        shrinkage_factor=shrinkage.factor,
        is_shrunk=factor < 1.0,
        windows=vectors.windows,
        bootstrap_resamples=options.bootstrap_resamples,
        bootstrap_group=vectors.group,
        paper_flops=paper_flops,
        paper_flops_of_proxy=paper_flops_of_proxy,
        target=target,
    )
    outweighs = order_of(list(fields["weights"].values()), names, bootstrap)
    mixture = Mixture(
        **fields,
        method=f"chameleon-{weighting.mode}",
        parameters=parameters.as_json(),
        scores=by_name(names, result.scores),
        intervals=by_name(names, np.column_stack([bootstrap.low, bootstrap.high])),
        confidence=options.confidence,
        outweighs=outweighs,
        affinity=result.affinity.tolist() if len(names) <= MAX_AFFINITY_DOMAINS else None,
        provenance=provenance,
    )
    return mixture, describe_intervals(bootstrap, outweighs, vectors, options.precision)


def explained(weighting: Weighting, means: Array) -> str:
    """Return the tables of ``--explain`` for domains with the embeddings ``means`` [k, h]."""
    prior = weighting.prior(means)

    def weights_of(recipe: Recipe) -> WeightResult:
        found = weigh_means(means, weighting.mode, recipe, prior)
        return shrunk(found, Shrinkage.of(found).factor) if weighting.options.shrink else found

    return explain(weighting.names, weighting.recipe, weights_of)


def weigh_means(
    means: Array, mode: Mode, recipe: Recipe, prior: Array | None = None
) -> WeightResult:
    """Compute Chameleon weights from embeddings, without the warning about clipped scores.

    Args:
        means: [k, h] float64, the domain embeddings.
        mode: "pretrain" or "finetune".
        recipe: recipe of the weights, with user-supplied hyperparameters.
        prior: [k] prior of the domains; None without a target.
    """
    with warnings.catch_warnings():
        # This warning lists only positions, so it is suppressed; warn_degenerate() lists names.
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        return chameleon_weights(means, mode, recipe, prior=prior)


def shrunk(result: WeightResult, factor: float) -> WeightResult:
    """Shrink the weights of ``result`` towards its prior by ``factor``."""
    weights = shrunk_weights(result.weights, factor, result.prior)
    return dataclasses.replace(result, weights=weights)


def order_of(
    weights: Sequence[float], names: Sequence[str], bootstrap: BootstrapResult
) -> list[tuple[str, str, float]]:
    """Return (a, b, probability that a outweighs b) for neighbours when sorted by ``weights``."""
    order = np.argsort(-np.array(weights), kind="stable").tolist()
    likely = outweighing_probability(bootstrap, order[:-1], order[1:]).tolist()
    pairs = zip(itertools.pairwise(order), likely, strict=True)
    return [(names[one], names[other], probability) for (one, other), probability in pairs]


def describe_intervals(
    bootstrap: BootstrapResult,
    outweighs: Sequence[tuple[str, str, float]],
    vectors: DomainVectors,
    precision: float,
) -> list[str]:
    """Describe the uncertainty of the weights, and the windows that ``precision`` needs."""
    half_width = float((bootstrap.high - bootstrap.low).max()) / 2
    if half_width <= _ROUNDING:
        return ["widest interval: +-0: resampling the windows does not change the weights"]
    lines = []
    if outweighs:
        heavier, lighter, share = min(outweighs, key=lambda pair: pair[2])
        lines.append(
            f"least certain order: {heavier} outweighs {lighter} in {share:.0%} of resamples"
        )
    group, fewest = vectors.group, min(vectors.windows.values())
    # The standard error of a mean over n windows is proportional to n^-1/2.
    needed = math.ceil(fewest * (half_width / precision) ** 2)
    grouped = f" (bootstrap over means of {group} windows each)" if group > 1 else ""
    lines.append(
        f"widest interval: +-{format_weight(half_width)} with {fewest:,} windows per "
        f"domain{grouped}; +-{precision:g} needs about {needed:,} windows per domain"
    )
    return lines


def warn_degenerate(names: Sequence[str], result: WeightResult, hint: str) -> None:
    """Warn of domains whose scores were clipped; ``hint`` is the end of the message."""
    if result.degenerate:
        clipped = format_names([f"'{names[position]}'" for position in result.degenerate])
        warnings.warn(
            f"the leverage scores of {clipped} were clipped, so the weights of these domains "
            f"depend on the clipping limits: {hint}",
            DegenerateScoreWarning,
            stacklevel=3,
        )


def warn_uninformative(
    weighting: Weighting, result: WeightResult, bootstrap: BootstrapResult, *, is_undertrained: bool
) -> None:
    """Warn of clipped scores, and of uniform weights.

    Args:
        weighting: recipe and domains.
        result: weights before constraints.
        bootstrap: bootstrap of the constrained weights.
        is_undertrained: whether the proxy seems undertrained, which has a warning of its own.
    """
    names = weighting.names
    hint = "try --recipe scaled or, with --target, a smaller --target-strength; see --explain"
    warn_degenerate(names, result, hint)
    uniform, several = 1.0 / len(names), len(names) > 1
    covers_uniform = (bootstrap.low <= uniform + _ROUNDING) & (
        uniform - _ROUNDING <= bootstrap.high
    )
    is_fixed = float(np.ptp(bootstrap.weights, axis=0).max()) < _ROUNDING
    if len(names) == 2 and is_fixed and covers_uniform.all():
        # Centred embeddings of two domains are x and -x, and scores do not depend on the sign.
        warn(
            f"two domains get the same weight with --recipe {weighting.recipe.name}, whatever "
            "their text: pass --target, add a domain, or use --method mixmin"
        )
    elif several and not is_undertrained and covers_uniform.all():
        warn(
            "no weight differs significantly from uniform: use more windows (--num-windows) or a "
            "proxy trained for longer, or train uniformly"
        )


def warn_one_hot(
    weighting: Weighting, plain: WeightResult, means: Array, factor: float, resampled: Array
) -> None:
    """Warn of a domain with nearly all of the weight, unless --keep demands it.

    Args:
        weighting: everything but the embeddings.
        plain: weights without shrinkage and limits.
        means: [k, h] float64, the domain embeddings.
        factor: of :func:`shrunk`.
        resampled: [resamples, k] adjusted weights.
    """
    weights = weighting.adjust(plain, factor)
    is_kept = weighting.kept is not None and shrunk(plain, factor).weights.max() <= ONE_HOT
    if len(weights) > 1 and not is_kept and np.median(resampled.max(axis=1)) > ONE_HOT:
        # Noisy embeddings may give the weight to another domain in each resample.
        named = weights.max() > ONE_HOT
        heaviest = f"'{weighting.names[int(weights.argmax())]}'" if named else "one domain"
        spread = weighting.spread(plain, means, factor) if named else None
        hints = ["train the proxy for longer", "compare the weights of another proxy"]
        hints += [] if spread is None else [f"pass {spread}"]
        warn(
            f"{heaviest} has nearly all of the weight{'' if named else ' in most resamples'}, as "
            f"with an undertrained proxy: {', '.join(hints[:-1])}, or {hints[-1]}"
        )


def warn_target_without_effect(result: WeightResult, untargeted: WeightResult) -> None:
    """Warn of a target that hardly raises the weights of its domains.

    Args:
        result: weights before constraints.
        untargeted: the same without --target.
    """
    above = np.zeros(1) if result.prior is None else np.maximum(result.prior - 1.0, 0.0)
    gain = len(above) * float((above * (result.weights - untargeted.weights)).sum())
    # <= also warns if all priors are equal: both sides are then 0.
    if gain <= MIN_TARGET_GAIN * float(above.sum()):
        ridge = "smaller" if result.mode == "pretrain" else "larger"
        warn(
            f"with ridge {result.effective_ridge:.3g}, --target has almost no effect or the "
            f"opposite effect: try a {ridge} --ridge, fewer domains, or another text"
        )
