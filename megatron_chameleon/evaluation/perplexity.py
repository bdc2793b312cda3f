"""Held-out perplexity per domain over packed windows, exact for any batch size and layout."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    Corpus,
    DomainLoss,
    EvaluationResult,
    Protocol,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.checkpoint.reader import open_reader, require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.unigram import token_counts, token_stream, unigram_loss
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import Reader, check_window
from megatron_chameleon.options.evaluation import PerplexityOptions
from megatron_chameleon.parallel.layout import distributed


def evaluate_perplexity(options: PerplexityOptions) -> EvaluationResult:
    """Evaluate a checkpoint on the held-out text of every domain and write the result.

    Every rank calls this, and every rank gets the result.

    Raises:
        UserError: for a mistake in the options or in what they name.
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
    streams = {name: _held_out(corpus, name, protocol) for name in corpus.names}
    with distributed(options.parallel, seed=0) as layout:
        stopwatch = Stopwatch()
        reader = open_reader(record, layout)
        domains = domain_losses(reader, corpus, streams, protocol.window_length, batch_size)
        total = sum(domain.tokens for domain in domains.values())
        result = EvaluationResult(
            checkpoint=str(record.root),
            checkpoint_hash=record.hash,
            corpus_hash=corpus.hash,
            step=record.step,
            protocol=protocol,
            domains=domains,
            provenance=provenance(options, {"corpus": corpus.hash, "checkpoint": record.hash}),
            cost=stopwatch.cost(
                forward_flops(shape, total, protocol.window_length), layout.world_size
            ),
        )
        if layout.is_main:
            result.save(options.output)
            print_result(result)
            print(f"written to {options.output}; next: tools/make_report.py with the run's folder")
    return result


def domain_losses(
    reader: Reader,
    corpus: Corpus,
    streams: dict[str, NDArray[np.integer]],
    window_length: int,
    batch_size: int,
) -> dict[str, DomainLoss]:
    """Loss of the model, and of the unigram model, on the token stream of every domain.

    Raises:
        UserError: if a loss is not finite.
    """
    total = sum(len(stream) - 1 for stream in streams.values())
    quiet = not reader.layout.is_main
    domains = {}
    with tqdm(total=total, unit=" tokens", unit_scale=True, disable=quiet) as progress:
        for name, stream in streams.items():
            progress.set_description(f"perplexity {name}")
            loss = mean_loss(reader, stream, window_length, batch_size, progress)
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss on domain '{name}' is {loss}: the model has diverged; "
                    "evaluate an earlier checkpoint"
                )
            domains[name] = DomainLoss(loss, len(stream) - 1, _unigram(corpus, name, stream))
    return domains


def mean_loss(
    reader: Reader,
    stream: NDArray[np.integer],
    window_length: int,
    batch_size: int,
    progress: tqdm,
) -> float:
    """Mean negative log-likelihood, in nats, of every token of ``stream`` [n] but the first.

    The stream is cut into windows of ``window_length`` predictions; each token is predicted once,
    from those before it in its window. Batches are dealt out to data-parallel ranks.
    """
    layout = reader.layout
    num_predictions = len(stream) - 1
    num_windows = -(-num_predictions // window_length)
    total = torch.zeros(1, dtype=torch.float64, device=layout.device)
    for number, first in enumerate(range(0, num_windows, batch_size)):
        last = min(first + batch_size, num_windows)
        progress.update(min(last * window_length, num_predictions) - first * window_length)
        if number % layout.data_size != layout.data_rank:
            continue
        tokens, labels, mask = (
            part.to(layout.device) for part in cut_windows(stream, window_length, first, last)
        )
        losses = reader.token_losses(tokens, labels)
        if losses is not None:
            total += (losses.double() * mask).sum()
    return float(reader.sum_over_ranks(total, spoken=layout.is_last_stage)) / num_predictions


def cut_windows(
    stream: NDArray[np.integer], window_length: int, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Windows ``first`` to ``last`` - 1: tokens, labels and mask, each [b, window_length].

    The last window of a stream is filled up with token 0, which the mask leaves out.
    """
    wanted = (last - first) * window_length
    piece = np.asarray(stream[first * window_length : last * window_length + 1], dtype=np.int64)
    predictions = len(piece) - 1
    tokens, labels = np.zeros(wanted, np.int64), np.zeros(wanted, np.int64)
    tokens[:predictions], labels[:predictions] = piece[:-1], piece[1:]
    mask = np.arange(wanted) < predictions
    shape = (last - first, window_length)
    return (
        torch.from_numpy(tokens).view(shape),
        torch.from_numpy(labels).view(shape),
        torch.from_numpy(mask).view(shape),
    )


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


def _held_out(corpus: Corpus, name: str, protocol: Protocol) -> NDArray[np.integer]:
    """The tokens of a domain's held-out split, [n].

    Raises:
        UserError: if there is nothing to predict.
    """
    stream = token_stream(corpus.prefix(name, protocol.split), corpus.dtype)
    if protocol.max_tokens is not None:
        if protocol.max_tokens < 1:
            raise UserError(f"--max-tokens {protocol.max_tokens}: give a whole number from 1 on")
        stream = stream[: protocol.max_tokens + 1]
    if len(stream) < 2:
        raise UserError(
            f"domain '{name}' has {len(stream)} tokens in its {protocol.split} split: nothing to "
            "predict; preprocess again with a larger share for it (--split)"
        )
    return stream


def _unigram(corpus: Corpus, name: str, stream: NDArray[np.integer]) -> float:
    vocab_size = corpus.tokenizer.vocab_size
    counts = token_counts(token_stream(corpus.prefix(name, "train"), corpus.dtype), vocab_size)
    return unigram_loss(counts, stream[1:], vocab_size)
