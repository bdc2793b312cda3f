"""Chameleon: proxy -> domain embeddings -> kernel ridge leverage scores -> mixture.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1. The proxy is trained beforehand by
pretrain_gpt with uniform weights; for fine-tuning, the proxy is the model that will be
fine-tuned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.corpus.domains import Domains, RawText, find_raw_text, open_domains
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.target import (
    Target,
    check_text_options,
    parse_target,
    read_target_text,
    warn_short,
)
from megatron_chameleon.corpus.windows import WINDOW_LENGTH
from megatron_chameleon.embedding.embed import (
    StoreEntry,
    embed_by_recipe,
    fill_store,
    missing_entries,
    open_store,
    sample_windows,
)
from megatron_chameleon.embedding.proxy import Proxy, open_proxy
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.methods.chameleon import ChameleonOptions, ExtractionOptions
from megatron_chameleon.methods.chameleon.weigh import (
    DomainVectors,
    TargetPrior,
    Weighting,
    explained,
    weigh,
)
from megatron_chameleon.methods.limits import EpochLimit, KeptRatios, epoch_limit
from megatron_chameleon.methods.output import (
    require_training_tokens,
    select_domains,
    write_and_print,
)
from megatron_chameleon.mixture import Recipe
from megatron_chameleon.mixture.target import DEFAULT_STRENGTH
from megatron_chameleon.model.readout import check_layer, check_window
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.progress import progress_bar

if TYPE_CHECKING:
    from megatron_chameleon.methods.discovery import DiscoverOptions

# The texts of a target may have names of domains, so their windows are sampled under other names.
TARGET_KEY = "--target"


@dataclasses.dataclass(frozen=True)
class EmbeddingPlan:
    """The text of domains, and the validated proxy that embeds it.

    Attributes:
        text: text of the domains.
        names: selected domains.
        proxy: the proxy.
        recipe: recipe of the embedding store.
    """

    text: Domains | RawText
    names: list[str]
    proxy: Proxy
    recipe: EmbeddingRecipe


@dataclasses.dataclass(frozen=True)
class MixturePlan:
    """Validated options, and the artifacts that they name.

    Attributes:
        options: options of the method.
        embedding: the domains, and the proxy that embeds them.
        corpus: corpus of the domains; None for raw text.
        limit: limit on the epochs of each domain.
        kept: ratios of ``--keep``, if any.
        target: target of the mixture, if any.
        held_out: held-out domains of the target.
        recipe: recipe of the weights, with user-supplied hyperparameters.
        store: folder of the embedding store.
        provenance: provenance of the mixture.
    """

    options: ChameleonOptions
    embedding: EmbeddingPlan
    corpus: Corpus | None
    limit: EpochLimit
    kept: KeptRatios | None
    target: Target | None
    held_out: Sequence[str]
    recipe: Recipe
    store: Path
    provenance: Provenance

    @property
    def entries(self) -> list[StoreEntry]:
        """Text to embed: the selected domains, and the valid splits of held-out targets."""
        recipe = self.embedding.recipe
        return [
            *(StoreEntry(name, name, recipe) for name in self.embedding.names),
            *(StoreEntry(held_out_key(name), name, recipe, "valid") for name in self.held_out),
        ]

    @property
    def strength(self) -> float:
        """``--target-strength``, or its default."""
        strength = self.options.target_strength
        return DEFAULT_STRENGTH if strength is None else strength

    def weighting(self, store: EmbeddingStore, texts: dict[str, NDArray[np.floating]]) -> Weighting:
        """Return what determines the weights; ``texts`` are embedded windows of the target's."""
        names, options, target = self.embedding.names, self.options, None
        if self.target is not None:
            held_out = {name: store.vectors(held_out_key(name)) for name in self.held_out}
            target = TargetPrior.of(self.target, self.strength, names, texts | held_out)
        return Weighting(
            names=names,
            mode=options.mode,
            recipe=self.recipe,
            options=options.weighting,
            seed=options.extraction.extraction_seed,
            target=target,
            kept=self.kept,
            limit=self.limit,
        )


def default_store(output: Path, model_hash: str) -> Path:
    """Return the embedding store next to ``output``.

    It is 'embeddings', or if that folder has embeddings of another proxy, a folder named by the
    proxy's hash.
    """
    folder = output.parent / "embeddings"
    known = EmbeddingStore.load(folder) if EmbeddingStore.exists(folder) else None
    if known and known.recipe.model_hash != model_hash:
        return folder.with_name(f"{folder.name}-{model_hash[:8]}")
    return folder


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
        recipe, text_windows = plan.embedding.recipe, dict[str, NDArray[np.floating]]()
        if missing or texts:
            reader = plan.embedding.proxy.open_reader(layout, recipe)
            batch_size = options.extraction.embedding_batch_size
            for name, text in texts.items():
                key = f"{TARGET_KEY} {name}"
                sampled = sample_windows(recipe, key, text)
                bar = (len(sampled), " windows", f"embedding {name}")
                with progress_bar(*bar, quiet=not layout.is_main) as progress:
                    text_windows[name], cost = embed_by_recipe(
                        reader, text, sampled, recipe, batch_size, progress, key
                    )
                text_cost += cost
            if missing:
                store, spent = fill_store(store, plan.embedding.text, reader, missing, batch_size)
        if layout.is_main:
            stopwatch = Stopwatch()
            mixture, lines = mix(plan, store, text_windows)
            cost = stopwatch.cost(num_devices=layout.world_size) + text_cost
            mixture = dataclasses.replace(mixture, cost=cost)
            reused = f"{len(plan.entries) - len(missing)} domains reused from {plan.store}"
            heading = (
                f"Chameleon, {options.mode} weights, recipe {plan.recipe.name}, layer "
                f"{recipe.layer} of {plan.embedding.proxy.num_layers}, {reused}"
            )
            if plan.target is not None:
                heading += f"\ntarget: {options.target}, strength {plan.strength:g}"
            if read := plan.embedding.text.summary():
                lines.append(f"text read: {format_names(read)}")
            lines.append(
                f"embedding {len(missing)} domains took {spent.flops:.2e} FLOPs and "
                f"{spent.wall_seconds:.1f} s; the embeddings are kept in {plan.store}"
            )
            write_and_print(mixture, options, plan.corpus, heading, *lines, source=options.source)


def mix(
    plan: MixturePlan, store: EmbeddingStore, text_windows: dict[str, NDArray[np.floating]]
) -> tuple[Mixture, list[str]]:
    """Compute the mixture of the embedded domains, without its cost, and lines to print.

    Args:
        plan: validated options.
        store: embedding store that holds the vectors of ``plan.entries``.
        text_windows: text of the target -> its embedded windows [n, h].

    Raises:
        UserError: if a file of the store is damaged.
    """
    weighting = plan.weighting(store, text_windows)
    vectors = DomainVectors.read(store, weighting.names, weighting.seed)
    proxy = plan.embedding.proxy
    embedded = sum(store.domains[name].tokens for name in weighting.names)
    mixture, lines = weigh(
        weighting,
        vectors,
        plan.embedding.recipe,
        plan.provenance,
        paper_flops=proxy.embedding_paper_flops(embedded),
        paper_flops_of_proxy=proxy.training_paper_flops,
    )
    if plan.options.explain:
        lines += ["", explained(weighting, vectors.means), ""]
    return mixture, lines


def open_inputs(
    plan: MixturePlan,
) -> tuple[EmbeddingStore, dict[str, TokenFile], list[StoreEntry]]:
    """Open the embedding store, read the texts of the target, and list the domains to embed.

    Raises:
        UserError: if the store has another recipe, or a text is malformed or empty. Raw text is
            read up to its first document, so that most mistakes are found before the embedding.
    """
    embedding, target = plan.embedding, plan.target
    recipe = embedding.recipe
    store = open_store(plan.store, recipe, embedding.proxy.hidden_size, plan.provenance)
    texts: dict[str, TokenFile] = {}
    if target is not None:
        tokens = 2 * recipe.num_windows * recipe.window_length
        for name in target.texts:
            encoder = embedding.text.open_encoder()
            texts[name] = read_target_text(
                plan.options.source, target, name, encoder, tokens, recipe.seed
            )
            warn_short(name, texts[name])
    missing = missing_entries(store, embedding.text, plan.entries)
    embedding.text.check(entry.domain for entry in missing)
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
        embedding = plan_sampling(options)
        limit = EpochLimit(dict.fromkeys(embedding.names, 0), None, None)
    else:
        corpus = Corpus.load(options.corpus)
        embedding = plan_embedding(options, corpus, options.extraction)
        require_training_tokens(corpus, embedding.names, "to embed")
        limit = epoch_limit(options, corpus, embedding.names)
        limit.check()
    inputs = {
        "corpus" if corpus else "text": embedding.text.hash,
        "checkpoint": embedding.proxy.hash,
    }
    kept = None
    if options.keep is not None:
        mixture = Mixture.load(options.keep)
        inputs["kept mixture"] = mixture.hash
        kept = KeptRatios.of(mixture, embedding.names, options.keep)
    target, held_out = None, list[str]()
    if options.target is not None:
        target, held_out = plan_target(options, embedding.names, corpus)
        if target.texts:
            inputs["target text"] = target.texts_hash
    return MixturePlan(
        options=options,
        embedding=embedding,
        corpus=corpus,
        limit=limit,
        kept=kept,
        target=target,
        held_out=held_out,
        recipe=recipe,
        store=options.store or default_store(options.output, embedding.proxy.hash),
        provenance=provenance(options, inputs),
    )


def plan_target(
    options: ChameleonOptions, names: Sequence[str], corpus: Corpus | None
) -> tuple[Target, list[str]]:
    """Parse ``--target``, and return it with its held-out domains.

    Raises:
        UserError: for an invalid target, an option without effect, or a held-out domain that cannot
            be embedded.
    """
    assert options.target is not None
    known = corpus.held_out if corpus else {}
    target = parse_target(options.target, [*names, *known], options.source)
    if corpus is not None:
        check_text_options(options.source, target)
    held_out = [name for name in target.shares if name not in {*names, *target.texts}]
    for name in held_out:
        if known[name].valid.tokens == 0:
            raise UserError(f"--target {options.target}: '{name}' has no validation text")
        if held_out_key(name) in names:
            raise UserError(
                f"--target {options.target}: the store has '{held_out_key(name)}' as a domain, "
                f"which is also the name for the validation text of '{name}'; rename one"
            )
    return target, held_out


def plan_embedding(
    options: ChameleonOptions | DiscoverOptions, corpus: Corpus, extraction: ExtractionOptions
) -> EmbeddingPlan:
    """Load the proxy that ``options`` name, and check that it matches ``corpus``.

    Raises:
        UserError: for the first mistake found.
    """
    proxy = open_proxy(options.checkpoint, trust_remote_code=options.trust_remote_code)
    names = select_domains(options.domains, corpus.names, corpus.root, held_out=corpus.held_out)
    text = open_domains(corpus).encoded_for(proxy)
    recipe = _recipe_for(extraction, proxy, options.parallel, text.ids_hash)
    return EmbeddingPlan(text, names, proxy, recipe)


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
    text = find_raw_text(options.source).encoded_for(proxy)
    recipe = _recipe_for(options.extraction, proxy, options.parallel, text.ids_hash)
    text = dataclasses.replace(text, recipe=recipe)
    names = select_domains(options.domains, text.names, text.where)
    return EmbeddingPlan(text, names, proxy, recipe)


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
