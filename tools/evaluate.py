#!/usr/bin/env python3
"""Evaluate checkpoints: torchrun --nproc-per-node N tools/evaluate.py perplexity|downstream ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_subcommand
from megatron_chameleon.options.downstream import DownstreamOptions
from megatron_chameleon.options.evaluation import PerplexityToolOptions


def perplexity(options: PerplexityToolOptions) -> None:
    """Write per-domain held-out perplexity."""
    evaluations = options.one_by_one()
    from megatron_chameleon.evaluation.perplexity import evaluate_perplexities

    evaluate_perplexities(evaluations)


def downstream(options: DownstreamOptions) -> None:
    """Write accuracy on downstream tasks."""
    from megatron_chameleon.evaluation.downstream.installed import require_harness

    require_harness()
    from megatron_chameleon.evaluation.downstream.evaluate import evaluate_downstream

    evaluate_downstream(options)


if __name__ == "__main__":
    run_subcommand(
        {
            "perplexity": (perplexity, PerplexityToolOptions),
            "downstream": (downstream, DownstreamOptions),
        }
    )
