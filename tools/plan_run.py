#!/usr/bin/env python3
"""Run ``megatron-chameleon plan_run`` from a checkout."""

from megatron_chameleon.commands.plan_run import COMMAND

if __name__ == "__main__":
    COMMAND.run()
