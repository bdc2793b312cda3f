"""How many members fit on a device at once, and how many of their sequences in a pass."""

from __future__ import annotations

import dataclasses
import math
import os

import psutil
import torch

from megatron_chameleon.methods.swarm.head import PIECE_ON_CPU, PIECE_ON_GPU
from megatron_chameleon.methods.swarm.plan import SwarmPlan
from megatron_chameleon.methods.swarm.stacked_gpt import parameter_shapes
from megatron_chameleon.model.sizes import ModelShape

# Left for what is not counted: workspaces, fragments, what others on the machine do.
USED_SHARE = 0.8
# Tokens of a pass, over its members: enough to fill the device. More members than that would only
# make checkpoints larger, and more sequences the activations.
TOKENS_ON_CPU, TOKENS_ON_GPU = 1 << 12, 1 << 16
FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2


@dataclasses.dataclass(frozen=True)
class PassSize:
    """What is computed at once.

    Attributes:
        members: models in the stack, at most (E).
        micro_batch_size: sequences of each (b).
    """

    members: int
    micro_batch_size: int


def state_bytes(shape: ModelShape, *, bf16: bool) -> int:
    """Of one member: weights, gradients and both moments in float32, and copies in bfloat16."""
    count = sum(math.prod(sizes) for sizes in parameter_shapes(shape).values())
    return count * (4 * FLOAT32_BYTES + (BFLOAT16_BYTES if bf16 else 0))


def kept_elements(shape: ModelShape) -> int:
    """Elements that a pass keeps of each token for its backward pass.

    Of a layer: inputs, normed values and outputs of two norms (6h); queries, keys, values and
    context (4h, and 1h where it is copied); the MLP's inner values before and after GELU (2f). Of
    the final norm 3h.
    """
    h, f = shape.size.hidden_size, shape.size.ffn_hidden_size
    return shape.size.num_layers * (11 * h + 2 * f) + 3 * h


def token_bytes(shape: ModelShape, *, bf16: bool) -> int:
    """Of one token of a pass: what is kept, and gradients on their way through a layer."""
    h, f = shape.size.hidden_size, shape.size.ffn_hidden_size
    on_the_way = 8 * h + 2 * f
    element = BFLOAT16_BYTES if bf16 else FLOAT32_BYTES
    return element * (kept_elements(shape) + on_the_way) + FLOAT32_BYTES * h


def available_bytes(device: torch.device) -> int:
    """Memory that a process of this machine can count on now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(psutil.virtual_memory().available) // ranks_here


def pass_size(plan: SwarmPlan, available: int, *, on_gpu: bool) -> PassSize:
    """What was asked for; where nothing was, what ``available`` bytes allow and the device needs.

    Args:
        plan: of the swarm.
        available: bytes of a rank's device.
        on_gpu: whether that is a GPU.
    """
    options, shape, bf16 = plan.options, plan.shape, plan.options.bf16
    piece = PIECE_ON_GPU if on_gpu else PIECE_ON_CPU
    room = USED_SHARE * available - FLOAT32_BYTES * piece
    of_member, of_token = state_bytes(shape, bf16=bf16), token_bytes(shape, bf16=bf16)
    of_sequence = options.seq_length * of_token
    enough = (TOKENS_ON_GPU if on_gpu else TOKENS_ON_CPU) // options.seq_length
    members = options.members_at_once
    if members is None:
        of_least = of_member + (options.micro_batch_size or 1) * of_sequence
        members = max(1, min(int(room // of_least), enough, len(plan.mixtures)))
    if options.micro_batch_size is not None:
        return PassSize(members, options.micro_batch_size)
    fitting = int((room - members * of_member) // (members * of_sequence))
    most = max(1, min(fitting, enough // members))
    return PassSize(members, largest_divisor(options.global_batch_size, most))


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is not above ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
