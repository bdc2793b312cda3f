#!/usr/bin/env python3
"""Run ``megatron-chameleon train_tokenizer`` from a checkout."""

from megatron_chameleon.commands.train_tokenizer import COMMAND

if __name__ == "__main__":
    COMMAND.run()
