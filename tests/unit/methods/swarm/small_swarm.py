"""Options of a swarm and of a proxy that are trained within seconds."""

from __future__ import annotations

from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.swarm import SwarmOptions
from megatron_chameleon.training.options import OptimizerOptions

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
PROXY = ProxyOptions(
    model="nano",
    train_iters=4,
    seq_length=32,
    global_batch_size=4,
    micro_batch_size=4,
    optimizer=OptimizerOptions(lr=1e-2, lr_warmup_iters=1),
)
