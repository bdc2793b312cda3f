"""Everything a training run starts from, read and checked before anything is written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, Mixture, provenance
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.blend.dataset import check_enough_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.options.training import OptimizerOptions, PretrainOptions


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The options with the artifacts they name."""

    options: PretrainOptions
    corpus: Corpus
    mixture: Mixture
    weights: list[float]
    shape: ModelShape
    provenance: Provenance

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.options.global_batch_size * self.options.seq_length


def plan_training(options: PretrainOptions) -> TrainingPlan:
    """Read what ``options`` name.

    Raises:
        UserError: for anything that would keep the run from starting.
    """
    check_counts(options)
    check_optimizer(options.optimizer, options.train_iters)
    size = model_size(options.model_size)
    check_model_layout(size, options.parallel, options.seq_length)
    corpus = Corpus.load(options.corpus)
    mixture = load_mixture(options.mixture, corpus)
    weights = mixture.weights_for(corpus)
    check_enough_tokens(corpus, weights, options.seq_length)
    return TrainingPlan(
        options=options,
        corpus=corpus,
        mixture=mixture,
        weights=weights,
        shape=ModelShape(size, corpus.tokenizer.vocab_size, options.seq_length),
        provenance=provenance(options, {"corpus": corpus.hash, "mixture": mixture.hash}),
    )


def load_mixture(name: str, corpus: Corpus) -> Mixture:
    """The mixture called ``name``: 'uniform', or a file."""
    return Mixture.uniform(corpus.names) if name == "uniform" else Mixture.load(Path(name))


def check_counts(options: PretrainOptions) -> None:
    """Raises UserError for a count below 1."""
    for field in (
        "seq_length",
        "train_iters",
        "global_batch_size",
        "micro_batch_size",
        "log_interval",
        "save_interval",
    ):
        value = getattr(options, field)
        if value < 1:
            raise UserError(f"--{field.replace('_', '-')} {value}: give a whole number from 1 on")


def check_optimizer(options: OptimizerOptions, train_iters: int) -> None:
    """Raises UserError for values that no schedule can be made of."""
    if not options.lr >= options.min_lr >= 0 or options.lr == 0:
        raise UserError(
            f"--lr {options.lr} --min-lr {options.min_lr}: the peak is above zero and not below "
            "the end of the cosine"
        )
    if not 0 <= options.lr_warmup_iters < train_iters:
        raise UserError(
            f"--lr-warmup-iters {options.lr_warmup_iters} leaves nothing of "
            f"--train-iters {train_iters}; give fewer, or train longer"
        )
