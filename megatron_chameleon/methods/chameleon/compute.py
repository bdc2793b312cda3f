"""Chameleon: proxy -> domain embeddings -> kernel ridge leverage scores -> mixture.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1. The proxy is trained beforehand by
tools/pretrain_gpt.py with uniform weights; for fine-tuning, it is the model to be tuned.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Cost, Stopwatch
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.embedding.embed import fill_store, missing_domains, open_store
from megatron_chameleon.methods.chameleon.explain import explain
from megatron_chameleon.methods.chameleon.options import ChameleonOptions
from megatron_chameleon.methods.chameleon.plan import MixturePlan, plan_mixture
from megatron_chameleon.methods.chameleon.target import EmbeddedText, embed_text, read_text
from megatron_chameleon.methods.chameleon.weights import read_windows, resolve_prior, weigh
from megatron_chameleon.methods.output import closing_lines, mixture_table, next_command
from megatron_chameleon.parallel.layout import distributed, from_main


def compute_mixture(options: ChameleonOptions) -> None:
    """Embed the domains that the store lacks and write the mixture. Called on every rank.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_mixture(options))
        hidden_size = plan.shape.size.hidden_size
        store, text, missing = from_main(
            lambda: (
                store := open_store(plan.store, plan.embedding, hidden_size, plan.provenance),
                # Before anything is embedded, so that a malformed text fails at once.
                plan.target and plan.target.text and read_text(plan.target.text, plan.corpus),
                missing_domains(store, plan.corpus, plan.names),
            )
        )
        embedded, spent = None, Cost()
        if missing or text:
            reader = open_reader(plan.checkpoint, layout, bf16=plan.embedding.dtype == "bfloat16")
            batch_size = options.extraction.embedding_batch_size
            if text:
                embedded = embed_text(text, plan.embedding, reader, batch_size)
            if missing:
                store, spent = fill_store(store, plan.corpus, reader, missing, batch_size)
        if not layout.is_main:
            return
        stopwatch = Stopwatch()
        windows = read_windows(store, plan.names, options.extraction.extraction_seed)
        mixture = weigh(plan, windows, embedded)
        cost = stopwatch.cost(num_devices=layout.world_size)
        mixture = dataclasses.replace(mixture, cost=cost + embedded.cost if embedded else cost)
        mixture.save(options.output)
        lines = [
            *_heading(plan, embedded, len(missing)),
            mixture_table(mixture),
            closing_lines(mixture, options.weighting.precision),
        ]
        if windows.group > 1:
            lines.append(f"intervals: bootstrap over means of {windows.group} windows each")
        if options.explain:
            prior = resolve_prior(plan, embedded)
            lines += ["", explain(plan.names, windows, options.mode, plan.recipe, prior)]
            if options.keep is not None or options.max_epochs is not None:
                lines.append("These weights do not include the effect of --keep and --max-epochs.")
            lines.append("")
        lines += [
            f"embedding {len(missing)} domains took {spent.flops:.2e} FLOPs and "
            f"{spent.wall_seconds:.1f} s",
            next_command(options),
        ]
        print("\n".join(lines))


def _heading(plan: MixturePlan, embedded: EmbeddedText | None, num_missing: int) -> list[str]:
    lines = [
        f"Chameleon, {plan.options.mode} weights, recipe {plan.recipe.name}, layer "
        f"{plan.embedding.layer} of {plan.shape.size.num_layers}, "
        f"{len(plan.names) - num_missing} domains reused from {plan.store}"
    ]
    if plan.target is not None:
        of = f" ({embedded.windows} windows)" if embedded else ""
        lines.append(f"target: {plan.target.value}{of}, strength {plan.target.strength:g}")
    return lines
