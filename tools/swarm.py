#!/usr/bin/env python3
"""Run ``megatron-chameleon swarm`` from a checkout."""

from megatron_chameleon.commands.swarm import COMMAND

if __name__ == "__main__":
    COMMAND.run()
