"""Read and check all inputs of a training run, before anything is written."""

from __future__ import annotations

import bisect
import dataclasses
import math
import operator
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_chameleon.artifacts import (
    Corpus,
    Mixture,
    MixtureWarning,
    TokenizerIdentity,
    implied_epochs,
    provenance,
)
from megatron_chameleon.artifacts.files import require_writable, sha256_of_json
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.blend.dataset import BlendedTokens, check_enough_tokens, check_weights
from megatron_chameleon.blend.order import MAX_SURPLUS
from megatron_chameleon.blend.schedule import MixtureSchedule, check_changes, check_ramps
from megatron_chameleon.checkpoint.open_model import Model
from megatron_chameleon.corpus.data_path import DataPath, split_range
from megatron_chameleon.corpus.domains import Domains, open_data_path, open_domains
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import (
    Target,
    check_text_options,
    parse_target,
    recorded_target,
)
from megatron_chameleon.corpus.tokenizer import Tokenizer, corpus_tokenizer, load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.compiled_layers import check_compile
from megatron_chameleon.model.config import DEFAULT_MODEL, PRESETS, ModelConfig, name_of
from megatron_chameleon.model.document_attention import check_document_attention
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.options import ArchitectureOptions, resolve_model
from megatron_chameleon.ranges import parse_named_numbers
from megatron_chameleon.storage import is_remote
from megatron_chameleon.training.options import (
    PlanRunOptions,
    PretrainOptions,
    TrainingOptions,
    check_muon,
)
from megatron_chameleon.training.pretrained import open_pretrained

# If all text is repeated, its value decays beyond about four epochs: Muennighoff et al. 2023,
# "Scaling Data-Constrained Language Models".
MANY_EPOCHS = 4.0
# Scarce text that is mixed with abundant text tolerated 15 to 20 repetitions: Sedova et al. 2026,
# "Scaling Laws for Mixture Pretraining Under Data Constraints" (arXiv 2605.12715, abstract).
MANY_EPOCHS_OF_SCARCE_TEXT = 15.0
# Text is abundant here if domains with at most MANY_EPOCHS have this share of the run's tokens. The
# value is an assumption.
ABUNDANT_SHARE = 0.5
# Target epochs are compared with limits up to this relative rounding error.
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Options of a run, and the artifacts that they name.

    Attributes:
        options: options of the run. ``model`` is the name of the model, or None if the model has
            no name.
        data: the domains; training tokens are cut if ``--target-tokens`` is set.
        mixture: initial mixture.
        schedule: mixture weights of every sample, in the order of ``data.names``.
        by_size: whether the samples follow Megatron's order for data sets without weights, which is
            used for a corpus with a single domain and for a ``--data-path`` without weights.
        pretrained: initial weights of the model; None for random initialization.
        config: the model.
        target: target whose loss is measured by validations; None without one.
        loss_weights: [k] weights of the domains' token losses; None if all are 1.
        limited: domain -> epochs that the mixture planned, for the domains whose weights
            ``--max-repetition-action redistribute`` has lowered.
        provenance: provenance of the run.
    """

    options: PretrainOptions
    data: Domains
    mixture: Mixture
    schedule: MixtureSchedule
    by_size: bool
    pretrained: Model | None
    config: ModelConfig
    target: Target | None
    loss_weights: tuple[float, ...] | None
    limited: dict[str, float]
    provenance: Provenance

    @property
    def valid(self) -> Domains | None:
        """The domains with their tokens for validation; None if ``--split`` leaves none."""
        return self.data.of("valid") if "valid" in self.data.splits else None

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in one global batch."""
        return self.options.global_batch_size * self.options.seq_length

    @property
    def num_samples(self) -> int:
        """Number of samples in the whole run."""
        return self.options.train_iters * self.options.global_batch_size

    @property
    def target_hash(self) -> str:
        """Hash of the target and of the amount of text on which its loss is measured."""
        assert self.target is not None
        amount = self.options.validation.eval_iters, self.options.validation.eval_tokens
        return sha256_of_json([self.target.shares, self.target.texts_hash, amount])

    def open_tokenizer(self) -> Tokenizer:
        """Open the tokenizer of the training tokens.

        Raises:
            UserError: if it is missing, or is not the tokenizer of the corpus.
        """
        data = self.options.data
        if data.tokenizer_model is None:
            assert self.options.corpus is not None
            return corpus_tokenizer(Corpus.load(self.options.corpus))
        return load_tokenizer(data.tokenizer_model, data.eod_token, data.tiktoken_pattern)

    def samples(self, schedule: MixtureSchedule) -> BlendedTokens:
        """The training samples of the whole run, in order, with the weights of ``schedule``."""
        return BlendedTokens(
            data=self.data,
            schedule=schedule,
            num_samples=self.num_samples,
            seq_length=self.options.seq_length,
            seed=self.options.seed,
            permutation=self.options.data.permutation,
            boundaries=self.options.boundaries,
            cache=self.options.data.data_cache_path,
            by_size=self.by_size,
        )

    def epochs(self, schedule: MixtureSchedule) -> dict[str, float]:
        """Domain -> target epochs of the whole run with ``schedule``."""
        return planned_epochs(self.options, self.data, schedule)


def plan_training(options: PretrainOptions) -> TrainingPlan:
    """Read and check the artifacts that ``options`` name.

    Raises:
        UserError: if an option or an artifact is invalid, or if some of them are incompatible.
    """
    check_overwrite(options)
    if (cache := options.data.data_cache_path) is not None:
        require_writable(cache, f"--data-cache-path {cache}")  # used after the start of training
    # Raises for an invalid model before anything is read.
    model = options.model or DEFAULT_MODEL
    config = resolve_model(model, options.architecture, 1, options.seq_length)
    if options.compile_layers:
        check_compile()
    if options.document_attention == "flex":
        check_document_attention()
    tokenizer = None
    if options.data.tokenizer_model is not None:
        opened = load_tokenizer(
            options.data.tokenizer_model, options.data.eod_token, options.data.tiktoken_pattern
        )
        tokenizer = opened.identity
        recorded = dataclasses.replace(options.data, eod_token=opened.eod_token)
        options = dataclasses.replace(options, data=recorded)
    data, mixture, weights, by_size = load_data(options, tokenizer)
    data = data.cut(options.tokens, options.target_tokens)
    schedule = load_schedule(options, data, mixture, weights)
    schedule, limited = limit_repetition(options, data, mixture, schedule)
    for phase in schedule.phases:
        check_enough_tokens(data, phase.weights, options.seq_length)
    target = find_run_target(options, data, mixture)
    config = dataclasses.replace(config, vocab_size=data.tokenizer.vocab_size)
    pretrained, config = open_pretrained(options, data) or (None, config)
    check_model(config, options)
    # Record the name of the model, so that records do not depend on how it was passed; for a model
    # without a name, its folder, if any.
    folder = None if options.model in PRESETS else options.model
    options = dataclasses.replace(
        options, model=name_of(config) or folder, architecture=ArchitectureOptions()
    )
    inputs = {"corpus": data.hash, "mixture": mixture.hash}
    if pretrained:
        inputs["pretrained checkpoint"] = pretrained.hash
    return TrainingPlan(
        options=options,
        data=data,
        mixture=mixture,
        schedule=schedule,
        by_size=by_size,
        pretrained=pretrained,
        config=config,
        target=target,
        loss_weights=parse_loss_weights(options.loss_weights, data, schedule),
        limited=limited,
        provenance=provenance(options, inputs),
    )


def parse_loss_weights(
    value: str | None, data: Domains, schedule: MixtureSchedule
) -> tuple[float, ...] | None:
    """Parse ``--loss-weights``: [k] weights of the domains' token losses, 1 if not named.

    Raises:
        UserError: for an unknown or repeated name, a weight that is not finite and >= 0, or if no
            sampled domain has a weight above 0.
    """
    if value is None:
        return None
    weights = dict.fromkeys(data.names, 1.0)
    weights |= parse_named_numbers("--loss-weights", value, data.names)
    for phase in schedule.phases:
        if not any(map(operator.mul, weights.values(), phase.weights)):
            raise UserError(
                f"--loss-weights {value}: no sampled domain has a weight above 0; give one a weight"
            )
    return tuple(weights.values())


def find_run_target(options: PretrainOptions, data: Domains, mixture: Mixture) -> Target | None:
    """Return the target of ``--target``, or the one that the mixture records.

    The target of the mixture is used only if validations measure all of its domains.

    Raises:
        UserError: for an invalid value, an option without effect, a domain that cannot be measured,
            or a text in a folder that --overwrite deletes.
    """
    value = options.target.target
    measured = [
        name
        for name, tokens in data.splits.get("valid", {}).items()
        if tokens.tokens >= 2 and options.validates
    ]
    if value is None:
        recorded = recorded_target(mixture.parameters)
        if recorded and recorded.shares.keys() <= set(measured):
            return recorded
        options.target.reject_changed(["keep_best"], "the run has no target")
        return None
    names = list(data.splits["train"])
    source = SourceOptions((), text_key=options.target.target_text_key)
    target = parse_target(value, names, source)
    check_text_options(options.target, target)
    if missing := target.shares.keys() - target.texts.keys() - set(measured):
        raise UserError(
            f"--target {value}: the valid split of '{min(missing)}' is empty; name other domains, "
            "or preprocess again with a larger valid share (--split)"
        )
    if options.overwrite:
        texts = (source.path for sources in target.texts.values() for source in sources)
        require_outside(options.run_dir, texts)
    return target


def check_model(config: ModelConfig, options: TrainingOptions) -> None:
    """Check that the model can be trained with ``options``.

    Raises:
        UserError: if the model cannot be partitioned as the layout requires, an option has no
            effect on this model, or the optimizer is not installed.
    """
    if options.optimizer.optimizer == "muon":
        if config.use_mup:
            raise UserError(
                "--use-mup and --optimizer muon exclude each other: muP scales the rates of AdamW; "
                "leave out one of them"
            )
        check_muon()
    check_model_layout(config, options.parallel, options.seq_length)
    if config.is_rotary and options.boundaries.reset_position_ids:
        raise UserError(
            "--reset-position-ids has no effect on rotary positions, which are relative; leave it "
            "out (--reset-attention-mask separates documents)"
        )


def load_data(
    options: PretrainOptions, tokenizer: TokenizerIdentity | None
) -> tuple[Domains, Mixture, list[float], bool]:
    """Read the corpus, or with ``tokenizer`` the data sets of ``--data-path``.

    Returns:
        The domains, the initial mixture, its weights before normalization, and whether
        these weights are the sizes of the data sets, which Megatron uses if no weights are passed.

    Raises:
        UserError: if a file is missing, damaged or incompatible with the options.
    """
    cache = options.data.object_storage_cache_path
    if options.corpus is not None:
        corpus = Corpus.load(options.corpus)
        mixture = load_mixture(options.mixture, corpus.names, may_change=True)
        data = open_domains(corpus, cache)
        weights = weights_for(data, mixture)
        # Megatron's builder does not blend a single data set, so samples follow the order without
        # weights.
        return data, mixture, weights, len(weights) == 1
    assert tokenizer is not None
    split_range(options.data.split, "train")  # raises if nothing is left to train on
    path = DataPath.read(options.data.data_path, options.data.data_args_path)
    data = open_data_path(path, options.data.split, tokenizer, cache)
    if path.weights is None:  # a domain smaller than a sample would get weight 0
        check_enough_tokens(data, [1.0] * len(data.domains), options.seq_length)
    sizes = [(domain.tokens - 1) // options.seq_length for domain in data.domains]
    weights = [float(weight) for weight in path.weights or sizes]
    check_weights(data, weights)
    total = math.fsum(weights)
    shares = {name: weight / total for name, weight in zip(data.names, weights, strict=True)}
    return data, Mixture(shares, method="data-path"), weights, path.weights is None


def load_mixture(name: str | None, domains: list[str], *, may_change: bool = False) -> Mixture:
    """Load a mixture file; return uniform weights for None or 'uniform'."""
    if name in (None, "uniform"):
        return Mixture.uniform(domains)
    return Mixture.load(Path(str(name)), may_change=may_change)


def weights_for(data: Domains, mixture: Mixture) -> list[float]:
    """Return the weights of ``mixture`` in the order of ``data``; see :class:`Mixture`."""
    return mixture.weights_for(data.names, data.where, [domain.name for domain in data.held_out])


def load_schedule(
    options: PretrainOptions, data: Domains, mixture: Mixture, weights: list[float]
) -> MixtureSchedule:
    """Build the schedule that starts with ``weights``.

    It applies the stages of ``mixture``, or every ``--mixture-change``.

    Raises:
        UserError: if a change is outside the run, if changes overlap, if both the mixture and the
            options have changes, or if the sample order is Megatron's.
    """
    schedule = staged_schedule(options, options.mixture, data, mixture, weights)
    if mixture.stages and options.data.mixture_changes:
        raise UserError(
            f"--mixture-change: the weights of --mixture {options.mixture} change at step "
            f"{mixture.stages[0].step} already; leave out one of the two"
        )
    changes: dict[int, tuple[int, str]] = {}
    for value in options.data.mixture_changes:
        steps, equals, name = value.partition("=")
        first, dots, last = steps.partition("..")
        is_number = first.isdecimal() and (last.isdecimal() or not dots)
        step, end = (int(first), int(last or first)) if is_number else (0, 0)
        if dots and equals and name and not 0 <= step < end <= options.train_iters:
            raise UserError(
                f"--mixture-change {value}: must be FIRST..LAST=MIXTURE with 0 <= FIRST < LAST <= "
                f"{options.train_iters}"
            )
        if not (equals and name and (dots or 0 < step < options.train_iters)):
            raise UserError(
                f"--mixture-change {value}: must be STEP=MIXTURE with a STEP from 1 to "
                f"{options.train_iters - 1}, or FIRST..LAST=MIXTURE"
            )
        if step in changes:
            raise UserError(
                f"--mixture-change {value}: step {step} has two changes; pass only one of them"
            )
        changes[step] = (end, name)
    if not all(options.data.mixture_change):
        raise UserError("--mixture-change has no value: pass STEP=MIXTURE, or leave it out")
    for step, (end, name) in sorted(changes.items()):
        changed = load_mixture(name, data.names)
        if changed.max_repetition and changed.max_repetition != mixture.max_repetition:
            reject_other_limits(options, f"--mixture-change {step}={name}")
        new = weights_for(data, changed)
        begin, stop = step * options.global_batch_size, end * options.global_batch_size
        schedule = schedule.ramp(begin, stop, new) if stop > begin else schedule.changed(begin, new)
    check_ramps(schedule, options.global_batch_size)
    check_changes(schedule, options.data.permutation)
    return schedule


def staged_schedule(
    options: TrainingOptions,
    name: str | None,
    data: Domains,
    mixture: Mixture,
    weights: list[float],
) -> MixtureSchedule:
    """Build the schedule of ``weights`` and the stages of ``mixture``, whose file is ``name``."""
    schedule = MixtureSchedule.fixed(weights)
    for stage in mixture.stages or ():
        new = weights_for(data, mixture.at_step(stage.step))
        schedule = schedule.changed(stage.step * options.global_batch_size, new)
    if mixture.stages and (end := mixture.stages[-1].step) >= options.train_iters:
        warnings.warn(
            f"--mixture {name}: the run ends before its weights change at step {end}",
            MixtureWarning,
            stacklevel=2,
        )
    return schedule


def reject_other_limits(options: PretrainOptions, change: str) -> None:
    """Warn that the ``max_repetition`` of a later mixture is not used.

    Raises:
        UserError: instead, if ``--max-repetition-action`` is to keep the limits.
    """
    problem = f"{change}: its max_repetition is not used: the limits are those of --mixture"
    if options.max_repetition_action != "warn":
        raise UserError(f"{problem}; move the limits to --mixture")
    warnings.warn(problem, MixtureWarning, stacklevel=3)


def planned_epochs(
    options: TrainingOptions, data: Domains, schedule: MixtureSchedule, steps: int | None = None
) -> dict[str, float]:
    """Domain -> target epochs of the first ``steps`` steps (default: all) with ``schedule``."""
    num_steps = options.train_iters if steps is None else steps
    targets = schedule.target_samples(num_steps * options.global_batch_size)
    samples = dict(zip(data.names, targets, strict=True))
    return implied_epochs(data.tokens, samples, options.seq_length)


def limit_repetition(
    options: PretrainOptions | PlanRunOptions,
    data: Domains,
    mixture: Mixture,
    schedule: MixtureSchedule,
) -> tuple[MixtureSchedule, dict[str, float]]:
    """Apply ``--max-repetition-action`` to the schedule of a run.

    With ``redistribute``, ``MAX_SURPLUS`` samples of each limited domain are reserved, since actual
    counts may exceed their targets by as many.

    Returns:
        The schedule, and domain -> planned epochs of the domains whose weights were lowered.

    Raises:
        UserError: if the mixture has no limits; with ``stop``, if the run would exceed one; with
            ``redistribute``, if no weights are within the limits, or weights change gradually.
    """
    action, limits = options.max_repetition_action, mixture.max_repetition or {}
    flag = f"--max-repetition-action {action}"
    if action == "warn":
        return schedule, {}
    if not limits:
        raise UserError(
            f"{flag}: --mixture {options.mixture or 'uniform'} has no max_repetition; add "
            'it to the file, as in {"weights": {...}, "max_repetition": {"NAME": EPOCHS}}, or '
            "leave out the flag"
        )
    planned = planned_epochs(options, data, schedule)
    over = {name: planned[name] / limits[name] for name in limits if name in planned}
    if not over:  # all limits are of domains without weight that the corpus does not have
        return schedule, {}
    worst = max(over, key=lambda name: over[name])
    if action == "stop":
        if over[worst] > 1 + ROUNDING:
            raise UserError(
                f"{flag}: domain '{worst}' would have {planned[worst]:.2f} epochs in "
                f"{options.train_iters:,} steps, but --mixture {options.mixture} limits it to "
                f"{limits[worst]:g} (max_repetition); "
                f"{_most_that_fits(options, data, limits, schedule, over[worst])}, or lower its "
                "weight"
            )
        return schedule, {}
    if any(phase.ramp_samples for phase in schedule.phases):
        raise UserError(
            f"{flag}: cannot limit weights that change linearly (--mixture-change FIRST..LAST=...);"
            " use changes at single steps"
        )
    caps = [
        max(math.floor(limits[name] * tokens / options.seq_length) - MAX_SURPLUS, 0)
        if name in limits
        else math.inf
        for name, tokens in data.tokens.items()
    ]
    for name, cap in zip(data.names, caps, strict=True):
        if cap == 0 < planned[name]:
            warnings.warn(
                f"{flag}: domain '{name}' gets weight 0, since its limit of {limits[name]:g} "
                f"epochs is less than {MAX_SURPLUS + 1} samples of the run",
                MixtureWarning,
                stacklevel=2,
            )
    try:
        limited = schedule.limited(caps, options.train_iters * options.global_batch_size)
    except ValueError as error:
        (first, *others), shorter = schedule.phases, "train fewer steps"
        if options.target_tokens is not None:  # the tokens of the domains are cut in proportion
            shorter = "pass a smaller --target-tokens"
        elif not others:
            samples = sum(cap for cap, weight in zip(caps, first.weights, strict=True) if weight)
            shorter = f"train at most {samples // options.global_batch_size:,} steps"
        raise UserError(
            f"{flag}: within max_repetition of --mixture {options.mixture}, the weighted domains "
            f"have too few tokens for {options.train_iters:,} steps; {shorter}, raise the limits, "
            "or give weight to a domain without a limit in every stage"
        ) from error
    epochs = planned_epochs(options, data, limited)
    return limited, {n: planned[n] for n in data.names if epochs[n] < planned[n] * (1 - ROUNDING)}


def _most_that_fits(
    options: TrainingOptions,
    data: Domains,
    limits: Mapping[str, float],
    schedule: MixtureSchedule,
    excess: float,
) -> str:
    """Describe the longest run within ``limits``; ``excess`` is the largest epochs / limit."""
    if options.target_tokens is not None:  # epochs are proportional to it
        return f"pass --target-tokens {options.target_tokens} / {excess:.2f} or less"

    def exceeds(steps: int) -> bool:
        epochs = planned_epochs(options, data, schedule, steps)
        return any(epochs.get(name, 0.0) > most * (1 + ROUNDING) for name, most in limits.items())

    most = bisect.bisect_left(range(1, options.train_iters + 1), True, key=exceeds)
    return f"at most {most:,} steps fit (--train-iters)" if most else "not even one step fits"


def warn_of_repeats(
    options: TrainingOptions, data: Domains, mixture: Mixture, schedule: MixtureSchedule
) -> None:
    """Warn of every domain that ``schedule`` repeats more often than is useful or permitted.

    The limit is ``max_repetition`` of the mixture, or else ``MANY_EPOCHS``, or
    ``MANY_EPOCHS_OF_SCARCE_TEXT`` if most of the sampled text is abundant.
    """
    epochs, limits = planned_epochs(options, data, schedule), mixture.max_repetition or {}
    sampled = {name: epochs[name] * tokens for name, tokens in data.tokens.items()}
    abundant = sum(tokens for name, tokens in sampled.items() if epochs[name] <= MANY_EPOCHS)
    many, why = MANY_EPOCHS, "repeated text helps less (Muennighoff et al. 2023)"
    if abundant >= ABUNDANT_SHARE * sum(sampled.values()):
        many = MANY_EPOCHS_OF_SCARCE_TEXT
        why = "scarce text helps less, even in a mixture (Sedova et al. 2026)"
    for name, tokens in data.tokens.items():
        if (limit := limits.get(name)) is not None:
            if epochs[name] > limit * (1 + ROUNDING):
                warnings.warn(
                    f"domain '{name}' will be repeated {epochs[name]:.2f} times, but the mixture "
                    f"limits it to {limit:g} (max_repetition): it has only {tokens:,} tokens for "
                    "its weight; lower the weight, train on fewer tokens, or pass "
                    "--max-repetition-action redistribute",
                    MixtureWarning,
                    stacklevel=2,
                )
        elif epochs[name] > many:
            warnings.warn(
                f"domain '{name}' will be repeated {epochs[name]:.1f} times: it has only "
                f"{tokens:,} tokens for its weight; beyond {many:g} epochs, {why}",
                MixtureWarning,
                stacklevel=2,
            )


def check_overwrite(options: PretrainOptions) -> None:
    """Check that ``--overwrite`` does not delete an input of the run.

    Raises:
        UserError: if the run folder contains an input.
    """
    if not options.overwrite:
        return
    data = options.data
    inputs: list[Path | str | None] = [
        options.corpus,
        options.pretrained_checkpoint,
        options.mixture,
        options.reload.reload_mixture,
        data.tokenizer_model,
        data.data_cache_path,
        data.object_storage_cache_path,
        data.data_args_path,
        *(
            DataPath.read(data.data_path, data.data_args_path).prefixes
            if data.uses_data_path
            else ()
        ),
        *(change.partition("=")[2] for change in data.mixture_changes),
    ]
    require_outside(options.run_dir, inputs)


def require_outside(run_dir: Path, paths: Iterable[Path | str | None]) -> None:
    """Raise UserError if one of ``paths`` is in the run folder, which ``--overwrite`` deletes."""
    folder = run_dir.resolve()
    for path in paths:
        if path and not is_remote(path) and Path(path).resolve().is_relative_to(folder):
            raise UserError(
                f"{path} is in {run_dir}, which --overwrite deletes; choose another --run-dir"
            )
