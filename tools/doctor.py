#!/usr/bin/env python3
"""Run ``megatron-chameleon doctor`` from a checkout."""

from megatron_chameleon.commands.doctor import COMMAND

if __name__ == "__main__":
    COMMAND.run()
