"""The swarm that the tests with ranks train."""

from __future__ import annotations

import numpy as np

from megatron_chameleon.options.swarm import SwarmOptions

MIXTURES = np.random.default_rng(0).dirichlet([1.0] * 3, size=5)


def swarm_options() -> SwarmOptions:
    """Five members, two at once, of forty steps."""
    return SwarmOptions(
        model_size="nano",
        train_iters=40,
        seq_length=32,
        global_batch_size=8,
        micro_batch_size=4,
        members_at_once=2,
        lr=5e-3,
        lr_warmup_iters=2,
        eval_tokens=640,
        save_interval=10,
        log_interval=5,
    )
