#!/usr/bin/env python3
"""Run ``megatron-chameleon pretrain_gpt`` from a checkout."""

from megatron_chameleon.commands.pretrain_gpt import COMMAND

if __name__ == "__main__":
    COMMAND.run()
