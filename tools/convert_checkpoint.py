#!/usr/bin/env python3
"""Run ``megatron-chameleon convert_checkpoint`` from a checkout."""

from megatron_chameleon.commands.convert_checkpoint import COMMAND

if __name__ == "__main__":
    COMMAND.run()
