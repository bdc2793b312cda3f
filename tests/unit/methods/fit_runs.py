"""Runs with known losses, and small swarms, for the tests of RegMix and Data Mixing Laws."""

from __future__ import annotations

import numpy as np

from megatron_chameleon.artifacts import Cost
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.methods.swarm.options import SwarmOptions
from tests.small_corpus import DOMAINS

SWARM = SwarmOptions(
    model_size="nano",
    train_iters=4,
    seq_length=32,
    global_batch_size=4,
    lr=1e-2,
    lr_warmup_iters=1,
    eval_tokens=128,
)
"""A second per member."""


def sampled_runs(losses_of, count, domains=DOMAINS) -> MixtureRuns:
    """``count`` runs on mixtures [n, 3] with losses [n, 3] ``losses_of(mixtures)``."""
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), count)
    keys = [str(number) for number in range(count)]
    return MixtureRuns(keys, list(domains), mixtures, list(domains), losses_of(mixtures))


def make_options(options_type, corpus, folder, runs, settings):
    """Options to fit ``runs``, whose tables are written to ``folder``; to train a swarm if None."""
    own = {"corpus": corpus.root, "output": folder / "out" / "mixture.json"}
    if runs is not None:
        tables = {"ratios": folder / "ratios.csv", "metrics": folder / "metrics.csv"}
        write_mixture_runs(runs, **tables)
        own |= tables
    elif "ratios" not in settings:
        own["swarm"] = SWARM
    return options_type(**{**own, **settings})


def swarm_result(diverged=()) -> SwarmResult:
    """Twenty members, measured twice."""
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), 20)
    losses = np.repeat(2 + mixtures[:, None], 2, axis=1)
    losses[list(diverged)] = np.nan
    return SwarmResult(
        list(DOMAINS), mixtures, [5, 10], losses, list(diverged), Cost(1e9, 2.0, 1.0, 2)
    )
