"""Chameleon: proxy -> domain embeddings -> kernel ridge leverage scores -> mixture.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1. The proxy is trained beforehand by
pretrain_gpt with uniform weights; for fine-tuning, the proxy is the model that will be
fine-tuned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import (
    Corpus,
    Cost,
    EmbeddingRecipe,
    EmbeddingStore,
    Mixture,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.mixture import MAX_AFFINITY_DOMAINS
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.corpus.encode import TextEncoder
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.target import Target, parse_target, read_target_text
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.embedding.embed import (
    StoreEntry,
    embed_by_recipe,
    fill_store,
    missing_entries,
    open_store,
    sample_windows,
)
from megatron_chameleon.embedding.proxy import Proxy, open_proxy
from megatron_chameleon.embedding.text import (
    CorpusText,
    DecodedCorpusText,
    DomainText,
    SampledText,
    find_text,
)
from megatron_chameleon.embedding.windows import WINDOW_LENGTH
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.methods.chameleon import ChameleonOptions, ExtractionOptions
from megatron_chameleon.methods.chameleon.explain import explain
from megatron_chameleon.methods.output import (
    ONE_HOT,
    EpochLimit,
    by_name,
    epoch_limit,
    format_weight,
    require_training_tokens,
    select_domains,
    warn,
    write_and_print,
)
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
from megatron_chameleon.mixture.target import DEFAULT_STRENGTH, similarity_shares, target_prior
from megatron_chameleon.mixture.weights import placed_weights
from megatron_chameleon.model.readout import check_layer, check_window
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.progress import progress_bar

if TYPE_CHECKING:
    from megatron_chameleon.methods.discovery import DiscoverOptions

# The texts of a target may have names of domains, so their windows are sampled under other names.
TARGET_KEY = "--target"
# Warn if the target raises the weights of its domains by less than this share of the mean weight.
MIN_TARGET_GAIN = 0.05
# Intervals of weights that resampling does not change are not exactly 0.
_ROUNDING = 1e-9
PROGRESS_DELAY_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
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
    vectors: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    windows: int = 0

    @property
    def held_out(self) -> list[str]:
        """Held-out domains of the target."""
        known = {*self.names, *self.target.texts}
        return [name for name in self.target.shares if name not in known]

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

    def with_vectors(self, windows: Mapping[str, NDArray[np.floating]]) -> TargetPrior:
        """Add the means of the embedded ``windows`` (name -> [windows, h])."""
        means = {name: rows.mean(axis=0, dtype=np.float64) for name, rows in windows.items()}
        count = self.windows + sum(map(len, windows.values()))
        return dataclasses.replace(self, vectors={**self.vectors, **means}, windows=count)

    def with_held_out(self, store: EmbeddingStore) -> TargetPrior:
        """Add the embeddings of held-out domains, from ``store``."""
        return self.with_vectors(
            {name: store.vectors(held_out_key(name)) for name in self.held_out}
        )


@dataclasses.dataclass(frozen=True)
class EmbeddingPlan:
    """The text of domains, and the validated proxy that embeds it.

    Attributes:
        text: text of the domains.
        names: selected domains.
        proxy: the proxy.
        embedding: recipe of the embedding store.
        open_encoder: opens the tokenizer of ``text``.
    """

    text: DomainText
    names: list[str]
    proxy: Proxy
    embedding: EmbeddingRecipe
    open_encoder: Callable[[], TextEncoder]


@dataclasses.dataclass(frozen=True)
class MixturePlan(EmbeddingPlan):
    """Validated options, and the artifacts that they name.

    Attributes:
        options: options of the method.
        corpus: corpus of the domains; None for raw text.
        limit: limit on the epochs of each domain.
        kept: mixture of ``--keep``, whose domains keep their relative weights.
        target: target of the mixture, if any.
        recipe: recipe of the weights, with user-supplied hyperparameters.
        store: folder of the embedding store.
        provenance: provenance of the mixture.
    """

    options: ChameleonOptions
    corpus: Corpus | None
    limit: EpochLimit
    kept: Mixture | None
    target: TargetPrior | None
    recipe: Recipe
    store: Path
    provenance: Provenance

    @property
    def entries(self) -> list[StoreEntry]:
        """Text to embed: the selected domains, and the valid splits of held-out targets."""
        held_out = self.target.held_out if self.target else ()
        return [
            *(StoreEntry(name, name, self.embedding) for name in self.names),
            *(StoreEntry(held_out_key(n), n, self.embedding, "valid") for n in held_out),
        ]


def held_out_key(name: str) -> str:
    """Name of a held-out domain's vectors in the embedding store."""
    return f"{name}/valid"


def compute_mixture(options: ChameleonOptions) -> None:
    """Embed the domains that the store lacks and write the mixture. Called on every rank.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_mixture(options))
        store, texts, missing = from_main(lambda: open_inputs(plan))
        spent = text_cost = Cost()
        if missing or texts:
            reader = plan.proxy.open_reader(layout, plan.embedding)
            batch_size = options.extraction.embedding_batch_size
            for name, text in texts.items():
                key = f"{TARGET_KEY} {name}"
                sampled = sample_windows(plan.embedding, key, text)
                bar = (len(sampled), " windows", f"embedding {name}")
                with progress_bar(*bar, quiet=not layout.is_main) as progress:
                    vectors, cost = embed_by_recipe(
                        reader, text, sampled, plan.embedding, batch_size, progress, key
                    )
                text_cost += cost
                assert plan.target is not None
                target = plan.target.with_vectors({name: vectors})
                plan = dataclasses.replace(plan, target=target)
            if missing:
                store, spent = fill_store(store, plan.text, reader, missing, batch_size)
        if layout.is_main:
            stopwatch = Stopwatch()
            closing = (
                f"embedding {len(missing)} domains took {spent.flops:.2e} FLOPs and "
                f"{spent.wall_seconds:.1f} s"
            )
            reused = f"{len(plan.entries) - len(missing)} domains reused from {plan.store}"
            mixture, lines = weigh(plan, store)
            cost = stopwatch.cost(num_devices=layout.world_size) + text_cost
            heading = (
                f"Chameleon, {options.mode} weights, recipe {plan.recipe.name}, layer "
                f"{plan.embedding.layer} of {plan.proxy.num_layers}, {reused}"
            )
            if plan.target is not None:
                heading += f"\ntarget: {options.target}, strength {plan.target.strength:g}"
            mixture = dataclasses.replace(mixture, cost=cost)
            if isinstance(plan.text, SampledText) and plan.text.read:
                lines.append(f"text read: {format_names(plan.text.summary())}")
            write_and_print(mixture, options, plan.corpus, heading, *lines, closing)


def open_inputs(
    plan: MixturePlan,
) -> tuple[EmbeddingStore, dict[str, TokenFile], list[StoreEntry]]:
    """Open the embedding store, read the texts of the target, and list the domains to embed.

    Raises:
        UserError: if the store has another recipe, or a text is malformed or empty. Raw text is
            read up to its first document, so that most mistakes are found before the embedding.
    """
    store = open_store(plan.store, plan.embedding, plan.proxy.hidden_size, plan.provenance)
    texts: dict[str, TokenFile] = {}
    if plan.target is not None:
        target, recipe = plan.target.target, plan.embedding
        tokens = 2 * recipe.num_windows * recipe.window_length
        for name in target.texts:
            encoder = plan.open_encoder()
            texts[name] = read_target_text(
                plan.options.source, target, name, encoder, tokens, recipe.seed
            )
    missing = missing_entries(store, plan.text, plan.entries)
    if isinstance(plan.text, SampledText):
        plan.text.check(entry.domain for entry in missing)
    return store, texts, missing


def plan_mixture(options: ChameleonOptions) -> MixturePlan:
    """Load and check the artifacts that ``options`` name. Writes nothing.

    Raises:
        UserError: for the first mistake found.
    """
    check_output(options.output, Mixture.KIND)
    recipe = options.weighting.resolve()
    if options.corpus is None:
        corpus = None
        plan = plan_sampling(options)
        limit = EpochLimit(dict.fromkeys(plan.names, 0), None, None)
    else:
        corpus = Corpus.load(options.corpus)
        plan = plan_embedding(options, corpus, options.extraction)
        require_training_tokens(corpus, plan.names, "to embed")
        limit = epoch_limit(options, corpus, plan.names)
        limit.check()
    names = plan.names
    inputs = {"corpus" if corpus else "text": plan.text.hash, "checkpoint": plan.proxy.hash}
    kept = None
    if options.keep is not None:
        kept = Mixture.load(options.keep)
        inputs["kept mixture"] = kept.hash
        if not any(kept.weights.get(name, 0.0) > 0 for name in names):
            raise UserError(
                f"--keep {options.keep}: it has no weight for any of {format_names(names)}; pass "
                "a mixture that contains some of these domains, or omit --keep"
            )
    held_out = corpus.held_out if corpus else {}
    target = None
    if options.target is not None:
        strength = options.target_strength
        target = TargetPrior(
            parse_target(options.target, [*names, *held_out], options.source),
            DEFAULT_STRENGTH if strength is None else strength,
            names,
        )
        if target.target.texts:
            inputs["target text"] = target.target.texts_hash
        for name in target.held_out:
            assert corpus is not None
            if corpus.held_out[name].valid.tokens == 0:
                raise UserError(f"--target {options.target}: '{name}' has no validation text")
            if held_out_key(name) in names:
                raise UserError(
                    f"--target {options.target}: the store has '{held_out_key(name)}' as a domain, "
                    f"which is also the name for the validation text of '{name}'; rename one"
                )
    return MixturePlan(
        **vars(plan),
        options=options,
        corpus=corpus,
        limit=limit,
        kept=kept,
        target=target,
        recipe=recipe,
        store=options.store or options.output.parent / "embeddings",
        provenance=provenance(options, inputs),
    )


def plan_embedding(
    options: ChameleonOptions | DiscoverOptions, corpus: Corpus, extraction: ExtractionOptions
) -> EmbeddingPlan:
    """Load the proxy that ``options`` name, and check that it matches ``corpus``.

    Raises:
        UserError: for the first mistake found.
    """
    proxy = open_proxy(options.checkpoint, trust_remote_code=options.trust_remote_code)
    names = select_domains(options.domains, corpus.names, corpus.root, held_out=corpus.held_out)
    text, tokenizer_hash = CorpusText(corpus), corpus.tokenizer.sha256
    open_encoder: Callable[[], TextEncoder] = functools.partial(corpus_tokenizer, corpus)
    if not proxy.reads_ids_of(corpus):
        open_encoder()  # fails before the embedding if the corpus has lost its tokenizer
        open_encoder = proxy.open_encoder
        tokenizer_hash = sha256_of_json([tokenizer_hash, open_encoder().sha256])
        text = DecodedCorpusText(corpus, open_encoder)
    recipe = _recipe_for(extraction, proxy, options.parallel, tokenizer_hash)
    return EmbeddingPlan(text, names, proxy, recipe, open_encoder)


def plan_sampling(options: ChameleonOptions) -> EmbeddingPlan:
    """Find the raw text and the proxy that ``options`` name. No text is read.

    Raises:
        UserError: for the first mistake found.
    """
    proxy = open_proxy(
        options.checkpoint,
        trust_remote_code=options.trust_remote_code,
        tokenizer=options.tokenizer,
    )
    open_encoder = proxy.open_encoder
    tokenizer_hash = open_encoder().sha256
    recipe = _recipe_for(options.extraction, proxy, options.parallel, tokenizer_hash)
    text = find_text(options.source, open_encoder, recipe)
    names = select_domains(options.domains, text.names, text.where)
    return EmbeddingPlan(text, names, proxy, recipe, open_encoder)


def _recipe_for(
    options: ExtractionOptions, proxy: Proxy, parallel: ParallelOptions, tokenizer_hash: str
) -> EmbeddingRecipe:
    """Construct the recipe of an embedding store for ``proxy``.

    Raises:
        UserError: for a layer that the model does not have, windows that are too long for it, or an
            unsupported layout or option.
    """
    layer = check_layer(proxy.num_layers, options.layer)
    default = default_window_length(options, proxy.default_window_length)
    window = check_window(proxy.max_sequence_length, default, options.window_length)
    recipe = embedding_recipe(options, proxy.hash, layer, window, tokenizer_hash)
    proxy.check(recipe, parallel)
    return recipe


def default_window_length(options: ExtractionOptions, sequence_length: int) -> int:
    """Return the default of ``--window-length`` for a proxy trained on ``sequence_length`` tokens.

    A fixed length suits all text, since windows may cross documents.
    """
    return sequence_length if options.within_documents else min(WINDOW_LENGTH, sequence_length)


def embedding_recipe(
    options: ExtractionOptions, model_hash: str, layer: int, window_length: int, tokenizer_hash: str
) -> EmbeddingRecipe:
    """Construct the recipe of an embedding store from options, and values that are checked."""
    return EmbeddingRecipe(
        model_hash=model_hash,
        layer=layer,
        window_length=window_length,
        num_windows=options.num_windows,
        seed=options.extraction_seed,
        tokenizer_hash=tokenizer_hash,
        cross_documents=not options.within_documents,
        dtype=options.embedding_dtype,
        final_norm=options.final_norm,
    )


def weigh_means(
    means: Array, mode: Mode, recipe: Recipe, prior: Callable[[Array], Array] | None = None
) -> WeightResult:
    """Compute Chameleon weights from embeddings, without the warning about clipped scores.

    Args:
        means: [k, h] float64, the domain embeddings.
        mode: "pretrain" or "finetune".
        recipe: recipe of the weights, with user-supplied hyperparameters.
        prior: domain embeddings -> prior [k]; None without a target.
    """
    with warnings.catch_warnings():
        # This warning lists only positions, so it is suppressed; warn_degenerate() lists names.
        warnings.simplefilter("ignore", DegenerateScoreWarning)
        eta = None if prior is None else prior(means)
        return chameleon_weights(means, mode, recipe, prior=eta)


def shrinkage_of(result: WeightResult) -> tuple[float, float]:
    """Return the effective directions of the embeddings, and the factor by which to shrink weights.

    Neither depends on the prior.
    """
    directions = effective_directions(result.features)
    return directions, shrinkage_factor(directions, len(result.features))


def shrunk(result: WeightResult, factor: float) -> WeightResult:
    """Shrink the weights of ``result`` towards its prior by ``factor``."""
    weights = shrunk_weights(result.weights, factor, result.prior)
    return dataclasses.replace(result, weights=weights)


def explain_shrinkage(
    plain: WeightResult, directions: float, factor: float, advice: str | None
) -> str:
    """Return why the weights ``plain`` are unreliable, and by how much the rule shrinks them.

    Args:
        plain: weights without the rule.
        directions: r, from :func:`shrinkage_of`.
        factor: f, from :func:`shrinkage_of`, below 1.
        advice: what the user should do; None if the rule has been applied.
    """
    most = min(len(plain.weights) - 1, MOST_DIRECTIONS)
    largest = " -> ".join(format_weight(shrunk(plain, f).weights.max()) for f in (1.0, factor))
    effect = f"log weights by {factor:.2f} (largest weight {largest})"
    return (
        f"the domains' embeddings differ in {directions:.1f} of at most {most} effective "
        "directions, as with an undertrained proxy, whose weights depend on its seed: "
        + (f"{advice}, which multiplies {effect}" if advice else f"multiplied {effect}")
    )


def weigh(plan: MixturePlan, store: EmbeddingStore) -> tuple[Mixture, list[str]]:
    """Compute the mixture, without its cost. Runs on one rank, in float64.

    Vectors are read one domain at a time. For the bootstrap, a large number of windows is replaced
    by means over groups of windows.

    Args:
        plan: validated options; their target text, if any, has been embedded.
        store: embedding store that holds the vectors of ``plan.entries``.

    Returns:
        The mixture, and lines to print: its uncertainty and the tables of ``--explain``.

    Raises:
        UserError: if a file of the store is damaged.
    """
    options, names = plan.options, plan.names
    target = plan.target and plan.target.with_held_out(store)
    seed, weighting = options.extraction.extraction_seed, options.weighting
    windows = {name: store.domains[name].windows for name in names}
    group = group_size(len(names), max(windows.values()), store.hidden_size)
    rows, resampled = [], []
    for name in names:
        vectors = store.vectors(name)
        rows.append(vectors.mean(axis=0, dtype=np.float64))
        resampled.append(grouped_windows(vectors, group, seed))
    means, fewest = np.stack(rows), min(windows.values())
    by_recipe = functools.partial(weigh_means, means, options.mode)
    plain = by_recipe(plan.recipe, target)
    directions, advised = shrinkage_of(plain)
    factor = advised if weighting.shrink else 1.0
    result = shrunk(plain, factor)
    untargeted = shrunk(by_recipe(plan.recipe), factor) if target else result
    limit, kept = plan.limit, plan.kept.weights if plan.kept else {}
    before = np.array([kept.get(name, 0.0) for name in names])
    is_old = np.array([name in kept for name in names])

    def place(weights: Array) -> Array:
        return placed_weights(weights, before, is_old) if plan.kept else weights

    resamples = weighting.bootstrap_resamples
    bar = progress_bar(resamples, " resamples", "intervals", delay=PROGRESS_DELAY_SECONDS)
    with bar as progress:

        def constrained(embeddings: Array) -> Array:
            progress.update()
            eta = None if target is None else target(embeddings)
            resample = chameleon_weights(embeddings, options.mode, plan.recipe, prior=eta)
            # Noise of the resampling adds directions, so the factor is that of all windows.
            return limit.apply(place(shrunk(resample, factor).weights))

        bootstrap = bootstrap_weights(resampled, constrained, resamples, seed, weighting.confidence)
    _warn_uninformative(plan, result, untargeted, bootstrap, is_undertrained=advised < 1.0)
    fields = limit.mixture_fields(place(result.weights))
    if advised < 1.0:
        advice = None if weighting.shrink else "train the proxy for longer, or pass --shrink"
        warn(explain_shrinkage(plain, directions, advised, advice))
    order = np.argsort(-np.array(list(fields["weights"].values())), kind="stable").tolist()
    likely = outweighing_probability(bootstrap, order[:-1], order[1:]).tolist()
    outweighs = [
        (names[one], names[other], probability)
        for (one, other), probability in zip(itertools.pairwise(order), likely, strict=True)
    ]
    embedded = sum(store.domains[name].tokens for name in names)
    recipe = dataclasses.asdict(plan.recipe)
    parameters: dict[str, Any] = {
        "mode": options.mode,
        # JSON cannot represent infinity, so an infinite limit is stored as null.
        "recipe": {field: None if value == math.inf else value for field, value in recipe.items()},
        "embedding": dataclasses.asdict(plan.embedding),
        "effective_ridge": result.effective_ridge,
        "effective_temperature": result.effective_temperature,
        "effective_dimension": result.effective_dimension,
        "effective_directions": directions,
        "shrinkage_factor": advised,
        "is_shrunk": factor < 1.0,
        "windows": windows,
        "bootstrap_resamples": resamples,
        "bootstrap_group": group,
        "paper_flops": plan.proxy.embedding_paper_flops(embedded),
        "paper_flops_of_proxy": plan.proxy.training_paper_flops,
    }
    if target is not None:
        without = limit.apply(place(untargeted.weights))
        parameters["target"] = {
            "value": target.target.value,
            "shares": dict(target.target.shares),
            "strength": target.strength,
            "prior": by_name(names, target(means)),
            "weights_without": by_name(names, without),
            "windows": target.windows,
        }
    mixture = Mixture(
        **fields,
        method=f"chameleon-{options.mode}",
        parameters=parameters,
        scores=by_name(names, result.scores),
        intervals=by_name(names, np.column_stack([bootstrap.low, bootstrap.high])),
        confidence=weighting.confidence,
        outweighs=outweighs,
        affinity=result.affinity.tolist() if len(names) <= MAX_AFFINITY_DOMAINS else None,
        provenance=plan.provenance,
    )
    lines = []
    half_width = float((bootstrap.high - bootstrap.low).max()) / 2
    if outweighs and half_width > _ROUNDING:
        heavier, lighter, share = min(outweighs, key=lambda pair: pair[2])
        lines.append(
            f"least certain order: {heavier} outweighs {lighter} in {share:.0%} of resamples"
        )
    if half_width > _ROUNDING:
        # The standard error of a mean over n windows is proportional to n^-1/2.
        needed = math.ceil(fewest * (half_width / weighting.precision) ** 2)
        grouped = f" (bootstrap over means of {group} windows each)" if group > 1 else ""
        lines.append(
            f"widest interval: +-{format_weight(half_width)} with {fewest:,} windows per "
            f"domain{grouped}; +-{weighting.precision:g} needs about {needed:,} windows per domain"
        )
    else:
        lines.append("widest interval: +-0: resampling the windows does not change the weights")
    if options.explain:

        def explained(recipe: Recipe) -> WeightResult:
            found = by_recipe(recipe, target)
            return shrunk(found, shrinkage_of(found)[1]) if weighting.shrink else found

        lines += ["", explain(names, plan.recipe, explained), ""]
    return mixture, lines


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


def _warn_uninformative(
    plan: MixturePlan,
    result: WeightResult,
    untargeted: WeightResult,
    bootstrap: BootstrapResult,
    *,
    is_undertrained: bool,
) -> None:
    """Warn of clipped scores, of uniform or one-hot weights, and of a target without an effect.

    Args:
        plan: plan of the mixture.
        result: weights before constraints.
        untargeted: weights without --target, before constraints.
        bootstrap: bootstrap of the constrained weights.
        is_undertrained: whether the proxy seems undertrained, which has a warning of its own.
    """
    hint = "try --recipe scaled or, with --target, a smaller --target-strength; see --explain"
    warn_degenerate(plan.names, result, hint)
    uniform, several = 1.0 / len(plan.names), len(plan.names) > 1
    covers_uniform = (bootstrap.low <= uniform + _ROUNDING) & (
        uniform - _ROUNDING <= bootstrap.high
    )
    is_fixed = float(np.ptp(bootstrap.weights, axis=0).max()) < _ROUNDING
    if len(plan.names) == 2 and is_fixed and covers_uniform.all():
        # Centred embeddings of two domains are x and -x, and scores do not depend on the sign.
        warn(
            f"two domains get the same weight with --recipe {plan.recipe.name}, whatever their "
            "text: pass --target, add a domain, or use --method mixmin"
        )
    elif several and not is_undertrained and covers_uniform.all():
        warn(
            "no weight differs significantly from uniform: use more windows (--num-windows) or a "
            "proxy trained for longer, or train uniformly"
        )
    if several and np.median(bootstrap.weights.max(axis=1)) > ONE_HOT:
        warn(
            "one domain has nearly all of the weight, as with an undertrained proxy: train the "
            "proxy for longer, or use --recipe scaled or a higher --temperature"
        )
    if plan.target is None:
        return
    above = np.zeros(1) if result.prior is None else np.maximum(result.prior - 1.0, 0.0)
    gain = len(above) * float((above * (result.weights - untargeted.weights)).sum())
    # <= also warns if all priors are equal: both sides are then 0.
    if gain <= MIN_TARGET_GAIN * float(above.sum()):
        ridge = "smaller" if plan.options.mode == "pretrain" else "larger"
        warn(
            f"with ridge {result.effective_ridge:.3g}, --target has almost no effect or the "
            f"opposite effect: try a {ridge} --ridge, fewer domains, or another text"
        )
