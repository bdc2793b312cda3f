#!/usr/bin/env python3
"""Run ``megatron-chameleon completion`` from a checkout."""

from megatron_chameleon.commands.completion import COMMAND

if __name__ == "__main__":
    COMMAND.run()
