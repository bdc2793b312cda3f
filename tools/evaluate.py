#!/usr/bin/env python3
"""Run ``megatron-chameleon evaluate`` from a checkout."""

from megatron_chameleon.commands.evaluate import COMMAND

if __name__ == "__main__":
    COMMAND.run()
