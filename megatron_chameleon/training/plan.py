"""Everything a training run starts from, read and checked before anything is written."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, Mixture, provenance
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.blend.dataset import check_enough_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.options.training import OptimizerOptions, PretrainOptions

LARGEST_SEED = 2**32 - 1  # numpy's RandomState, by which megatron orders samples, takes no more


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
    """Raises UserError for a count below 1, or a seed that no generator takes."""
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
    if not 0 <= options.seed <= LARGEST_SEED:
        raise UserError(f"--seed {options.seed}: give a whole number from 0 to {LARGEST_SEED}")


def check_optimizer(options: OptimizerOptions, train_iters: int) -> None:
    """Raises UserError for values that no schedule can be made of."""
    if not math.inf > options.lr >= options.min_lr >= 0 or options.lr == 0:
        raise UserError(
            f"--lr {options.lr} --min-lr {options.min_lr}: give finite rates, the peak above zero "
            "and not below the end of the cosine"
        )
    if not 0 <= options.lr_warmup_iters < train_iters:
        raise UserError(
            f"--lr-warmup-iters {options.lr_warmup_iters} leaves nothing of "
            f"--train-iters {train_iters}; give fewer, or train longer"
        )
    for field in ("adam_beta1", "adam_beta2"):
        value = getattr(options, field)
        if not 0 <= value < 1:
            raise UserError(f"--{field.replace('_', '-')} {value}: it lies from 0 on and below 1")
    for field in ("weight_decay", "adam_eps", "clip_grad"):
        value = getattr(options, field)
        if not 0 <= value < math.inf:
            raise UserError(f"--{field.replace('_', '-')} {value}: give a number from 0 on")
