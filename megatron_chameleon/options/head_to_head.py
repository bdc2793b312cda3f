"""Options of tools/compare_methods.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.ranges import NonNegative, Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareMethodsOptions:
    """One table of what each method's mixture costs and of the base models trained by it.

    examples/compare_methods.sh makes what is compared, and then calls this tool.
    """

    run: Path
    """The run folder, with 1-corpus to 6-evaluation below it."""
    mixtures: tuple[str, ...]
    """Names of the mixtures, as in 4-mixture; the columns of the table, in this order."""
    seeds: tuple[Seed, ...]
    """Seeds of the base models; at least three, the same ones for every mixture."""
    run_suffix: str = ""
    """What stands between the mixture's name and -seedN in the names of the base runs."""
    baseline: str = "uniform"
    """The mixture that the others' perplexities are compared with."""
    reference: str | None = None
    """The mixture that the others' costs are set in relation to; Chameleon's, where it takes part,
    unless given."""
    name: str = "compare_methods"
    """What the files in 7-report are called, before .txt, .md, .csv, .json and .png."""
    record: Path | None = None
    """A .json to write as well, with the date, the machine, the versions and --command; the same in
    Markdown beside it."""
    command: str | None = None
    """The command line that made all of it, for --record."""
    wall_seconds: NonNegative | None = None
    """What that took on the clock, for --record."""
    check: Literal["choice", "evaluations"] | None = None
    """Write nothing, but leave with status 2 where the comparison could not be made. choice: by the
    names and seeds alone, before there is anything. evaluations: because a base run has not been
    evaluated, or only with other weights than it ended with."""
