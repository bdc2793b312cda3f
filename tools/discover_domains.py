#!/usr/bin/env python3
"""Run ``megatron-chameleon discover_domains`` from a checkout."""

from megatron_chameleon.commands.discover_domains import COMMAND

if __name__ == "__main__":
    COMMAND.run()
