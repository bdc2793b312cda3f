#!/usr/bin/env python3
"""Run ``megatron-chameleon import_corpus`` from a checkout."""

from megatron_chameleon.commands.import_corpus import COMMAND

if __name__ == "__main__":
    COMMAND.run()
