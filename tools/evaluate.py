#!/usr/bin/env python3
"""Evaluate checkpoints: torchrun --nproc-per-node N tools/evaluate.py perplexity ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_subcommand
from megatron_chameleon.options.evaluation import PerplexityToolOptions


def perplexity(options: PerplexityToolOptions) -> None:
    """Write per-domain held-out perplexity."""
    evaluations = options.one_by_one()
    from megatron_chameleon.evaluation.perplexity import evaluate_perplexities

    evaluate_perplexities(evaluations)


if __name__ == "__main__":
    run_subcommand({"perplexity": (perplexity, PerplexityToolOptions)})
