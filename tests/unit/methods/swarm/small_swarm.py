"""Options of a swarm whose members are trained within a second."""

from __future__ import annotations

from megatron_chameleon.methods.swarm import SwarmOptions

SWARM = SwarmOptions(
    model="nano",
    train_iters=4,
    seq_length=32,
    global_batch_size=4,
    members_at_once=1,
    lr=1e-2,
    lr_warmup_iters=1,
    eval_tokens=128,
)
