#!/usr/bin/env python3
"""Train a GPT on a mixture of domains: torchrun --nproc-per-node N tools/pretrain_gpt.py ..."""

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.loop import pretrain

if __name__ == "__main__":
    run_tool(pretrain, PretrainOptions)
