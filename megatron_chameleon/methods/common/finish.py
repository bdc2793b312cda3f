"""The end of a method: its mixture on disk, and what a person is told of it."""

from __future__ import annotations

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.methods.common.table import limit_told, mixture_table
from megatron_chameleon.options.mixture import MethodOptions


def write_and_tell(mixture: Mixture, options: MethodOptions, heading: str, *closing: str) -> None:
    """Write ``mixture`` to ``--output`` and print it, on one rank.

    Args:
        mixture: whole, its cost included.
        options: what was asked for.
        heading: the line above the table: the method and its main settings.
        closing: lines under the table.
    """
    mixture.save(options.output)
    print("\n".join([heading, mixture_table(mixture), *limit_told(mixture), *closing]))
    print(next_step(options))


def next_step(options: MethodOptions) -> str:
    """The last line: what was made, and the command that trains by it."""
    return (
        f"written to {options.output}; next: tools/pretrain_gpt.py --corpus {options.corpus} "
        f"--mixture {options.output} --run-dir ..."
    )
