#!/usr/bin/env python3
"""Run ``megatron-chameleon compare_methods`` from a checkout."""

from megatron_chameleon.commands.compare_methods import COMMAND

if __name__ == "__main__":
    COMMAND.run()
