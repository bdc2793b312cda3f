#!/usr/bin/env python3
"""Run ``megatron-chameleon compute_mixture`` from a checkout."""

from megatron_chameleon.commands.compute_mixture import COMMAND

if __name__ == "__main__":
    COMMAND.run()
