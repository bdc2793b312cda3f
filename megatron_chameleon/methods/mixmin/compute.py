"""MixMin: samples of the domains -> n-gram models -> likelihood of the target -> mixture."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Mixture, Stopwatch, TrainingRun, provenance
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.checkpoint.open_model import Model
from megatron_chameleon.console import align_columns
from megatron_chameleon.corpus.domains import find_raw_text
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.corpus.target import (
    FEWEST_TARGET_TOKENS,
    Target,
    average_target,
    check_text_options,
    parse_target,
    read_target_text,
    warn_leaked,
    warn_same_sources,
)
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.evaluation.gold_answers import gold_answers
from megatron_chameleon.methods.limits import EpochLimit, bounds_within, epoch_limit, prior_weights
from megatron_chameleon.methods.mixmin import (
    NGRAM,
    DomainsAndTarget,
    ExpertTokenizer,
    MixminOptions,
)
from megatron_chameleon.methods.mixmin.text import (
    Blocks,
    ByteCoder,
    CorpusDomains,
    Domains,
    RawDomains,
    TextCoder,
    answer_blocks,
    choose_blocks,
)
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.output import (
    by_name,
    cost_totals,
    format_weight,
    require_training_tokens,
    select_domains,
    write_and_print,
)
from megatron_chameleon.methods.train_proxy import (
    forward_only,
    is_finished,
    on_rank_0,
    train_proxy,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.gain import PredictedGain
from megatron_chameleon.mixture.mixmin import (
    NUM_FOLDS,
    STRENGTHS,
    CrossFit,
    TargetText,
    bootstrap_mixmin,
    choose_strength,
    explained_shares,
    mixmin_weights,
    predicted_gain,
)
from megatron_chameleon.mixture.ngram import NgramModel
from megatron_chameleon.mixture.optimum import Limits
from megatron_chameleon.mixture.weights import natural_weights
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.parallel.options import is_rank_0
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.stopping import StopRequests

TOKEN_ORDER, BYTE_ORDER = 3, 6
SAMPLE_TOKENS, SAMPLE_BYTES = 1_000_000, 3_000_000
# Before proxies or experts are trained, the models of all domains are fitted to this many tokens at
# most, so that many domains take seconds.
MOST_SAMPLED_TOKENS = 8 * SAMPLE_TOKENS
TARGET_TOKENS, TARGET_BYTES = 1 << 17, 1 << 19
# Tokens of a task's answer with its context that n-gram models read; trained models read windows.
ANSWER_TOKENS = 64
# A smaller predicted gain, in nats per token, is not worth another mixture: 1% of perplexity, and
# within the differences between the seeds of small models.
LEAST_GAIN = 0.01
# A gain on fewer documents, or blocks of a few documents, is never certain.
FEWEST_CERTAIN = 8
# Bytes in a token of most text: gains in nats per byte are that much smaller.
BYTES_PER_TOKEN = 4.0
NUM_EXAMPLES, EXAMPLE_CHARACTERS = 3, 70


@dataclasses.dataclass(frozen=True)
class Plan:
    """Validated options, and the text that they name.

    Attributes:
        options: options of the method.
        domains: the domains to weigh.
        corpus: corpus of the domains; None for raw text.
        coder: tokenizer of domains and target; None if the corpus has lost it and no text is read.
        vocab_size: number of token ids.
        target: the target.
        limits: prior and bounds of the weights.
        without_epochs: the same without the epoch limit.
        order: number of tokens in the longest n-grams.
        sample_tokens: maximum tokens of a domain's sample.
        target_tokens: maximum tokens of the target.
    """

    options: DomainsAndTarget
    domains: Domains
    corpus: Corpus | None
    coder: TextCoder | None
    vocab_size: int
    target: Target
    limits: Limits
    without_epochs: Limits
    order: int
    sample_tokens: int
    target_tokens: int

    @property
    def eod_id(self) -> int:
        """The end-of-document token."""
        if self.corpus is not None:
            return self.corpus.tokenizer.eod_id
        assert self.coder is not None
        return self.coder.eod_id

    @property
    def experts(self) -> tuple[str, ...]:
        """The value of ``--experts``."""
        return self.options.experts if isinstance(self.options, MixminOptions) else (NGRAM,)

    @property
    def uses_ngrams(self) -> bool:
        """Whether the domains' models are n-grams."""
        return self.experts == (NGRAM,)

    @property
    def models(self) -> str:
        """The domains' models, in words."""
        if self.uses_ngrams:
            return f"{self.order}-gram models"
        size = self.experts[0]
        return "the models of --experts" if "=" in size else f"a {size} model per domain"


@dataclasses.dataclass(frozen=True)
class ModelsUsed:
    """The trained models that predicted a target.

    Attributes:
        hashes: name for the provenance -> hash of the checkpoint.
        runs: folders of the runs that the method trained.
        flops: floating-point operations of the predictions.
        num_devices: number of ranks.
    """

    hashes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    runs: Sequence[Path] = ()
    flops: float = 0.0
    num_devices: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Estimate:
    """Weights for a target, and what is known about them.

    Attributes:
        weights: [k] the estimate.
        fit: cross-validation.
        explained: [k] share of the target's tokens that each domain explains.
        gains: baseline -> predicted gain over it.
        unexplained: share of the target in documents that token frequencies predict better.
        resembles: whether the domains predict the target better than its token frequencies.
        examples: beginnings of unexplained documents.
    """

    weights: Array
    fit: CrossFit
    explained: Array
    gains: Mapping[str, PredictedGain]
    unexplained: float
    resembles: bool
    examples: Sequence[str]


def compute_mixture(options: MixminOptions, stops: StopRequests | None = None) -> bool:
    """Fit or train the models, estimate the weights and write the mixture. Called on every rank.

    Returns:
        Whether the mixture was written; False after a stop signal.

    Raises:
        UserError: for a mistake in the options or in the files that they name; later, for errors of
            the training.
    """
    if options.experts != (NGRAM,):
        return _compute_with_models(options, stops or StopRequests(options.training.stopping))
    if is_rank_0():
        stopwatch = Stopwatch()
        check_output(options.output, Mixture.KIND)
        plan = make_plan(options)
        blocks = read_target(plan)
        text = target_text(plan, blocks, predict(plan, blocks))
        write(options, plan, blocks, text, estimate_weights(plan, blocks, text), stopwatch)
    return True


def _compute_with_models(options: MixminOptions, stops: StopRequests) -> bool:
    """Train the models of ``--experts``, if it names one, and predict the target with them."""
    from megatron_chameleon.methods.mixmin import experts

    parallel = options.training.parallel

    def check() -> tuple[list[str], list[PretrainOptions]] | None:
        """Return the domains, and the runs to train; None if the prior was written instead."""
        check_output(options.output, Mixture.KIND)
        plan = make_plan(options)
        names, runs = plan.domains.names, list[PretrainOptions]()
        if options.trains_experts:
            assert plan.corpus is not None
            # Mistakes are found before anything is written.
            experts.check_training(options, plan.corpus)
            blocks = read_target(plan)
            trains = not all(map(is_finished, experts.run_folders(options, names)))
            if trains and _write_prior_without_gain(options, plan, blocks):
                return None
            runs = experts.plan_runs(options, plan.corpus, names)
        else:
            opened = experts.passed_experts(options.experts, names)
            experts.check_experts(opened, plan.corpus, plan.coder, parallel)
        return names, runs

    checked = on_rank_0(parallel, check)
    if checked is None:
        return True
    names, runs = checked
    for number, run in enumerate(runs):
        title = f"the expert of '{names[number]}', {number + 1} of {len(runs)}"
        if not train_proxy(run, stops, name=title):
            return False
    with distributed(forward_only(parallel), seed=0) as layout:
        stopwatch = Stopwatch()

        def read() -> tuple[Plan, dict[str, Blocks], dict[str, Model], int]:
            plan = make_plan(options)
            if runs:
                found = experts.trained_experts(names, runs)
            else:
                found = experts.passed_experts(options.experts, names)
            found, window = experts.check_experts(found, plan.corpus, plan.coder, parallel)
            return plan, read_target(plan, window), found, window

        plan, blocks, found, window = from_main(read)
        probabilities, flops = experts.expert_probabilities(
            found, list(blocks.values()), window, plan.eod_id, layout
        )
        made_with = ModelsUsed(
            {f"expert {name}": model.hash for name, model in found.items()},
            [run.run_dir for run in runs],
            flops,
            layout.world_size,
        )
        text = target_text(plan, blocks, probabilities)

        def finish() -> None:
            estimate = estimate_weights(plan, blocks, text)
            write(options, plan, blocks, text, estimate, stopwatch, made_with)

        from_main(finish)
    return True


def _write_prior_without_gain(
    options: MixminOptions, plan: Plan, blocks: Mapping[str, Blocks]
) -> bool:
    """Predict the gain with n-grams before experts are trained; write the prior if none is certain.

    With ``--accept-uncertain``, nothing is predicted.

    Returns:
        Whether the prior was written.
    """
    if options.estimate.accept_uncertain:
        return False
    stopwatch = Stopwatch()
    most = -(-MOST_SAMPLED_TOKENS // len(plan.domains.names))
    plan = dataclasses.replace(
        plan,
        options=dataclasses.replace(
            options, experts=(NGRAM,), training=ProxyOptions(), work_dir=None
        ),
        sample_tokens=min(plan.sample_tokens, most),
    )
    text = target_text(plan, blocks, predict(plan, blocks))
    estimate = estimate_weights(plan, blocks, text)
    if reason_for_prior(plan, estimate) is None:
        prior = options.estimate.prior
        print("\n".join(describe_estimate(plan, text, estimate)))
        print(f"a gain over '{prior}' is predicted; the experts are trained", flush=True)
        return False
    write(options, plan, blocks, text, estimate, stopwatch)
    return True


def make_plan(options: DomainsAndTarget) -> Plan:
    """Check the options, and find the files that they name.

    Raises:
        UserError: for the first mistake found.
    """
    estimate, models = options.estimate, options.models
    corpus = None if options.corpus is None else Corpus.load(options.corpus)
    is_bytes = corpus is None and options.tokenizer.tokenizer_model is None
    sample_tokens = models.sample_tokens or (SAMPLE_BYTES if is_bytes else SAMPLE_TOKENS)
    coder: TextCoder | None
    domains: Domains
    if corpus is not None:
        names = select_domains(options.domains, corpus.names, corpus.root)
        require_training_tokens(corpus, names, "to fit a model to")
        domains, vocab_size = CorpusDomains(corpus, names), corpus.tokenizer.vocab_size
        target = _target(options, list(corpus.all_domains), names)
        check_text_options(options.source, target)
        encodes = bool(target.texts or options.downstream.tasks)
        coder, limit = _coder_of(corpus, encodes=encodes), EpochLimit({}, None, None)
        if isinstance(options, MixminOptions):
            limit = epoch_limit(options, corpus, names)
    else:
        coder = _text_coder(options.tokenizer)
        sources = find_raw_text(options.source).sources
        names = select_domains(options.domains, list(sources), "--input")
        target, limit = _target(options, list(sources), names), EpochLimit({}, None, None)
        domains = RawDomains(
            options.source,
            names,
            sources,
            coder,
            options.samples_folder,
            sample_tokens,
            estimate.estimate_seed,
            tuple(name for name in target.shares if name in sources),
        )
        vocab_size = coder.vocab_size
    if limit.caps is not None:
        limit.check()
    if len(names) < 2:
        raise UserError(f"{domains.where} has only one domain to weigh; add another domain")
    held_out = () if corpus is None else corpus.held_out
    bounds = names, estimate.min_weight, estimate.max_weight
    caps = [] if limit.caps is None else [(limit.caps, "--max-epochs")]
    low, high = bounds_within(*bounds, caps)
    # Raw text is read for its sizes, so only if they are needed.
    sizes = domains.sizes if estimate.prior == "natural" else dict.fromkeys(names)
    prior = prior_weights(estimate.prior, sizes, domains.where, held_out)
    return Plan(
        options=options,
        domains=domains,
        corpus=corpus,
        coder=coder,
        vocab_size=vocab_size,
        target=target,
        limits=Limits(prior, low, high),
        without_epochs=Limits(prior, *bounds_within(*bounds, [])),
        order=models.ngram_order or (BYTE_ORDER if is_bytes else TOKEN_ORDER),
        sample_tokens=sample_tokens,
        target_tokens=models.target_text_tokens or (TARGET_BYTES if is_bytes else TARGET_TOKENS),
    )


def _target(options: DomainsAndTarget, known: Sequence[str], weighed: Sequence[str]) -> Target:
    """Parse ``--target`` with domains of ``known`` and tasks.

    The default is the average of the tasks, or without tasks, that of the domains ``weighed``.
    """
    tasks = options.downstream.tasks
    if both := set(tasks).intersection(known):
        raise UserError(f"--tasks {min(both)}: a domain has the same name; rename the domain")
    if options.target is None:
        return (
            parse_target(",".join(tasks), tasks, options.source)
            if tasks
            else average_target(weighed)
        )
    target = parse_target(options.target, [*known, *tasks], options.source)
    if unused := [task for task in tasks if task not in target.shares]:
        raise UserError(f"--tasks {unused[0]}: --target does not name it; leave it out")
    return target


def _coder_of(corpus: Corpus, *, encodes: bool) -> TextCoder | None:
    """Return the corpus's tokenizer; None if it is missing, unless it ``encodes`` a target."""
    try:
        return corpus_tokenizer(corpus)
    except UserError:
        if encodes:
            raise
        return None


def _text_coder(options: ExpertTokenizer) -> TextCoder:
    """Return the tokenizer of raw text."""
    if options.tokenizer_model is None:
        options.reject_changed(["tiktoken_pattern", "eod_token"], "requires --tokenizer-model")
        return ByteCoder()
    return load_tokenizer(options.tokenizer_model, options.eod_token, options.tiktoken_pattern)


def read_target(plan: Plan, longest: int = ANSWER_TOKENS) -> dict[str, Blocks]:
    """Return the chosen text of each part of the target; warn about text that is trained on.

    Args:
        plan: the plan.
        longest: maximum tokens of a task's answer with its context.

    Raises:
        UserError: if a text or task cannot be read, or is too short.
    """
    seed, blocks = plan.options.estimate.estimate_seed, dict[str, Blocks]()
    share, tasks = max(plan.target_tokens // len(plan.target.shares), 1), plan.options.downstream
    answers = gold_answers(tasks) if tasks.tasks else {}
    for name in plan.target.shares:
        if name in answers:
            assert plan.coder is not None, "a target with tasks requires a tokenizer"
            blocks[name] = answer_blocks(answers[name], plan.coder, share, longest, seed, name)
            continue
        if name in plan.target.texts:
            assert plan.coder is not None, "a target with texts requires a tokenizer"
            file = read_target_text(
                plan.options.source, plan.target, name, plan.coder, plan.target_tokens, seed
            )
        else:
            file = plan.domains.held_out(name)
        tokens, unit = int(file.lengths.sum(dtype=np.int64)), unit_of(plan)
        if tokens < FEWEST_TARGET_TOKENS:
            where, fix = f"--target {plan.target.value}", "add text"
            if plan.target.value is None:
                where = "the default target is the average over the domains"
                fix = f"leave '{name}' out of --domains, pass --target, or add text"
            raise UserError(
                f"{where}: the text of '{name}' has {tokens:,} {unit}s, but at least "
                f"{FEWEST_TARGET_TOKENS:,} are needed to predict a gain; {fix}"
            )
        _warn_trained_on(plan, name, file)
        blocks[name] = choose_blocks(file, share, seed, name)
    return blocks


def _warn_trained_on(plan: Plan, name: str, file: TokenFile) -> None:
    """Warn if documents ``file`` of the target's text ``name`` are trained on.

    Documents of a domain to weigh are held out of its training text by the corpus, or by the
    sample. So they are not looked up.
    """
    domains, same = plan.domains, set[str]()
    if isinstance(domains, RawDomains):
        others = {other: domains.sources[other] for other in domains.names if other != name}
        same = warn_same_sources(name, plan.target.texts.get(name) or domains.sources[name], others)
    if name not in domains.names:
        looked_up = [other for other in domains.names if other not in same]
        warn_leaked(name, file, looked_up, domains.training_text, plan.eod_id)


def predict(plan: Plan, blocks: Mapping[str, Blocks]) -> Array:
    """Fit an n-gram model to a sample of each domain; return the target's probabilities [n, k]."""
    streams = [block.tokens for block in blocks.values()]
    ends = np.cumsum([len(stream) for stream in streams])[:-1]
    names = plan.domains.names
    probabilities = np.empty((sum(map(len, streams)), len(names)))
    with progress_bar(len(names), " domains", "n-grams", delay=SECONDS_WITHOUT_BAR) as bar:
        for number, name in enumerate(names):
            sample = plan.domains.sample(name, plan.sample_tokens)
            model = NgramModel.fit(sample.tokens[:], plan.vocab_size, plan.order)
            for part, stream in zip(np.split(probabilities[:, number], ends), streams, strict=True):
                part[:] = model.probabilities(stream)
            bar.update()
    return probabilities


def target_text(plan: Plan, blocks: Mapping[str, Blocks], probabilities: Array) -> TargetText:
    """Return the target's text with the ``probabilities`` [n, k] of its tokens."""
    shares = np.concatenate(
        [
            plan.target.shares[name] * block.weights / block.weights.sum()
            for name, block in blocks.items()
        ]
    )
    counts = np.cumsum([0, *(len(block.starts) for block in blocks.values())])[:-1]
    documents = [
        first + block.documents for first, block in zip(counts, blocks.values(), strict=True)
    ]
    parts = np.repeat(np.arange(len(blocks)), [len(block.starts) for block in blocks.values()])
    is_scored = shares > 0
    return TargetText(
        probabilities[is_scored], shares[is_scored], np.concatenate(documents)[is_scored], parts
    )


def estimate_weights(plan: Plan, blocks: Mapping[str, Blocks], text: TargetText) -> Estimate:
    """Choose the strength of the prior, and estimate weights and gains."""
    options, limits = plan.options.estimate, plan.limits
    seed, fits = options.estimate_seed, len(STRENGTHS) * min(NUM_FOLDS, text.num_documents)
    with progress_bar(fits, " fits", "weights", delay=SECONDS_WITHOUT_BAR) as bar:
        fit = choose_strength(text, limits, seed=seed, on_fit=bar.update)
    weights = mixmin_weights(text, limits, fit.strength)
    baselines = {"uniform": np.full(len(weights), 1.0 / len(weights))}
    sizes = [size for size in plan.domains.sizes.values() if size is not None]
    if len(sizes) == len(weights):
        baselines["natural"] = natural_weights(sizes)
    baselines["prior"] = limits.placed_prior
    gains = {
        name: predicted_gain(text, fit, baseline, options.confidence)
        for name, baseline in baselines.items()
    }
    # Per-document log-likelihoods of token frequencies and of the mixture.
    frequencies = np.concatenate(
        [_frequency_likelihoods(block, plan.vocab_size, seed) for block in blocks.values()]
    )
    mixed = np.log(text.probabilities @ weights)
    advantage = text.document_sums(text.shares * (mixed - frequencies))
    # The answers of a task may be few, such as yes and no: their frequencies say nothing about the
    # domains.
    tasks = plan.options.downstream.tasks
    is_text = np.array([name not in tasks for name in blocks])[text.parts]
    advantage[~is_text] = 0.0
    sizes_of = text.document_sums(text.shares)
    return Estimate(
        weights=weights,
        fit=fit,
        explained=explained_shares(text, weights),
        gains=gains,
        unexplained=float(sizes_of[advantage < 0].sum()),
        resembles=bool(advantage.sum() > 0) or not is_text.any(),
        examples=_examples(plan.coder, blocks, advantage / sizes_of),
    )


def weight_intervals(plan: Plan, text: TargetText, estimate: Estimate) -> Array:
    """Return the ends [k, 2] of the weights' intervals, from resamples of the documents."""
    options, strength = plan.options.estimate, estimate.fit.strength
    count, tail = options.bootstrap_resamples, (1 - options.confidence) / 2
    with progress_bar(count, " fits", "intervals", delay=SECONDS_WITHOUT_BAR) as bar:
        resampled = bootstrap_mixmin(
            text,
            plan.limits,
            strength,
            estimate.weights,
            count,
            options.estimate_seed,
            bar.update,
        )
    return np.quantile(resampled, [tail, 1 - tail], axis=0).T


def _frequency_likelihoods(block: Blocks, vocab_size: int, seed: int) -> Array:
    """Return log p(x_t) [n] of the n scored tokens by the token frequencies of other documents."""
    tokens, documents = block.tokens[block.is_scored], block.documents[block.is_scored]
    count = int(documents[-1]) + 1
    folds = np.random.default_rng(seed).permutation(count) % min(NUM_FOLDS, count)
    of_token, found = folds[documents], np.empty(len(tokens))
    for fold in range(int(folds.max()) + 1):
        chosen = of_token == fold
        rest = tokens[~chosen] if (~chosen).any() else tokens
        model = NgramModel.fit(rest, vocab_size, order=1)
        found[chosen] = np.log(model.probabilities(tokens[chosen]))
    return found


def _examples(coder: TextCoder | None, blocks: Mapping[str, Blocks], advantage: Array) -> list[str]:
    """Return the beginnings of the documents that the domains explain least, if any."""
    if coder is None:
        return []
    places = [
        (block, int(start), int(stop))
        for block in blocks.values()
        for start, stop in zip(
            block.starts, np.append(block.starts[1:], len(block.tokens)), strict=True
        )
    ]
    worst = [number for number in np.argsort(advantage, kind="stable") if advantage[number] < 0]
    examples = []
    for number in worst[:NUM_EXAMPLES]:
        block, start, stop = places[number]
        ids = block.tokens[start : min(stop, start + EXAMPLE_CHARACTERS)].tolist()
        examples.append(" ".join(coder.decode(ids).split())[:EXAMPLE_CHARACTERS])
    return examples


def write(
    options: MixminOptions,
    plan: Plan,
    blocks: Mapping[str, Blocks],
    text: TargetText,
    estimate: Estimate,
    stopwatch: Stopwatch,
    made_with: ModelsUsed = ModelsUsed(),
) -> None:
    """Write the estimated weights, or the prior if they are not certain to be better."""
    names, settings, limits = plan.domains.names, options.estimate, plan.limits
    takes_estimate = settings.accept_uncertain or reason_for_prior(plan, estimate) is None
    weights = estimate.weights if takes_estimate else limits.placed_prior
    free = weights
    if options.max_epochs is not None:
        free = plan.without_epochs.placed_prior
        if takes_estimate:
            free = mixmin_weights(text, plan.without_epochs, estimate.fit.strength)
    limit = EpochLimit(dict.fromkeys(names, 0), None, None)
    if plan.corpus is not None:
        limit = epoch_limit(options, plan.corpus, names)
    fields = limit.mixture_fields(free, weights)
    # The prior has no intervals.
    intervals = by_name(names, weight_intervals(plan, text, estimate)) if takes_estimate else None
    inputs = {"corpus" if plan.corpus else "text": plan.domains.hash, **made_with.hashes}
    if plan.target.texts:
        inputs["target text"] = plan.target.texts_hash
    if tasks := options.downstream.tasks:
        streams = {name: blocks[name].tokens.tolist() for name in tasks}
        inputs["target tasks"] = sha256_of_json(streams)
    strength = estimate.fit.strength
    own = stopwatch.cost(made_with.flops, made_with.num_devices)
    trained = [TrainingRun.load(folder) for folder in made_with.runs]
    settings_of_models: dict[str, Any] = {"experts": " ".join(plan.experts)}
    if plan.uses_ngrams:
        settings_of_models |= {"ngram_order": plan.order, "sample_tokens": plan.sample_tokens}
    if trained:
        settings_of_models |= {
            "train_iters": options.training.train_iters,
            "made_from": [os.path.relpath(run.root, options.output.parent) for run in trained],
            "total_cost": cost_totals(sum((run.cost for run in trained), own)),
        }
    mixture = Mixture(
        **fields,
        method="mixmin",
        parameters={
            "target": {"value": plan.target.value, "shares": dict(plan.target.shares)},
            **settings_of_models,
            "target_tokens": {name: int(block.is_scored.sum()) for name, block in blocks.items()},
            "target_documents": text.num_documents,
            "prior": by_name(names, limits.prior),
            "bounds": by_name(names, np.column_stack([limits.low, limits.high])),
            "strength": None if math.isinf(strength) else strength,
            "estimate": by_name(names, estimate.weights),
            "written": "estimate" if takes_estimate else "prior",
            "predicted_gain": {
                name: dataclasses.asdict(gain) for name, gain in estimate.gains.items()
            },
            "explained": by_name(names, estimate.explained),
            "unexplained": estimate.unexplained,
            "resembles": estimate.resembles,
            "paper_flops": sum(
                paper_flops(options.experts[0], trained_tokens=run.tokens) for run in trained
            ),
        },
        intervals=intervals,
        confidence=None if intervals is None else settings.confidence,
        provenance=provenance(options, inputs),
        cost=own,
    )
    hint = "--accept-uncertain writes the estimate"
    if options.trains_experts and plan.uses_ngrams:
        hint = "no expert was trained: --accept-uncertain trains the experts"
    written = decision(plan, estimate, takes_estimate, hint)
    lines = [*describe_estimate(plan, text, estimate), *written]
    closing = [] if plan.corpus else [f"the samples are kept in {options.samples_folder}"]
    heading = "\n".join(lines)
    write_and_print(mixture, options, plan.corpus, heading, *closing, source=options.source)


def describe_estimate(plan: Plan, text: TargetText, estimate: Estimate) -> list[str]:
    """Describe the target, the predicted gains, and what each domain or none explains."""
    target, unit = plan.target, unit_of(plan)
    parts = [f"{name} ({share:.0%})" for name, share in target.shares.items()]
    what = "the average over the domains" if target.value is None else format_names(parts)
    lines = [
        f"MixMin with {plan.models}; target: {what}; "
        f"{len(text.shares):,} {unit}s of {text.num_documents:,} documents"
    ]
    for name, gain in shown_gains(plan, estimate).items():
        lines.append(
            f"predicted gain over {name}: {gain.gain:.4f} nats per {unit} "
            f"({gain.low:.4f} to {gain.high:.4f}), perplexity x {math.exp(-gain.gain):.3f}"
        )
    if "natural" not in estimate.gains:
        unknown = [name for name, size in plan.domains.sizes.items() if size is None]
        lines.append(
            "predicted gain over the natural mixture: unknown, as is the amount of text in "
            f"{format_names(unknown)}"
        )
    order, names = np.argsort(-estimate.explained, kind="stable"), plan.domains.names
    shares = [f"{names[number]} {estimate.explained[number]:.1%}" for number in order]
    lines.append(f"share of the target that each domain explains: {format_names(shares)}")
    if estimate.unexplained > 0:
        examples = "".join(f"\n    {example}" for example in estimate.examples)
        lines.append(
            f"{estimate.unexplained:.0%} of the target is in documents that no domain explains: "
            f"the target's own {unit} frequencies predict them better{examples}"
        )
    return lines


def unit_of(plan: Plan) -> str:
    """Return what the models predict: a byte or a token."""
    return "byte" if isinstance(plan.coder, ByteCoder) else "token"


def shown_gains(plan: Plan, estimate: Estimate) -> dict[str, PredictedGain]:
    """Return label -> gain over each baseline, without the prior if it is another baseline."""
    labels = {"uniform": "Uniform", "natural": "the natural mixture"}
    prior, found = plan.options.estimate.prior, estimate.gains
    gains = {label: found[name] for name, label in labels.items() if name in found}
    if prior not in labels:
        gains[f"the prior {prior}"] = found["prior"]
    return gains


def least_gain(plan: Plan) -> float:
    """Return the smallest gain that is worth another mixture, in nats per token or byte."""
    return LEAST_GAIN / BYTES_PER_TOKEN if isinstance(plan.coder, ByteCoder) else LEAST_GAIN


def reason_for_prior(plan: Plan, estimate: Estimate) -> str | None:
    """Return why the weights are not worth more than the prior; None if they are."""
    gain = estimate.gains["prior"]
    if not estimate.resembles:
        reason = "the target resembles none of the domains"
        if plan.uses_ngrams:
            return reason
        return f"{reason}, or their models are hardly trained"
    if gain.gain < least_gain(plan):
        return f"no gain over it is predicted: less than {least_gain(plan):g} nats"
    if len(estimate.fit.folds) < FEWEST_CERTAIN:
        return f"the target has fewer than {FEWEST_CERTAIN} documents, so no gain is certain"
    if gain.low <= 0:
        return "the gain over it is not certain"
    return None


def decision(plan: Plan, estimate: Estimate, takes_estimate: bool, hint: str) -> list[str]:
    """Describe which weights are written, and why; the prior, with ``hint`` and the estimate."""
    reason = reason_for_prior(plan, estimate)
    if takes_estimate:
        return [f"written: the estimated weights{' (--accept-uncertain)' if reason else ''}"]
    names = plan.domains.names
    rows = [["domain", "estimate"]]
    for number in np.argsort(-estimate.weights, kind="stable"):
        rows.append([names[number], format_weight(estimate.weights[number])])
    return [
        f"written: the prior '{plan.options.estimate.prior}' within the limits, since {reason}; "
        + hint,
        *align_columns(rows),
    ]
