#!/usr/bin/env python3
"""Run ``megatron-chameleon estimate_memory`` from a checkout."""

from megatron_chameleon.commands.estimate_memory import COMMAND

if __name__ == "__main__":
    COMMAND.run()
