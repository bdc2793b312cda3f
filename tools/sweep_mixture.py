#!/usr/bin/env python3
"""Run ``megatron-chameleon sweep_mixture`` from a checkout."""

from megatron_chameleon.commands.sweep_mixture import COMMAND

if __name__ == "__main__":
    COMMAND.run()
