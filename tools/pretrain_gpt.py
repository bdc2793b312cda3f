#!/usr/bin/env python3
"""Train a GPT on a mixture of domains: torchrun --nproc-per-node N tools/pretrain_gpt.py ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_tool
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.stopping import StopRequests


def main(options: PretrainOptions) -> None:
    """Train, or go on training."""
    # Before torch is imported, and never given back: a signal may come, or come again, at any time.
    stops = StopRequests(options.stopping)
    stops.take_signals()
    # Not at the top: --help should not wait for torch.
    from megatron_chameleon.training.pretrain import pretrain

    if options.online.online_interval is None:
        pretrain(options, stops=stops)
        return
    from megatron_chameleon.methods.leverage.online import OnlineChameleon

    pretrain(options, watched_by=OnlineChameleon, stops=stops)


if __name__ == "__main__":
    run_tool(main, PretrainOptions, prints_log=True)
