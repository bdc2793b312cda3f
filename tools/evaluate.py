#!/usr/bin/env python3
"""Evaluate checkpoints: torchrun --nproc-per-node N tools/evaluate.py perplexity|downstream ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_subcommand
from megatron_chameleon.evaluation.options import DownstreamOptions, PerplexityToolOptions


def perplexity(options: PerplexityToolOptions) -> None:
    """Evaluate held-out perplexity per domain and write the results."""
    evaluations = options.one_by_one()
    from megatron_chameleon.evaluation.perplexity import evaluate_perplexities

    evaluate_perplexities(evaluations)


def downstream(options: DownstreamOptions) -> None:
    """Evaluate accuracy on downstream tasks and write the results."""
    from megatron_chameleon.evaluation.downstream import evaluate_downstream

    evaluate_downstream(options)


if __name__ == "__main__":
    run_subcommand(
        {
            "perplexity": (perplexity, PerplexityToolOptions),
            "downstream": (downstream, DownstreamOptions),
        }
    )
