#!/usr/bin/env python3
"""Run ``megatron-chameleon export_mixture`` from a checkout."""

from megatron_chameleon.commands.export_mixture import COMMAND

if __name__ == "__main__":
    COMMAND.run()
