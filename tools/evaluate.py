#!/usr/bin/env python3
"""Evaluate a checkpoint: torchrun --nproc-per-node N tools/evaluate.py perplexity ..."""

from __future__ import annotations

from megatron_chameleon.cli import run_subcommand
from megatron_chameleon.options.evaluation import PerplexityOptions


def perplexity(options: PerplexityOptions) -> None:
    """Write per-domain held-out perplexity."""
    from megatron_chameleon.evaluation.perplexity import evaluate_perplexity

    evaluate_perplexity(options)


if __name__ == "__main__":
    run_subcommand({"perplexity": (perplexity, PerplexityOptions)})
