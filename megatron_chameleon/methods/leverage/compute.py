"""Chameleon: proxy -> domain embeddings -> kernel ridge leverage scores -> mixture.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1. The proxy is trained before, by
tools/pretrain_gpt.py with uniform weights; for fine-tuning it is the model to be tuned.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Cost, EmbeddingStore, Mixture, Stopwatch
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.embedding.embed import fill_store, missing_domains, open_store
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.common.finish import next_step
from megatron_chameleon.methods.common.table import closing_words, mixture_table
from megatron_chameleon.methods.leverage.domain_windows import read_windows
from megatron_chameleon.methods.leverage.explain import explanation
from megatron_chameleon.methods.leverage.plan import MixturePlan, plan_mixture
from megatron_chameleon.methods.leverage.target_text import (
    EmbeddedTarget,
    embed_target,
    read_target,
)
from megatron_chameleon.methods.leverage.weighing import prior_of, weigh
from megatron_chameleon.parallel.layout import Layout, distributed, from_main


def compute_mixture(options: ChameleonOptions) -> None:
    """Embed what the store lacks, weigh the domains and write the mixture. Every rank calls this.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_mixture(options))
        store = from_main(lambda: _open_store(plan))
        text = from_main(lambda: _target_tokens(plan))
        missing = from_main(lambda: missing_domains(store, plan.corpus, plan.names))
        store, spent, target = _embed(plan, store, missing, text, layout)
        if layout.is_main:
            _weigh_and_tell(plan, store, target, layout.world_size, missing, spent)


def _open_store(plan: MixturePlan) -> EmbeddingStore:
    hidden_size = plan.shape.size.hidden_size
    return open_store(plan.store, plan.embedding, hidden_size, plan.provenance)


def _target_tokens(plan: MixturePlan) -> TokenFile | None:
    """The text of ``--target``, before anything is embedded, so that a mistake shows at once."""
    if plan.target is None or plan.target.text is None:
        return None
    return read_target(plan.target.text, plan.corpus)


def _embed(
    plan: MixturePlan,
    store: EmbeddingStore,
    missing: list[str],
    text: TokenFile | None,
    layout: Layout,
) -> tuple[EmbeddingStore, Cost, EmbeddedTarget | None]:
    """The proxy's part: the domains that the store lacks, their cost, and the target's text."""
    if not missing and text is None:
        return store, Cost(), None
    reader = open_reader(plan.checkpoint, layout, bf16=plan.embedding.dtype == "bfloat16")
    batch_size = plan.options.extraction.embedding_batch_size
    target = None if text is None else embed_target(text, plan.embedding, reader, batch_size)
    spent = Cost()
    if missing:
        store, spent = fill_store(store, plan.corpus, reader, missing, batch_size)
    return store, spent, target


def _weigh_and_tell(
    plan: MixturePlan,
    store: EmbeddingStore,
    target: EmbeddedTarget | None,
    num_devices: int,
    missing: list[str],
    spent: Cost,
) -> None:
    """Write the mixture and print it, with what embedding ``missing`` cost."""
    stopwatch, options = Stopwatch(), plan.options
    windows = read_windows(store, plan.names, options.extraction.extraction_seed)
    mixture = weigh(plan, windows, target)
    cost = stopwatch.cost(num_devices=num_devices) + (Cost() if target is None else target.cost)
    mixture = dataclasses.replace(mixture, cost=cost)
    mixture.save(options.output)
    print(f"{_heading(plan, len(missing))}\n{mixture_table(mixture)}\n{_closing(plan, mixture)}")
    if options.explain:
        prior = prior_of(plan, target)
        print(f"\n{explanation(plan.names, windows, options.mode, plan.recipe, prior)}")
        changed = options.keep is not None or options.max_epochs is not None
        print("The knobs' weights are those before --keep and --max-epochs.\n" if changed else "")
    print(
        f"embedding {len(missing)} domains took {spent.flops:.2e} FLOPs and "
        f"{spent.wall_seconds:.1f} s\n{next_step(options)}"
    )


def _heading(plan: MixturePlan, num_missing: int) -> str:
    heading = (
        f"Chameleon, {plan.options.mode} weights, recipe {plan.recipe.name}, layer "
        f"{plan.embedding.layer} of {plan.shape.size.num_layers}, "
        f"{len(plan.names) - num_missing} domains reused from {plan.store}"
    )
    if plan.target is None:
        return heading
    return f"{heading}\ntowards {plan.target.given}, with strength {plan.target.strength:g}"


def _closing(plan: MixturePlan, mixture: Mixture) -> str:
    words = closing_words(mixture, plan.options.weighting.precision)
    group = mixture.parameters["bootstrap_group"]
    if group == 1:
        return words
    return f"{words}\nfor so many domains the intervals resample means of {group} windows each"
