"""Everything a training run starts from, read and checked before anything is written."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, Mixture, MixtureWarning, implied_epochs, provenance
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.blend.data_path import DataPath, data_path_tokens
from megatron_chameleon.blend.schedule import MixtureSchedule, check_changes
from megatron_chameleon.blend.token_data import (
    TokenData,
    check_enough_tokens,
    check_weights,
    corpus_tokens,
)
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.compiled_layers import check_compile
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import DEFAULT_SIZE, ModelShape, model_size, name_of
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.pretrained import Pretrained, find_pretrained

# Beyond about four epochs, more passes over the same text teach less and less: Muennighoff et al.
# 2023, "Scaling Data-Constrained Language Models".
MANY_EPOCHS = 4.0


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The options with the artifacts they name.

    Attributes:
        options: what was asked for; ``model_size`` names the size wherever it came from, and is
            None where that has no name.
        data: where the tokens are.
        mixture: what the run begins with.
        schedule: the weights of every sample, in the order of ``data.names``.
        by_size: whether the weights are sizes of data sets that were given without weights.
        pretrained: the weights that the run starts from; None starts from random ones.
        shape: of the model.
        provenance: of the run.
    """

    options: PretrainOptions
    data: TokenData
    mixture: Mixture
    schedule: MixtureSchedule
    by_size: bool
    pretrained: Pretrained | None
    shape: ModelShape
    provenance: Provenance

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.options.global_batch_size * self.options.seq_length

    @property
    def num_samples(self) -> int:
        """Samples of the whole run."""
        return self.options.train_iters * self.options.global_batch_size


def plan_training(options: PretrainOptions) -> TrainingPlan:
    """Read what ``options`` name.

    Raises:
        UserError: for anything that would keep the run from starting.
    """
    check_overwrite(options)
    if options.model_size is not None:
        model_size(options.model_size)  # refuses a wrong name before anything is read
    if options.compile_layers:
        check_compile(options.parallel)
    loaded = load_data(options)
    data = loaded.data
    schedule = load_schedule(options, data, loaded.weights)
    for phase in schedule.phases:
        check_enough_tokens(data, phase.weights, options.seq_length)
    pretrained = find_pretrained(options, data)
    shape = pretrained.shape if pretrained else _shape_by_name(options, data)
    check_model_layout(shape.size, options.parallel, options.seq_length)
    # By name where it has one, so that records agree whether the name was given or not.
    options = dataclasses.replace(options, model_size=name_of(shape.size))
    inputs = {"corpus": data.hash, "mixture": loaded.mixture.hash}
    return TrainingPlan(
        options=options,
        data=data,
        mixture=loaded.mixture,
        schedule=schedule,
        by_size=loaded.by_size,
        pretrained=pretrained,
        shape=shape,
        provenance=provenance(options, inputs | (pretrained.inputs() if pretrained else {})),
    )


def _shape_by_name(options: PretrainOptions, data: TokenData) -> ModelShape:
    """The shape of a model that starts from random weights."""
    size = model_size(options.model_size or DEFAULT_SIZE)
    return ModelShape(size, data.tokenizer.vocab_size, options.seq_length)


@dataclasses.dataclass(frozen=True)
class LoadedData:
    """Where the tokens are, and what the run begins to draw them by.

    ``weights`` are as they were given: scaling them to sum to 1 is for the blend to do, as Megatron
    does it. ``by_size`` says that they are sizes, as Megatron takes them where none are given.
    """

    data: TokenData
    mixture: Mixture
    weights: list[float]
    by_size: bool


def load_data(options: PretrainOptions) -> LoadedData:
    """Read the corpus, or what --data-path names.

    Raises:
        UserError: unless it is whole.
    """
    if options.corpus is not None:
        return _load_corpus(options, options.corpus)
    assert options.data.data_path is not None
    return _load_data_path(options, DataPath.parse(options.data.data_path))


def _load_corpus(options: PretrainOptions, folder: Path) -> LoadedData:
    corpus = Corpus.load(folder)
    mixture = load_mixture(options.mixture, corpus.names)
    weights = mixture.weights_for(corpus.names, str(folder))
    # Megatron's builder takes a data set that comes alone as it is.
    return LoadedData(corpus_tokens(corpus), mixture, weights, by_size=len(weights) == 1)


def _load_data_path(options: PretrainOptions, path: DataPath) -> LoadedData:
    assert options.data.tokenizer_model is not None
    tokenizer = load_tokenizer(
        options.data.tokenizer_model, options.data.eod_token, options.data.tiktoken_pattern
    )
    data = data_path_tokens(path, options.data.split, tokenizer.identity)
    if path.weights is None:  # a size of 0 is not for the user to have meant
        check_enough_tokens(data, [1.0] * len(data.domains), options.seq_length)
    sizes = [(domain.tokens - 1) // options.seq_length for domain in data.domains]
    weights = [float(weight) for weight in path.weights or sizes]
    check_weights(data, weights)
    total = math.fsum(weights)
    shares = {name: weight / total for name, weight in zip(data.names, weights, strict=True)}
    mixture = Mixture(shares, method="data-path")
    return LoadedData(data, mixture, weights, by_size=path.weights is None)


def load_mixture(name: str | None, domains: list[str]) -> Mixture:
    """The mixture called ``name``: 'uniform' or nothing, or a file."""
    return Mixture.uniform(domains) if name in (None, "uniform") else Mixture.load(Path(str(name)))


def load_schedule(
    options: PretrainOptions, data: TokenData, weights: list[float]
) -> MixtureSchedule:
    """``weights`` from the first sample on, and what --mixture-change asks for after it.

    Raises:
        UserError: for a change at no step of the run, two at one, or in Megatron's order.
    """
    if not all(options.data.mixture_change):
        raise UserError("--mixture-change: give STEP=MIXTURE, or leave it out")
    changes: dict[int, str] = {}
    for given in options.data.mixture_changes:
        step, name = _change(given, options.train_iters)
        if step in changes:
            raise UserError(f"--mixture-change {given}: there are two for step {step}; give one")
        changes[step] = name
    schedule = MixtureSchedule.fixed(weights)
    for step, name in sorted(changes.items()):
        new = load_mixture(name, data.names).weights_for(data.names, data.where)
        schedule = schedule.changed(step * options.global_batch_size, new)
    check_changes(schedule, options.data.permutation)
    return schedule


def _change(given: str, train_iters: int) -> tuple[int, str]:
    step, equals, name = given.partition("=")
    if not (equals and name and step.isdecimal() and 0 < int(step) < train_iters):
        raise UserError(
            f"--mixture-change {given}: give STEP=MIXTURE, STEP from 1 to {train_iters - 1}"
        )
    return int(step), name


def warn_of_repeats(plan: TrainingPlan, schedule: MixtureSchedule) -> None:
    """Warn of every domain that the run, drawn by ``schedule``, repeats over MANY_EPOCHS times."""
    epochs = planned_epochs(plan.data, schedule, plan.num_samples, plan.options.seq_length)
    for name, tokens in plan.data.tokens.items():
        if epochs[name] > MANY_EPOCHS:
            warnings.warn(
                f"domain '{name}' will be repeated {epochs[name]:.1f} times: its {tokens:,} tokens "
                f"are few for its weight; more than {MANY_EPOCHS:g} passes teach little",
                MixtureWarning,
                stacklevel=2,
            )


def check_overwrite(options: PretrainOptions) -> None:
    """Raises UserError if --overwrite would delete what the run is to read."""
    if not options.overwrite:
        return
    data = options.data
    read: dict[str, Sequence[Path | str | None]] = {
        "--corpus": [options.corpus],
        "--pretrained-checkpoint": [options.pretrained_checkpoint],
        "--mixture": [options.mixture],
        "--tokenizer-model": [data.tokenizer_model],
        "--data-cache-path": [data.data_cache_path],
        "--data-path": DataPath.parse(data.data_path).prefixes if data.data_path else [],
        "--mixture-change": [change.partition("=")[2] for change in data.mixture_changes],
    }
    folder = options.run_dir.resolve()
    for flag, paths in read.items():
        for path in paths:
            if path and Path(path).resolve().is_relative_to(folder):
                raise UserError(
                    f"{flag} {path} lies in {options.run_dir}, which --overwrite deletes; choose "
                    "another --run-dir"
                )


def planned_epochs(
    data: TokenData, schedule: MixtureSchedule, num_samples: int, seq_length: int
) -> dict[str, float]:
    """Domain -> passes over its tokens that the whole run asks for."""
    asked = schedule.target_samples(num_samples)
    shares = {name: n / num_samples for name, n in zip(data.names, asked, strict=True)}
    return implied_epochs(data.tokens, shares, num_samples * seq_length)
