"""Held-out perplexity per domain over packed windows, exact for any batch size and layout."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    Corpus,
    DomainLoss,
    EvaluationResult,
    Protocol,
    Provenance,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.checkpoint.reader import open_reader, require_tokenizer, shape_of
from megatron_chameleon.corpus.indexed_reader import open_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import HeldOutText, choose_windows
from megatron_chameleon.evaluation.unigram import token_counts, unigram_loss
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import Reader, check_window
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.evaluation import PerplexityOptions
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.progress import progress_bar


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The options with the artifacts they name, all checked."""

    options: PerplexityOptions
    corpus: Corpus
    checkpoint: CheckpointRecord
    shape: ModelShape
    protocol: Protocol
    provenance: Provenance


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
    written as soon as it is there.

    Args:
        evaluations: at least one; all in the same parallel layout.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    with distributed(evaluations[0].parallel, seed=0) as layout:
        plans = from_main(lambda: [plan_evaluation(options) for options in evaluations])
        texts = [{name: _held_out(plan, name) for name in plan.corpus.names} for plan in plans]
        return [
            _evaluate(plan, held_out, layout) for plan, held_out in zip(plans, texts, strict=True)
        ]


def _evaluate(
    plan: EvaluationPlan, held_out: dict[str, HeldOutText], layout: Layout
) -> EvaluationResult:
    reader = open_reader(plan.checkpoint, layout)
    stopwatch = Stopwatch()
    domains = domain_losses(reader, plan, held_out)
    total = sum(domain.tokens for domain in domains.values())
    flops = forward_flops(plan.shape, total, plan.protocol.window_length)
    result = EvaluationResult(
        checkpoint=str(plan.checkpoint.root),
        checkpoint_hash=plan.checkpoint.hash,
        corpus_hash=plan.corpus.hash,
        step=plan.checkpoint.step,
        protocol=plan.protocol,
        domains=domains,
        provenance=plan.provenance,
        cost=stopwatch.cost(flops, layout.world_size),
    )
    if layout.is_main:
        result.save(plan.options.output)
        print_result(result)
        print(f"written to {plan.options.output}; next: tools/make_report.py with the run's folder")
    return result


def plan_evaluation(options: PerplexityOptions) -> EvaluationPlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    corpus = Corpus.load(options.corpus)
    record = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(record, corpus)
    shape = shape_of(record)
    protocol = Protocol(
        split=options.split,
        window_length=check_window(shape, options.window_length),
        max_tokens=options.max_tokens,
    )
    check_model_layout(shape.size, options.parallel, protocol.window_length)
    batch_size = options.evaluation_batch_size
    if batch_size < 1:
        raise UserError(f"--evaluation-batch-size {batch_size}: give a whole number from 1 on")
    if protocol.max_tokens is not None and protocol.max_tokens < protocol.window_length:
        raise UserError(
            f"--max-tokens {protocol.max_tokens} is less than one window of "
            f"{protocol.window_length} tokens; give more, or a shorter --window-length"
        )
    return EvaluationPlan(
        options=options,
        corpus=corpus,
        checkpoint=record,
        shape=shape,
        protocol=protocol,
        provenance=provenance(options, {"corpus": corpus.hash, "checkpoint": record.hash}),
    )


def domain_losses(
    reader: Reader, plan: EvaluationPlan, held_out: dict[str, HeldOutText]
) -> dict[str, DomainLoss]:
    """Loss of the model, and of the unigram model, on the held-out text of every domain.

    Raises:
        UserError: if a loss is not finite.
    """
    total = sum(text.num_predictions for text in held_out.values())
    domains = {}
    with progress_bar(total, " tokens", quiet=not reader.layout.is_main) as progress:
        for name, text in held_out.items():
            progress.set_description(f"perplexity {name}")
            loss = mean_loss(reader, text, plan.options.evaluation_batch_size, progress)
            if not math.isfinite(loss):
                raise UserError(
                    f"{plan.checkpoint.root}: the loss on domain '{name}' is {loss}: "
                    "the model has diverged; evaluate an earlier checkpoint"
                )
            unigram = from_main(functools.partial(_unigram, plan.corpus, name, text))
            domains[name] = DomainLoss(loss, text.num_predictions, unigram)
    return domains


def mean_loss(reader: Reader, text: HeldOutText, batch_size: int, progress: tqdm) -> float:
    """Mean negative log-likelihood of the tokens that ``text`` predicts, in nats.

    Batches of windows are dealt out to data-parallel ranks.
    """
    layout = reader.layout
    total = torch.zeros(1, dtype=torch.float64, device=layout.device)
    for number, first in enumerate(range(0, len(text.windows), batch_size)):
        last = min(first + batch_size, len(text.windows))
        tokens, labels, mask = text.batch(first, last)
        progress.update(int(mask.sum()))
        if number % layout.data_size != layout.data_rank:
            continue
        losses = reader.token_losses(tokens.to(layout.device), labels.to(layout.device))
        if losses is not None:
            total += (losses.double() * mask.to(layout.device)).sum()
    summed = reader.sum_over_ranks(total, spoken=layout.is_last_stage)
    return float(summed) / text.num_predictions


def print_result(result: EvaluationResult) -> None:
    """A table for the terminal."""
    width = max(len("mean"), *map(len, result.domains))
    print(f"{'domain':{width}}  {'tokens':>12}  {'loss':>8}  {'perplexity':>10}  {'unigram':>10}")
    for name, domain in result.domains.items():
        print(
            f"{name:{width}}  {domain.tokens:12,}  {domain.loss:8.4f}  {domain.perplexity:10.2f}  "
            f"{domain.unigram_perplexity:10.2f}"
        )
    print(f"{'mean':{width}}  {'':12}  {'':8}  {result.mean_perplexity:10.2f}")


def _held_out(plan: EvaluationPlan, name: str) -> HeldOutText:
    """What is predicted of a domain.

    Raises:
        UserError: if there is nothing to predict.
    """
    protocol = plan.protocol
    stream = open_tokens(plan.corpus, name, protocol.split).tokens
    if len(stream) < 2:
        raise UserError(
            f"domain '{name}' has {len(stream)} tokens in its {protocol.split} split: nothing to "
            "predict; preprocess again with a larger share for it (--split)"
        )
    return choose_windows(stream, protocol.window_length, protocol.max_tokens)


def _unigram(corpus: Corpus, name: str, text: HeldOutText) -> float:
    vocab_size = corpus.tokenizer.vocab_size
    counts = token_counts(open_tokens(corpus, name, "train").tokens, vocab_size)
    return unigram_loss(counts, text.labels(), vocab_size)
