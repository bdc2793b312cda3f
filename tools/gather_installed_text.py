#!/usr/bin/env python3
"""Run ``megatron-chameleon gather_installed_text`` from a checkout."""

from megatron_chameleon.commands.gather_installed_text import COMMAND

if __name__ == "__main__":
    COMMAND.run()
