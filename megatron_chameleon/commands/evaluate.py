"""Evaluate checkpoints: held-out perplexity per domain, or downstream tasks.

N ranks: ``torchrun --nproc-per-node N -m megatron_chameleon evaluate perplexity|downstream ...``.
"""

from __future__ import annotations

from megatron_chameleon.cli import Subcommands, Tool
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


COMMAND = Subcommands(
    {
        "perplexity": Tool(perplexity, PerplexityToolOptions),
        "downstream": Tool(downstream, DownstreamOptions),
    }
)
