"""Generate a swarm of mixtures, train its members anywhere, and collect their losses for a fit.

N ranks: ``torchrun --nproc-per-node N -m megatron_chameleon swarm run ...``.
"""

from __future__ import annotations

from megatron_chameleon.cli import Subcommands, Tool
from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.swarm import CollectOptions, GenerateOptions, RunOptions


def generate(options: GenerateOptions) -> None:
    """Write a folder for each member, with its mixture."""
    from megatron_chameleon.methods.swarm.any_trainer import generate_swarm

    generate_swarm(options)


def run(options: RunOptions) -> int:
    """Train members that are not finished."""
    from megatron_chameleon.methods.swarm.train import run_members

    return 0 if run_members(options) else STOPPED_STATUS


def collect(options: CollectOptions) -> None:
    """Write tables of mixtures and losses."""
    from megatron_chameleon.methods.swarm.any_trainer import collect_swarm

    collect_swarm(options)


COMMAND = Subcommands(
    {
        "generate": Tool(generate, GenerateOptions),
        "run": Tool(run, RunOptions),
        "collect": Tool(collect, CollectOptions),
    }
)
