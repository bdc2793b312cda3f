#!/usr/bin/env python3
"""Run ``megatron-chameleon trace_samples`` from a checkout."""

from megatron_chameleon.commands.trace_samples import COMMAND

if __name__ == "__main__":
    COMMAND.run()
