#!/usr/bin/env python3
"""Run ``megatron-chameleon make_report`` from a checkout."""

from megatron_chameleon.commands.make_report import COMMAND

if __name__ == "__main__":
    COMMAND.run()
