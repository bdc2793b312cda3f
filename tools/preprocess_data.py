#!/usr/bin/env python3
"""Run ``megatron-chameleon preprocess_data`` from a checkout."""

from megatron_chameleon.commands.preprocess_data import COMMAND

if __name__ == "__main__":
    COMMAND.run()
