"""Evaluate held-out loss, perplexity and bits per byte of every domain."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

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
    TargetLoss,
    TokenizerIdentity,
    TrainingRun,
    provenance,
)
from megatron_chameleon.artifacts.evaluation_result import MAX_CLUSTERS
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.blend.sampler import Batch, read_ahead, require_embeddings
from megatron_chameleon.checkpoint.open_model import Model, open_model
from megatron_chameleon.console import align_columns
from megatron_chameleon.corpus.domains import Domains, open_domains
from megatron_chameleon.corpus.indexed import TokenFile, Tokens, in_memory
from megatron_chameleon.corpus.join import token_bytes
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import (
    FEW_COMPARED,
    Target,
    check_text_options,
    parse_target,
    read_target_text,
    warn_leaked,
    warn_short,
)
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.held_out import HeldOutText, held_out_text, reading_flops
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import (
    Reader,
    check_window,
    default_window,
    length_batches,
    length_multiple,
)
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.storage import is_remote

# Number of tokens per call of bincount, which copies them as int64.
_CHUNK = 1 << 24
# Training tokens of a domain that are counted for the unigram baseline; more are sampled.
MAX_UNIGRAM_TOKENS = 1 << 30


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """Validated options of one evaluation and the artifacts that the options name.

    Attributes:
        target: target of ``--target``, or the one that the checkpoint's run records.
        kept: existing result in ``--output`` if it has the same weights, corpus, protocol and texts
            and ``--overwrite`` is not set; otherwise None.
    """

    options: PerplexityOptions
    corpus: Corpus
    model: Model
    protocol: Protocol
    target: Target | None
    provenance: Provenance
    kept: EvaluationResult | None

    @property
    def text_key(self) -> object:
        """Equal for evaluations of the same text."""
        texts = self.target.texts_hash if self.target and self.target.texts else None
        return self.corpus.root, self.protocol, texts


def evaluate_perplexities(evaluations: Sequence[PerplexityOptions]) -> list[EvaluationResult]:
    """Evaluate models on the held-out text of every domain, and write the results.

    Every rank calls this function and gets the results (collective). All options are checked before
    the first evaluation starts, and each result is written as soon as it is complete. An existing
    result of the same evaluation is kept, unless ``overwrite`` is set. Evaluations with the same
    corpus and protocol share the held-out text.

    Args:
        evaluations: options of at least one evaluation; all must have the same parallelism.

    Raises:
        UserError: for invalid options, or invalid files that the options name.
    """
    with distributed(evaluations[0].parallel, seed=0) as layout:
        plans = from_main(lambda: [plan_evaluation(options) for options in evaluations])
        texts: dict[object, dict[str, HeldOutDomain]] = {}
        for plan in plans:
            if plan.kept is None and plan.text_key not in texts:
                texts[plan.text_key] = held_out_domains(plan, layout)
        results = []
        for plan in plans:
            result = plan.kept
            if result is None:
                result = _evaluate(plan, texts[plan.text_key], layout)
            elif layout.is_main:
                print(result_table(result))
                print(f"{plan.options.output} exists and is kept; --overwrite evaluates again")
            results.append(result)
        return results


def plan_evaluation(options: PerplexityOptions) -> EvaluationPlan:
    """Load and check the artifacts that ``options`` name, without writing anything.

    Raises:
        UserError: for the first mistake found.
    """
    corpus = Corpus.load(options.corpus)
    model = open_model(options.checkpoint).for_corpus(corpus)
    config = model.config
    length = check_window(config.max_positions, default_window(config), options.window_length)
    if not 0 <= options.overlap < length:
        raise UserError(
            f"--overlap {options.overlap}: must be from 0 to {length - 1}, less than one window"
        )
    if options.max_tokens is not None and options.max_tokens < length:
        raise UserError(
            f"--max-tokens {options.max_tokens}: must be at least one window of {length} tokens "
            "(--window-length)"
        )
    check_model_layout(config, options.parallel, length)
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
    target = find_target(options, corpus, model)
    weights = model.hash
    inputs = {"corpus": corpus.hash, "checkpoint": weights}
    if target and target.texts:
        inputs["target text"] = target.texts_hash
    kept = None
    if options.output.is_file() and not options.overwrite:
        with contextlib.suppress(UserError):  # an unreadable result is evaluated again
            found = EvaluationResult.load(options.output)
            same = (weights, corpus.hash, protocol)
            if (found.checkpoint_hash, found.corpus_hash, found.protocol) == same:
                kept = _with_target(found, target, options.output)
    made_by = provenance(options, inputs)
    return EvaluationPlan(options, corpus, model, protocol, target, made_by, kept)


def _with_target(
    result: EvaluationResult, target: Target | None, path: Path
) -> EvaluationResult | None:
    """Return the result at ``path`` with the loss of ``target``; None if it lacks a text of it."""
    if target is None:
        return result
    before = result.provenance.inputs.get("target text")
    if target.texts and before != target.texts_hash:
        return None
    if not target.shares.keys() <= result.domains.keys():
        return None
    found = TargetLoss.of(target.record, result.domains)
    if found != result.target:
        result = dataclasses.replace(result, target=found)
        result.save(path)
    return result


def find_target(options: PerplexityOptions, corpus: Corpus, model: Model) -> Target | None:
    """Return the target of ``--target``, or the one that the checkpoint's run records.

    The recorded target is used only if all of its domains have tokens in the split.

    Raises:
        UserError: for an invalid value, or a domain without tokens in the split.
    """
    measured = {n for n, d in corpus.all_domains.items() if d.split(options.split).tokens >= 2}
    if options.target is not None:
        source = SourceOptions((), text_key=options.target_text_key)
        target = parse_target(options.target, list(corpus.all_domains), source)
        check_text_options(options, target)
        if missing := target.shares.keys() - target.texts.keys() - measured:
            raise UserError(
                f"--target {options.target}: the {options.split} split of '{min(missing)}' is "
                "empty; name other domains, or pass another --split"
            )
        return target
    run_dir = model.run_dir
    if run_dir is None:
        return None
    with contextlib.suppress(UserError):  # the run's record is not needed otherwise
        recorded = TrainingRun.load(run_dir).target if TrainingRun.exists(run_dir) else None
        if recorded is not None and recorded.shares.keys() <= measured:
            return Target(recorded.value, recorded.shares)
    return None


def _evaluate(
    plan: EvaluationPlan, domains: dict[str, HeldOutDomain], layout: Layout
) -> EvaluationResult:
    """Evaluate one model and write the result.

    Raises:
        UserError: if a loss is not finite.
    """
    reader = plan.model.reader(layout)
    stopwatch = Stopwatch()
    losses = {}
    total = sum(domain.text.num_predictions for domain in domains.values())
    with progress_bar(total, " tokens", quiet=not layout.is_main) as progress:
        for name, domain in domains.items():
            progress.set_description(f"perplexity {name}")
            batch_size = plan.options.evaluation_batch_size
            losses[name] = domain.evaluate(reader, batch_size, progress)
            if not math.isfinite(losses[name].loss):
                raise UserError(
                    f"{plan.model.where}: the loss on domain '{name}' is {losses[name].loss}: "
                    "the model has diverged; evaluate an earlier checkpoint"
                )
    flops = sum(reading_flops(reader.config, domain.text) for domain in domains.values())
    result = EvaluationResult(
        checkpoint=str(plan.model.where),
        checkpoint_hash=plan.provenance.inputs["checkpoint"],
        corpus_hash=plan.corpus.hash,
        step=plan.model.step,
        protocol=plan.protocol,
        domains=losses,
        provenance=plan.provenance,
        cost=stopwatch.cost(flops, layout.world_size),
        left_out=[name for name in plan.corpus.names if name not in domains],
        held_out=[name for name in domains if name not in plan.corpus.names],
        target=TargetLoss.of(plan.target.record, losses) if plan.target else None,
    )
    if layout.is_main:
        result.save(plan.options.output)
        print(result_table(result))
        print(f"written to {plan.options.output}; next: megatron-chameleon make_report RUN_FOLDER")
    return result


def cluster_ends(tokens: TokenFile, text: HeldOutText) -> NDArray[np.int64]:
    """Group the documents of ``tokens``, one per sequence, into clusters of scored documents.

    A cluster is one document with tokens that ``text`` scores, or several consecutive documents
    if there are more than ``MAX_CLUSTERS`` such documents; see :class:`Clusters`.

    Returns:
        [c] position after the last token of each cluster: a scored token at position p belongs to
        cluster ``searchsorted(ends, p, side="right")``.
    """
    ends = tokens.starts + tokens.lengths
    first, last = (
        np.searchsorted(ends, place, side="right")
        for place in (text.windows.scored, text.windows.end - 1)
    )
    covering = np.zeros(len(ends) + 1, np.int64)
    np.add.at(covering, first, 1)
    np.add.at(covering, last + 1, -1)
    scored = ends[(np.cumsum(covering)[:-1] > 0) & (tokens.lengths > 0)]
    count = min(len(scored), MAX_CLUSTERS)
    documents_before = -(-np.arange(1, count + 1) * len(scored) // count)  # rounded up
    return scored[documents_before - 1]


@dataclasses.dataclass(frozen=True)
class HeldOutDomain:
    """Held-out text of a domain, and statistics of the text that do not depend on the model.

    Attributes:
        text: windows over the held-out text.
        clusters: [c] end of each cluster of documents; see :func:`cluster_ends`.
        tokens: [c] number of scored tokens per cluster; may be 0.
        text_bytes: [c] bytes of text that the scored tokens encode; None if unknown.
        unigram_loss: mean negative log-likelihood of the scored tokens under a unigram model of
            the training text, in nats per token.
    """

    text: HeldOutText
    clusters: NDArray[np.int64]
    tokens: NDArray[np.int64]
    text_bytes: NDArray[np.int64] | None
    unigram_loss: float

    def evaluate(self, reader: Reader, batch_size: int, progress: tqdm) -> DomainLoss:
        """Compute the model's loss, on every rank. Collective.

        Args:
            reader: reads the model's outputs.
            batch_size: windows of the full window length per forward pass and rank.
            progress: updated by the number of scored tokens.
        """
        sums = cluster_losses(self.text, self.clusters, reader, batch_size, progress)
        tokens, sizes, used = int(self.tokens.sum()), self.text_bytes, self.tokens > 0
        clusters = Clusters(
            losses=sums[used].tolist(),
            tokens=self.tokens[used].tolist(),
            text_bytes=None if sizes is None else sizes[used].tolist(),
        )
        total = None if sizes is None else int(sizes.sum())
        return DomainLoss(math.fsum(sums) / tokens, tokens, self.unigram_loss, total, clusters)


def cluster_losses(
    text: HeldOutText,
    ends: NDArray[np.int64],
    reader: Reader,
    batch_size: int,
    progress: tqdm,
) -> NDArray[np.float64]:
    """Sum the negative log-likelihoods of each cluster's scored tokens, [c], in nats. Collective.

    Batches are assigned to data-parallel ranks in turn. The sums are in float64. Except for
    rounding in the forward pass, they do not depend on the layout or the batch size.

    Args:
        text: windows over the text.
        ends: [c] position after the last token of each cluster, ascending.
        reader: reads the model's outputs.
        batch_size: windows of the full window length per forward pass and rank.
        progress: updated by the number of scored tokens.
    """
    layout, text, count = reader.layout, text.longest_first(), len(ends)
    longest, multiple = text.window_length, length_multiple(layout)
    lengths = text.windows.lengths.tolist()
    all_batches = list(length_batches(lengths, batch_size * longest, multiple, longest))

    def read_batch(first: int, last: int, width: int) -> Batch:
        tokens, labels, is_scored, positions = text.arrays(first, last, width)
        cluster = np.searchsorted(ends, positions, side="right")
        cluster[~is_scored] = count
        arrays = {"tokens": tokens, "labels": labels, "clusters": cluster}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    # The additional last element collects labels that are not scored.
    sums = torch.zeros(count + 1, dtype=torch.float64, device=layout.device)
    own = (read_batch(*each) for each in all_batches[layout.data_rank :: layout.data_size])
    checked = require_embeddings(own, reader.config.vocab_size)
    with read_ahead(checked, layout.device) as ahead:
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


def held_out_domains(plan: EvaluationPlan, layout: Layout) -> dict[str, HeldOutDomain]:
    """Read the held-out text of every domain under the plan's protocol. Collective.

    Domains with nothing to score are left out, with a warning. Domains that the corpus holds out
    from training come last, and then the texts of the target.

    Raises:
        UserError: if no domain to train on, or no domain of the target has anything to score, or if
            a text cannot be read.
    """
    corpus, split, opened = plan.corpus, plan.protocol.split, open_domains(plan.corpus)
    domains: dict[str, HeldOutDomain] = {}
    sizes = from_main(lambda: token_sizes(corpus, plan.model))
    for name in corpus.all_domains:
        domain = held_out_domain(opened, name, plan.protocol, sizes)
        if domain is not None:
            domains[name] = domain
    missing = [name for name in corpus.all_domains if name not in domains]
    if missing:
        problem = (
            f"{corpus.root}: nothing to predict in the {split} split of {', '.join(missing)}; "
            f"preprocess again with a larger {split} share (--split)"
        )
        if domains.keys() <= corpus.held_out.keys():
            raise UserError(problem)
        if layout.is_main:
            warnings.warn(f"{problem} to include it", stacklevel=2)
    return domains | target_texts(plan, opened, sizes)


def target_texts(
    plan: EvaluationPlan, domains: Domains, sizes: NDArray[np.int32] | None
) -> dict[str, HeldOutDomain]:
    """Read the texts of the plan's target, on rank 0, and share them with all ranks. Collective.

    Warns about short texts, and about documents of these texts, and of held-out domains that the
    target names, that are in the corpus's training text.

    Raises:
        UserError: if a text or the tokenizer cannot be read, or a text has nothing to score.
    """
    if plan.target is None:
        return {}
    target, source = plan.target, SourceOptions((), text_key=plan.options.target_text_key)
    corpus, protocol, found = plan.corpus, plan.protocol, dict[str, HeldOutDomain]()

    def is_local(name: str, split: Split) -> bool:
        # Reading single documents of remote files would take hours.
        return not is_remote(str(corpus.prefix(name, split)))

    trained = [
        name for name, tokens in corpus.train_tokens.items() if tokens and is_local(name, "train")
    ]

    def check(name: str, file: TokenFile) -> None:
        warn_short(name, file)
        warn_leaked(name, file, trained, domains.open, corpus.tokenizer.eod_id, FEW_COMPARED)

    def check_held_out() -> None:
        for name in filter(target.shares.get, corpus.held_out):
            if is_local(name, protocol.split):
                check(name, domains.open(name, protocol.split))

    def read(name: str) -> tuple[NDArray[np.integer], NDArray[np.int32]]:
        tokenizer = corpus_tokenizer(corpus)
        file = read_target_text(source, target, name, tokenizer, protocol.max_tokens)
        check(name, file)
        return file.tokens[:], file.lengths.astype(np.int32)

    from_main(check_held_out)
    for name in target.texts:
        stream = in_memory(Path(name), *from_main(partial(read, name)))
        domain = _scored_domain(stream, uniform_loss, None, corpus.tokenizer, protocol, sizes)
        if domain is None:
            raise UserError(f"--target: the text '{name}' has nothing to predict; pass more text")
        found[name] = domain
    return found


def token_sizes(corpus: Corpus, model: Model) -> NDArray[np.int32] | None:
    """Count the bytes of text per token id, [vocab_size].

    The tokenizer is that of the corpus, or else that of the model. Returns None, with a
    warning, if neither can be loaded; losses do not need a tokenizer.
    """
    problems = []
    for path in dict.fromkeys([None, model.tokenizer_choice.tokenizer_model]):
        try:
            return token_bytes(corpus_tokenizer(corpus, path))
        except UserError as error:
            problems.append(str(error))
    warnings.warn(f"no bits per byte: {problems[0]}", stacklevel=2)
    return None


def held_out_domain(
    domains: Domains, name: str, protocol: Protocol, sizes: NDArray[np.int32] | None
) -> HeldOutDomain | None:
    """Read the held-out text of a domain; None if nothing is scored. Collective.

    Args:
        domains: domains of a corpus.
        name: name of the domain.
        protocol: protocol of the evaluation.
        sizes: [vocab_size] bytes of each token; None if no tokenizer was loaded.
    """
    assert domains.corpus is not None
    stream = domains.open(name, protocol.split)
    baseline = partial(unigram_loss, domains, name, max_tokens=MAX_UNIGRAM_TOKENS)
    recorded = domains.corpus.all_domains[name].split(protocol.split).text_bytes
    return _scored_domain(stream, baseline, recorded, domains.tokenizer, protocol, sizes)


def _scored_domain(
    stream: TokenFile,
    baseline: Callable[[NDArray[np.int64]], float],
    recorded: int | None,
    tokenizer: TokenizerIdentity,
    protocol: Protocol,
    sizes: NDArray[np.int32] | None,
) -> HeldOutDomain | None:
    """Choose the windows of a held-out text; None if nothing is scored. Collective.

    Args:
        stream: the text, one document per sequence.
        baseline: returns the loss without context for the occurrences of each token, [vocab_size].
        recorded: bytes of the text; None if unknown.
        tokenizer: identity of the tokenizer.
        protocol: protocol of the evaluation.
        sizes: [vocab_size] bytes of each token; None if no tokenizer was loaded.
    """
    vocab_size = tokenizer.vocab_size
    text = held_out_text(stream, protocol, tokenizer.eod_id)
    if text is None:
        return None
    clusters = cluster_ends(stream, text)
    count = len(clusters)

    def statistics() -> tuple[NDArray[np.int64], NDArray[np.int64] | None, float]:
        tokens, counted = np.zeros(count, np.int64), np.zeros(count, np.float64)
        seen = np.zeros(vocab_size, np.int64)
        for positions, labels in text.scored_blocks():
            cluster = np.searchsorted(clusters, positions, side="right")
            tokens += np.bincount(cluster, minlength=count)
            seen += np.bincount(labels, minlength=vocab_size)
            if sizes is not None:
                counted += np.bincount(cluster, sizes[labels], minlength=count)
        loss = baseline(seen)
        if sizes is None:
            return tokens, None, loss
        if recorded is None:
            counts = counted.astype(np.int64)
            return tokens, counts if counts.any() else None, loss
        decoded = int(token_counts(stream.tokens, vocab_size) @ sizes)
        if not (decoded and recorded):
            return tokens, None, loss
        # The recorded bytes and the decoded bytes of the text differ slightly: a tokenizer may drop
        # or normalize characters. Rounding the cumulative bytes instead of each cluster's bytes
        # keeps the sum exact.
        ends = np.rint(np.cumsum(counted * (recorded / decoded))).astype(np.int64)
        return tokens, np.diff(ends, prepend=0), loss

    return HeldOutDomain(text, clusters, *from_main(statistics))


def uniform_loss(seen: NDArray[np.int64]) -> float:
    """Return the loss of the uniform distribution over ``len(seen)`` tokens, in nats per token."""
    return math.log(len(seen))


def unigram_loss(domains: Domains, name: str, seen: NDArray[np.int64], max_tokens: int) -> float:
    """Return the mean loss of a unigram model of a domain's training text, which has no context.

    Args:
        domains: domains of a corpus.
        name: name of the domain.
        seen: [vocab_size] number of occurrences of each token in the held-out text.
        max_tokens: training tokens that are counted; of more tokens, a sample is counted.

    Returns:
        Nats per token; the frequencies have add-one (Laplace) smoothing.
    """
    training = token_counts(domains.open(name, "train").tokens, len(seen), max_tokens)
    probabilities = (training + 1) / (training.sum() + len(seen))
    return float(-(seen @ np.log(probabilities)) / seen.sum())


def token_counts(
    stream: Tokens, vocab_size: int, max_tokens: int | None = None
) -> NDArray[np.int64]:
    """Count the occurrences of each token, [vocab_size] int64.

    If the stream has more than ``max_tokens`` tokens, evenly spaced chunks are counted.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    chunks = -(-len(stream) // _CHUNK)
    counted = min(chunks, -(-(max_tokens or len(stream)) // _CHUNK))
    for number in range(counted):
        first = number * chunks // counted * _CHUNK
        counts += np.bincount(stream[first : first + _CHUNK], minlength=vocab_size)
    return counts


def result_table(result: EvaluationResult) -> str:
    """Format an evaluation for the terminal: a row per domain, the average and the protocol.

    Domains that are held out from training follow the average, which does not include them.
    """

    def cell(value: float | None, error: float | None, places: int) -> str:
        if value is None:
            return "-"
        return f"{value:.{places}f}" + ("" if error is None else f" ± {error:.{places}f}")

    def row(domain: DomainLoss) -> list[str]:
        return [
            f"{domain.tokens:,}",
            cell(domain.loss, domain.loss_error, 4),
            cell(domain.perplexity, domain.perplexity_error, 2),
            cell(domain.bits_per_byte, domain.bits_per_byte_error, 4),
            f"{domain.unigram_perplexity:.2f}",
        ]

    def target_row(target: TargetLoss) -> list[str]:
        loss = cell(target.loss, target.error, 4)
        return ["", loss, cell(target.perplexity, target.perplexity_error, 2), "", ""]

    mean = cell(result.mean_perplexity, result.mean_perplexity_error, 2)
    rows = [
        ["", "tokens", "loss", "perplexity", "bits/byte", "unigram perplexity"],
        *([name, *row(domain)] for name, domain in result.training_domains.items()),
        ["average", "", "", mean, "", ""],
        *([["target", *target_row(result.target)]] if result.target else []),
        *([result.label(name), *row(result.domains[name])] for name in result.held_out),
    ]
    table = "\n".join(align_columns(rows))
    text = f"{table}\non {result.protocol.describe()}; ± is the standard error over documents"
    if result.left_out:
        text += f"\nnothing to predict, and not in the average: {', '.join(result.left_out)}"
    return text
