"""What the tests of RegMix and Data Mixing Laws share: small swarms, runs of known losses."""

from __future__ import annotations

import numpy as np

from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.options.swarm import SwarmOptions
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
"""Seconds for a dozen members."""


def drawn_runs(losses_of, count, domains=DOMAINS) -> MixtureRuns:
    """``count`` runs on mixtures [n, 3], with the losses [n, 3] that ``losses_of`` gives them."""
    mixtures = np.random.default_rng(0).dirichlet(np.ones(3), count)
    keys = [str(number) for number in range(count)]
    return MixtureRuns(keys, list(domains), mixtures, list(domains), losses_of(mixtures))


def make_options(options_type, corpus, folder, given, settings):
    """Options to fit the runs ``given``, whose tables are written to ``folder``.

    Without any, and without tables in ``settings``, they are to train a swarm.
    """
    own = {"corpus": corpus.root, "output": folder / "out" / "mixture.json"}
    if given is not None:
        tables = {"ratios": folder / "ratios.csv", "metrics": folder / "metrics.csv"}
        write_mixture_runs(given, **tables)
        own |= tables
    elif "ratios" not in settings:
        own["swarm"] = SWARM
    return options_type(**{**own, **settings})
