#!/usr/bin/env python3
"""Run ``megatron-chameleon push`` from a checkout."""

from megatron_chameleon.commands.push import COMMAND

if __name__ == "__main__":
    COMMAND.run()
