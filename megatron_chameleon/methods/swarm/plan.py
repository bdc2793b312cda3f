"""What a swarm is trained by, read and checked before anything is written."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.provenance import plain_options
from megatron_chameleon.blend.token_data import TokenData, check_enough_tokens, corpus_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.options.ranges import check_ranges
from megatron_chameleon.options.swarm import SwarmOptions
from megatron_chameleon.training.plan import check_optimizer

# Of the loss of a guess by no knowledge; beyond it a model is worse than none.
MAX_LOSS_FACTOR = 1.5
SUM_TOLERANCE = 1e-6
# They change how fast results come, and their rounding, but not what they are results of.
FREE_SETTINGS = (
    "micro_batch_size",
    "members_at_once",
    "deterministic",
    "save_interval",
    "log_interval",
    "distributed_timeout_minutes",
    "stopping",
)


@dataclasses.dataclass(frozen=True)
class SwarmPlan:
    """The options with what they are about.

    Attributes:
        options: as they were given.
        corpus: what members are trained on and measured on.
        data: its training tokens.
        mixtures: [n, k] float64; member i draws by row i.
        shape: of each member.
    """

    options: SwarmOptions
    corpus: Corpus
    data: TokenData
    mixtures: Array
    shape: ModelShape

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one member's global batch."""
        return self.options.global_batch_size * self.options.seq_length

    @property
    def max_loss(self) -> float:
        """Held-out loss above which a member counts as diverged."""
        given = self.options.max_loss
        return MAX_LOSS_FACTOR * math.log(self.shape.vocab_size) if given is None else given

    def member_seed(self, member: int) -> int:
        """Of a member's initial weights and samples."""
        return member_seed(self.options.seed, member)

    def settings(self) -> dict[str, Any]:
        """The options that decide the results."""
        options = plain_options(self.options)
        return {name: value for name, value in options.items() if name not in FREE_SETTINGS}


def member_seed(seed: int, member: int) -> int:
    """A seed, from 0 to 2**32 - 1, for member number ``member`` of the swarm of ``seed``."""
    digest = hashlib.sha256(f"{seed}/member/{member}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def plan_swarm(options: SwarmOptions, corpus: Corpus, mixtures: Array) -> SwarmPlan:
    """Check ``options`` and ``mixtures`` [n, k].

    Raises:
        UserError: for the first mistake found.
    """
    check_options(options)
    data = corpus_tokens(corpus)
    checked = _checked_mixtures(mixtures, corpus)
    check_enough_tokens(data, checked.max(axis=0).tolist(), options.seq_length)
    size = model_size(options.model_size)
    shape = ModelShape(size, data.tokenizer.vocab_size, options.seq_length)
    return SwarmPlan(options, corpus, data, checked, shape)


def check_options(options: SwarmOptions) -> None:
    """Raises UserError for a value that no swarm can be trained by."""
    check_ranges(options)
    model_size(options.model_size)
    check_optimizer(options.optimizer, options.train_iters)
    if options.eval_tokens < options.seq_length:
        raise UserError(
            f"--eval-tokens {options.eval_tokens} is less than one window of --seq-length "
            f"{options.seq_length}; give more"
        )
    if options.micro_batch_size and options.global_batch_size % options.micro_batch_size:
        raise UserError(
            f"--micro-batch-size {options.micro_batch_size} does not divide --global-batch-size "
            f"{options.global_batch_size}; give one that does, or leave it out"
        )


def _checked_mixtures(mixtures: Array, corpus: Corpus) -> Array:
    """``mixtures`` in float64.

    Raises:
        UserError: unless each row has a share of every domain and they sum to 1.
    """
    found = np.asarray(mixtures, np.float64)
    domains = len(corpus.names)
    if found.ndim != 2 or not len(found) or found.shape[1] != domains:
        raise UserError(
            f"mixtures of shape {list(found.shape)} for the {domains} domains of {corpus.root}: "
            f"give one row for each member, at least one, with {domains} weights"
        )
    fine = np.isfinite(found).all(1) & (found >= 0).all(1)
    bad = np.flatnonzero(~fine | ~(np.abs(found.sum(1) - 1) <= SUM_TOLERANCE))
    if len(bad):
        raise UserError(
            f"mixture {bad[0]} is {found[bad[0]].tolist()}; give weights that are not negative "
            "and sum to 1"
        )
    return found
