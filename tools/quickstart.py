#!/usr/bin/env python3
"""Run ``megatron-chameleon quickstart`` from a checkout."""

from megatron_chameleon.commands.quickstart import COMMAND

if __name__ == "__main__":
    COMMAND.run()
