"""Held-out loss, perplexity and bits per byte of every domain, by an explicit protocol."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import Clusters, DomainLoss, EvaluationResult, Protocol, Stopwatch
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out_corpus import HeldOutCorpus
from megatron_chameleon.evaluation.plan import EvaluationPlan, kept_result, plan_evaluation
from megatron_chameleon.evaluation.result_table import result_table
from megatron_chameleon.evaluation.scored_text import ScoredText
from megatron_chameleon.evaluation.token_losses import cluster_losses, reading_flops
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.options.evaluation import PerplexityOptions
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.progress import progress_bar


def evaluate_perplexity(options: PerplexityOptions) -> EvaluationResult:
    """Evaluate a checkpoint on the held-out text of every domain and write the result.

    Every rank calls this, and every rank gets the result.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    (result,) = evaluate_perplexities([options])
    return result


def evaluate_perplexities(evaluations: Sequence[PerplexityOptions]) -> list[EvaluationResult]:
    """As :func:`evaluate_perplexity`, several checkpoints one after the other.

    Everything that is named is checked before the first of them is evaluated; each result is
    written as soon as it is there. One that is there from before is kept, unless asked otherwise.

    Args:
        evaluations: at least one; all in the same parallel layout, on one corpus.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    with distributed(evaluations[0].parallel, seed=0) as layout:
        plans = from_main(lambda: [plan_evaluation(options) for options in evaluations])
        kept = from_main(lambda: [kept_result(plan) for plan in plans])
        texts: dict[object, HeldOutCorpus] = {}
        for plan, result in zip(plans, kept, strict=True):
            if result is None:
                texts[_text_of(plan)] = texts.get(_text_of(plan)) or HeldOutCorpus(plan, layout)
        return [
            _evaluate(plan, texts[_text_of(plan)], layout)
            if result is None
            else _keep(plan, result, layout)
            for plan, result in zip(plans, kept, strict=True)
        ]


def _text_of(plan: EvaluationPlan) -> tuple[Path, Protocol]:
    """What evaluations with the same held-out text have in common."""
    return plan.corpus.root, plan.protocol


def _keep(plan: EvaluationPlan, result: EvaluationResult, layout: Layout) -> EvaluationResult:
    """A result that is there."""
    if layout.is_main:
        print(result_table(result))
        print(f"{plan.options.output} was there already; --overwrite evaluates again")
    return result


def _evaluate(plan: EvaluationPlan, held_out: HeldOutCorpus, layout: Layout) -> EvaluationResult:
    reader = open_reader(plan.checkpoint, layout)
    stopwatch = Stopwatch()
    domains = domain_losses(reader, plan, held_out)
    flops = sum(reading_flops(plan.shape, text) for text in held_out.texts.values())
    result = EvaluationResult(
        checkpoint=str(plan.checkpoint.root),
        checkpoint_hash=plan.checkpoint.hash,
        corpus_hash=plan.corpus.hash,
        step=plan.checkpoint.step,
        protocol=plan.protocol,
        domains=domains,
        provenance=plan.provenance,
        cost=stopwatch.cost(flops, layout.world_size),
        left_out=held_out.left_out,
    )
    if layout.is_main:
        result.save(plan.options.output)
        print(result_table(result, held_out.unknown_bytes))
        print(f"written to {plan.options.output}; next: tools/make_report.py with the run's folder")
    return result


def domain_losses(
    reader: Reader, plan: EvaluationPlan, held_out: HeldOutCorpus
) -> dict[str, DomainLoss]:
    """Loss of the model, and of the unigram model, on the held-out text of every domain.

    Raises:
        UserError: if a loss is not finite.
    """
    total = sum(text.num_predictions for text in held_out.texts.values())
    domains = {}
    with progress_bar(total, " tokens", quiet=not reader.layout.is_main) as progress:
        for name in held_out.texts:
            progress.set_description(f"perplexity {name}")
            domains[name] = _domain_loss(reader, plan, held_out, name, progress)
    return domains


def _domain_loss(
    reader: Reader, plan: EvaluationPlan, held_out: HeldOutCorpus, name: str, progress: tqdm
) -> DomainLoss:
    text, clusters = held_out.texts[name], held_out.clusters[name]
    sums = cluster_losses(reader, text, clusters, plan.options.evaluation_batch_size, progress)
    scored = held_out.scored(name)
    tokens = int(scored.tokens.sum())
    loss = math.fsum(sums) / tokens
    if not math.isfinite(loss):
        raise UserError(
            f"{plan.checkpoint.root}: the loss on domain '{name}' is {loss}: the model has "
            "diverged; evaluate an earlier checkpoint"
        )
    text_bytes = None if scored.text_bytes is None else int(scored.text_bytes.sum())
    return DomainLoss(loss, tokens, scored.unigram_loss, text_bytes, _clusters(sums, scored))


def _clusters(sums: NDArray[np.float64], scored: ScoredText) -> Clusters:
    """Of the clusters that have tokens."""
    there = scored.tokens > 0
    return Clusters(
        sums[there].tolist(),
        scored.tokens[there].tolist(),
        None if scored.text_bytes is None else scored.text_bytes[there].tolist(),
    )
