"""tools/evaluate.py perplexity: held-out loss, perplexity and bits per byte of every domain."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    Clusters,
    Corpus,
    DomainLoss,
    EvaluationResult,
    Protocol,
    Provenance,
    Split,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.evaluation_result import MAX_CLUSTERS
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.blend.prefetch import read_ahead
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.checkpoint.convert import recorded_tokenizer
from megatron_chameleon.checkpoint.load import open_reader, require_tokenizer, shape_of
from megatron_chameleon.corpus.indexed import TokenFile, Tokens, open_tokens
from megatron_chameleon.corpus.join import token_bytes
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import HeldOutText, held_out_text, reading_flops
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import Reader, check_window, length_multiple, padded_length
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.progress import progress_bar

# Tokens counted at a time.
_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """Validated options of one evaluation and the artifacts that they name."""

    options: PerplexityOptions
    corpus: Corpus
    checkpoint: CheckpointRecord
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
    """Evaluate several checkpoints one after the other; see :func:`evaluate_perplexity`.

    All options are checked before the first evaluation starts, and each result is written as soon
    as it is complete. Existing results of the same evaluation are kept, unless ``overwrite`` is
    set. Evaluations with the same corpus and protocol share the held-out text.

    Args:
        evaluations: at least one; all with the same parallelism.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    with distributed(evaluations[0].parallel, seed=0) as layout:
        plans = from_main(lambda: [plan_evaluation(options) for options in evaluations])
        kept = from_main(lambda: [kept_result(plan) for plan in plans])
        texts: dict[object, HeldOutCorpus] = {}
        for plan, result in zip(plans, kept, strict=True):
            if result is None and (plan.corpus.root, plan.protocol) not in texts:
                texts[plan.corpus.root, plan.protocol] = HeldOutCorpus(plan, layout)
        results = []
        for plan, result in zip(plans, kept, strict=True):
            if result is None:
                result = _evaluate(plan, texts[plan.corpus.root, plan.protocol], layout)
            elif layout.is_main:
                print(result_table(result))
                print(f"{plan.options.output} exists and is kept; --overwrite evaluates again")
            results.append(result)
        return results


def plan_evaluation(options: PerplexityOptions) -> EvaluationPlan:
    """Load and check the artifacts that ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    corpus = Corpus.load(options.corpus)
    record = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    require_tokenizer(record, corpus)
    shape = shape_of(record)
    length = check_window(shape, options.window_length)
    if not 0 <= options.overlap < length:
        raise UserError(
            f"--overlap {options.overlap}: must be from 0 to {length - 1}, less than one window"
        )
    if options.max_tokens is not None and options.max_tokens < length:
        raise UserError(
            f"--max-tokens {options.max_tokens}: must be at least one window of {length} tokens "
            "(--window-length)"
        )
    check_model_layout(shape.size, options.parallel, length)
    check_output(options.output, EvaluationResult.KIND)
    protocol = Protocol(
        split=options.split,
        window_length=length,
        packing=options.packing,
        end_of_document=options.score_end_of_document,
        max_tokens=options.max_tokens,
        overlap=options.overlap,
        first_token=options.first_token
        or ("after-eod" if options.packing == "documents" else "not-scored"),
    )
    inputs = {"corpus": corpus.hash, "checkpoint": record.hash}
    return EvaluationPlan(options, corpus, record, protocol, provenance(options, inputs))


def kept_result(plan: EvaluationPlan) -> EvaluationResult | None:
    """An existing ``--output`` of the same weights, corpus and protocol, if it is to be kept."""
    output = plan.options.output
    if plan.options.overwrite or not output.is_file():
        return None
    try:
        found = EvaluationResult.load(output)
    except UserError:
        return None  # of another format, or damaged: it is replaced
    wanted = (plan.checkpoint.hash, plan.corpus.hash, plan.protocol)
    return found if wanted == (found.checkpoint_hash, found.corpus_hash, found.protocol) else None


def _evaluate(plan: EvaluationPlan, held_out: HeldOutCorpus, layout: Layout) -> EvaluationResult:
    """Evaluate one checkpoint and write the result.

    Raises:
        UserError: if a loss is not finite.
    """
    reader = open_reader(plan.checkpoint, layout)
    stopwatch = Stopwatch()
    domains = {}
    texts = [domain.text for domain in held_out.domains.values()]
    total = sum(text.num_predictions for text in texts)
    with progress_bar(total, " tokens", quiet=not layout.is_main) as progress:
        for name, domain in held_out.domains.items():
            progress.set_description(f"perplexity {name}")
            batch_size = plan.options.evaluation_batch_size
            sums = cluster_losses(reader, domain.text, domain.clusters, batch_size, progress)
            domains[name] = domain.loss(sums)
            if not math.isfinite(domains[name].loss):
                raise UserError(
                    f"{plan.checkpoint.root}: the loss on domain '{name}' is {domains[name].loss}: "
                    "the model has diverged; evaluate an earlier checkpoint"
                )
    result = EvaluationResult(
        checkpoint=str(plan.checkpoint.root),
        checkpoint_hash=plan.checkpoint.hash,
        corpus_hash=plan.corpus.hash,
        step=plan.checkpoint.step,
        protocol=plan.protocol,
        domains=domains,
        provenance=plan.provenance,
        cost=stopwatch.cost(
            sum(reading_flops(reader.shape, text) for text in texts), layout.world_size
        ),
        left_out=held_out.left_out,
    )
    if layout.is_main:
        result.save(plan.options.output)
        print(result_table(result, held_out.unknown_bytes))
        print(f"written to {plan.options.output}; next: tools/make_report.py with the run's folder")
    return result


def cluster_losses(
    reader: Reader, text: HeldOutText, clusters: ClusterMap, batch_size: int, progress: tqdm
) -> NDArray[np.float64]:
    """Sum the negative log-likelihoods of the scored tokens of each cluster.

    Batches are assigned to data-parallel ranks in turn. Sums are in float64 and do not depend on
    the layout or the batch size, up to the rounding of the forward pass.

    Args:
        reader: reads the model's outputs.
        text: held-out text, whose windows are read longest first.
        clusters: map from the scored tokens to their clusters.
        batch_size: windows of the full window length per forward pass and rank.
        progress: updated by the number of scored tokens.

    Returns:
        [c] float64 in nats, on every rank.
    """
    layout, text = reader.layout, text.longest_first()
    # The last element collects labels that are not scored.
    sums = torch.zeros(clusters.count + 1, dtype=torch.float64, device=layout.device)
    all_batches = list(batches(text, batch_size, length_multiple(layout)))

    def read_batch(first: int, last: int, width: int) -> Batch:
        tokens, labels, is_scored, positions = text.arrays(first, last, width)
        cluster = np.where(is_scored, clusters.at(positions), clusters.count)
        arrays = {"tokens": tokens, "labels": labels, "clusters": cluster}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    own = (read_batch(*each) for each in all_batches[layout.data_rank :: layout.data_size])
    with read_ahead(own, layout.device) as ahead:
        for number, (first, last, _) in enumerate(all_batches):
            progress.update(int(text.windows.num_scored[first:last].sum()))
            if number % layout.data_size != layout.data_rank:
                continue
            batch = next(ahead)
            losses = reader.token_losses(batch["tokens"], batch["labels"])
            if losses is not None:
                sums.index_add_(0, batch["clusters"].flatten(), losses.double().flatten())
    summed = reader.sum_over_ranks(sums, has_result=layout.is_last_stage)
    return summed[:-1].cpu().numpy()


def batches(
    text: HeldOutText, batch_size: int, multiple: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Batches of consecutive windows: first, last (exclusive), width.

    A batch is as wide as its first window, the longest, rounded up to ``multiple``, and holds the
    tokens of ``batch_size`` windows of the full window length.
    """
    lengths, first = text.windows.lengths, 0
    while first < len(lengths):
        width = min(padded_length(int(lengths[first]), multiple), text.window_length)
        last = min(first + batch_size * text.window_length // width, len(lengths))
        yield first, last, width
        first = last


@dataclasses.dataclass(frozen=True)
class ClusterMap:
    """The cluster of each scored token: one per document, or of neighbouring documents.

    Attributes:
        document_ends: [d] int64, position past the last token of each document.
        cluster_of_document: [d] int64; meaningless for documents without scored tokens.
        count: number of clusters, at most ``MAX_CLUSTERS``; see :class:`Clusters`.
    """

    document_ends: NDArray[np.int64]
    cluster_of_document: NDArray[np.int64]
    count: int

    @classmethod
    def of(cls, tokens: TokenFile, text: HeldOutText) -> ClusterMap:
        """Clusters of the tokens of ``tokens`` (one sequence per document) that ``text`` scores."""
        ends = tokens.starts + tokens.lengths
        first, last = (
            np.searchsorted(ends, place, side="right")
            for place in (text.windows.scored, text.windows.end - 1)
        )
        covering = np.zeros(len(ends) + 1, np.int64)
        np.add.at(covering, first, 1)
        np.add.at(covering, last + 1, -1)
        is_scored = (np.cumsum(covering)[:-1] > 0) & (tokens.lengths > 0)
        documents = int(is_scored.sum())
        count = min(documents, MAX_CLUSTERS)
        number = np.maximum(np.cumsum(is_scored) - 1, 0)
        return cls(ends, number * count // max(documents, 1), count)

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Clusters of the tokens at ``positions``, of any shape; arbitrary for padding."""
        documents = np.searchsorted(self.document_ends, positions, side="right")
        found: NDArray[np.int64] = self.cluster_of_document[
            np.minimum(documents, len(self.document_ends) - 1)
        ]
        return found


@dataclasses.dataclass(frozen=True)
class HeldOutDomain:
    """The held-out text of a domain, and figures of it that do not depend on the model.

    Attributes:
        text: its windows.
        clusters: of the scored tokens.
        tokens: [c] scored tokens per cluster; 0 for some.
        text_bytes: [c] bytes of text they stand for; None if unknown.
        unigram_loss: mean negative log-likelihood of the scored tokens under a unigram model of
            the training text, in nats per token.
    """

    text: HeldOutText
    clusters: ClusterMap
    tokens: NDArray[np.int64]
    text_bytes: NDArray[np.int64] | None
    unigram_loss: float

    def loss(self, sums: NDArray[np.float64]) -> DomainLoss:
        """The result from the sums [c] of :func:`cluster_losses`."""
        tokens, used = int(self.tokens.sum()), self.tokens > 0
        total_bytes = clustered_bytes = None
        if self.text_bytes is not None:
            total_bytes = int(self.text_bytes.sum())
            clustered_bytes = self.text_bytes[used].tolist()
        clusters = Clusters(sums[used].tolist(), self.tokens[used].tolist(), clustered_bytes)
        return DomainLoss(
            math.fsum(sums) / tokens, tokens, self.unigram_loss, total_bytes, clusters
        )


class HeldOutCorpus:
    """The held-out text of a corpus under one protocol, shared by all evaluated checkpoints.

    Domains with nothing to score are excluded from averages, with a warning.

    Args:
        plan: any of the evaluations that share the corpus and the protocol.
        layout: every rank constructs one.

    Attributes:
        domains: those with something to score, in the corpus's order.
        left_out: the others.
        unknown_bytes: why bits per byte are unknown; empty if they are known.

    Raises:
        UserError: if no domain has anything to score.
    """

    def __init__(self, plan: EvaluationPlan, layout: Layout) -> None:
        corpus, split = plan.corpus, plan.protocol.split
        self.domains: dict[str, HeldOutDomain] = {}
        sizes, self.unknown_bytes = from_main(lambda: token_sizes(corpus, plan.checkpoint))
        for name in corpus.names:
            tokens = open_tokens(corpus, name, split)
            text = held_out_text(tokens, plan.protocol, corpus.tokenizer.eod_id)
            if text is not None:
                clusters = ClusterMap.of(tokens, text)
                figures = from_main(
                    lambda name=name, text=text, clusters=clusters: scored_text(  # type: ignore[misc]
                        corpus, name, split, text, clusters, sizes
                    )
                )
                self.domains[name] = HeldOutDomain(text, clusters, *figures)
        self.left_out = [name for name in corpus.names if name not in self.domains]
        hint = f"preprocess again with a larger {split} share (--split)"
        if not self.domains:
            raise UserError(
                f"{corpus.root}: no domain has anything to predict in its {split} split; {hint}"
            )
        if self.left_out and layout.is_main:
            warnings.warn(
                f"nothing to predict in the {split} split of {', '.join(self.left_out)}: left out "
                f"of the averages; {hint} to include it",
                stacklevel=2,
            )


def token_sizes(corpus: Corpus, record: CheckpointRecord) -> tuple[NDArray[np.int32] | None, str]:
    """Bytes of text per token id, [vocab_size], from the corpus's or the checkpoint's tokenizer.

    None and the reason if neither tokenizer can be loaded; losses do not need it.
    """
    problems = []
    for place in dict.fromkeys([None, recorded_tokenizer(record)]):
        try:
            return token_bytes(corpus_tokenizer(corpus, place)), ""
        except UserError as error:
            problems.append(str(error))
    return None, problems[0]


def scored_text(
    corpus: Corpus,
    name: str,
    split: Split,
    text: HeldOutText,
    clusters: ClusterMap,
    sizes: NDArray[np.int32] | None,
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None, float]:
    """Count the scored tokens and bytes of a domain, and score them by its unigram model.

    Args:
        corpus: holds the domain.
        name: of the domain.
        split: of ``text``.
        text: windows of the split.
        clusters: of the same.
        sizes: [vocab_size] bytes of each token; None without a tokenizer.

    Returns:
        tokens, text_bytes and unigram_loss of :class:`HeldOutDomain`.
    """
    vocab_size = corpus.tokenizer.vocab_size
    tokens = np.zeros(clusters.count, np.int64)
    counted = np.zeros(clusters.count, np.float64)
    seen = np.zeros(vocab_size, np.int64)
    for positions, labels in text.scored_blocks():
        cluster = clusters.at(positions)
        tokens += np.bincount(cluster, minlength=clusters.count)
        seen += np.bincount(labels, minlength=vocab_size)
        if sizes is not None:
            counted += np.bincount(cluster, sizes[labels], minlength=clusters.count)
    training = token_counts(open_tokens(corpus, name, "train").tokens, vocab_size)
    # Add-one (Laplace) smoothed frequencies, without context: a baseline for every trained model.
    probabilities = (training + 1) / (training.sum() + vocab_size)
    loss = float(-(seen @ np.log(probabilities)) / seen.sum())
    decoded = 0 if sizes is None else int(token_counts(text.stream, vocab_size) @ sizes)
    recorded = corpus.domains[name].split(split).text_bytes
    if not (decoded and recorded):
        return tokens, None, loss
    # The recorded bytes of the text and the bytes its tokens decode to differ slightly: a tokenizer
    # may drop or normalise characters. Cluster ends are rounded, so that the sum stays exact.
    ends = np.rint(np.cumsum(counted * (recorded / decoded))).astype(np.int64)
    return tokens, np.diff(ends, prepend=0), loss


def token_counts(stream: Tokens, vocab_size: int) -> NDArray[np.int64]:
    """Occurrences of each token, [vocab_size] int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for first in range(0, len(stream), _CHUNK):
        counts += np.bincount(stream[first : first + _CHUNK], minlength=vocab_size)
    return counts


def result_table(result: EvaluationResult, unknown_bytes: str = "") -> str:
    """Format an evaluation for the terminal: a row per domain, the average, the protocol.

    Args:
        result: of one checkpoint.
        unknown_bytes: why bits per byte are unknown, if there is a reason to report.
    """

    def number(value: float | None, places: int) -> str:
        return "-" if value is None else f"{value:.{places}f}"

    table = [["domain", "tokens", "loss", "±", "perplexity", "±", "bits/byte", "±", "unigram"]]
    for name, domain in result.domains.items():
        table.append([name, f"{domain.tokens:,}"])
        for value, error, places in (
            (domain.loss, domain.loss_error, 4),
            (domain.perplexity, domain.perplexity_error, 2),
            (domain.bits_per_byte, domain.bits_per_byte_error, 4),
        ):
            table[-1] += [number(value, places), number(error, places)]
        table[-1].append(number(domain.unigram_perplexity, 2))
    mean = number(result.mean_perplexity, 2), number(result.mean_perplexity_error, 2)
    table.append(["average", "", "", "", *mean, "", "", ""])
    first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(
            [f"{name:{first}}", *(f"{c:>{w}}" for c, w in zip(cells, others, strict=True))]
        ).rstrip()
        for name, *cells in table
    ]
    lines.append(f"on {result.protocol.describe()}; ± is the standard error over documents")
    if any(domain.text_bytes is None for domain in result.domains.values()):
        reason = unknown_bytes or "corpus.json does not record the bytes of the text"
        lines.append(f"no bits per byte: {reason}")
    if result.left_out:
        lines.append(f"nothing to predict, and not in the average: {', '.join(result.left_out)}")
    return "\n".join(lines)
