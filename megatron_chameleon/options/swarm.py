"""How a swarm of small proxies is trained, one for each of many mixtures."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megatron_chameleon.options.data import Permutation
from megatron_chameleon.options.ranges import (
    BatchSize,
    BelowOne,
    Count,
    LargeCount,
    Minutes,
    NonNegative,
    Positive,
    Seed,
)
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.training import OptimizerOptions

LrDecayStyle = Literal["constant", "cosine"]


@dataclasses.dataclass(frozen=True)
class SwarmOptions:
    """How a swarm is trained: many small proxies at once in each process, one for each mixture.

    All members have the same settings; they differ in their mixture, their initial weights and the
    order of their samples. torchrun's ranks share the members.
    """

    model_size: str = "1m"
    """Name of the model size of a member (RegMix: 1m); a wrong one lists them all."""
    train_iters: Count = 1000
    """Optimizer steps of each member (RegMix: 1000)."""
    seq_length: Count = 2048
    """Tokens per sample (RegMix: 2048)."""
    global_batch_size: BatchSize = 512
    """Sequences per step and member (RegMix: 512)."""
    micro_batch_size: BatchSize | None = None
    """Sequences of one member in a forward pass; unless given, as many as memory allows. Must
    divide --global-batch-size."""
    members_at_once: Count | None = None
    """Members trained together by a process, at most; as many as memory allows unless given."""
    seed: Seed = 1234
    """Of initial weights and orders of samples; each member has its own, by its number."""
    permutation: Permutation = "feistel"
    """What orders a domain's samples, as in tools/pretrain_gpt.py; feistel needs no memory, however
    many members there are."""
    bf16: bool = False
    """Compute in bfloat16, with fp32 main weights and gradient accumulation."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time, also on a GPU, where some are slower;
    on the CPU all are such."""
    lr: Positive = 4e-4
    """Peak learning rate (RegMix: 4e-4)."""
    min_lr: NonNegative = 4e-5
    """Learning rate at the end of the cosine, where --lr-decay-style is that (assumed: a tenth)."""
    lr_decay_style: LrDecayStyle = "constant"
    """After the warm-up: 'constant' (RegMix), or a 'cosine' to --min-lr at the last step."""
    lr_warmup_iters: int = 100
    """Steps of linear warm-up (RegMix: 100)."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, on matrices only (assumed)."""
    adam_beta1: BelowOne = 0.9
    """First-moment decay (assumed)."""
    adam_beta2: BelowOne = 0.95
    """Second-moment decay (assumed)."""
    adam_eps: NonNegative = 1e-8
    """Added to the denominator of the update."""
    clip_grad: NonNegative = 1.0
    """Largest gradient norm of each member; 0 clips nothing (assumed)."""
    eval_interval: int = 0
    """Steps between two measurements of the held-out losses; 0 measures at the last step alone,
    which always is measured."""
    eval_tokens: LargeCount = 131072
    """Held-out tokens per domain that a measurement predicts, at most, in windows spread over the
    valid split."""
    save_interval: int = 100
    """Steps between two checkpoints of the members in flight, from which a swarm that was killed
    goes on; 0 writes none but where it is asked to stop."""
    log_interval: Count = 10
    """Steps between two looks at the training losses: members that diverged are then left out."""
    max_loss: Positive | None = None
    """A member has also diverged when its held-out loss, weighted by its own mixture, is above this
    (nats per token); unless given, 1.5 times that of a guess by no knowledge, ln(vocabulary)."""
    distributed_timeout_minutes: Minutes = 600
    """Minutes that ranks wait at the end for one that is behind, before they give up."""
    stopping: StoppingOptions = dataclasses.field(default_factory=StoppingOptions)

    @property
    def optimizer(self) -> OptimizerOptions:
        """What each member is updated by, in the terms of a run by itself."""
        constant = self.lr_decay_style == "constant"
        return OptimizerOptions(
            lr=self.lr,
            min_lr=self.lr if constant else self.min_lr,  # a cosine between equals
            lr_warmup_iters=self.lr_warmup_iters,
            weight_decay=self.weight_decay,
            adam_beta1=self.adam_beta1,
            adam_beta2=self.adam_beta2,
            adam_eps=self.adam_eps,
            clip_grad=self.clip_grad,
        )
