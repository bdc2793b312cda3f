#!/usr/bin/env python3
"""Run ``megatron-chameleon convert_mixture`` from a checkout."""

from megatron_chameleon.commands.convert_mixture import COMMAND

if __name__ == "__main__":
    COMMAND.run()
