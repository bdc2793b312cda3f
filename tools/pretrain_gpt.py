#!/usr/bin/env python3
"""Train a GPT on a mixture of domains: torchrun --nproc-per-node N tools/pretrain_gpt.py ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.training import PretrainOptions


def main(options: PretrainOptions) -> None:
    """Train, or go on training."""
    # Not at the top: saving a checkpoint starts a process that imports this file again, and --help
    # should not wait for torch.
    from megatron_chameleon.training.loop import pretrain

    pretrain(options)


if __name__ == "__main__":
    run_tool(main, PretrainOptions)
