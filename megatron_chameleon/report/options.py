"""Options of make_report and compare_methods."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import CheckedOptions, NonNegative, Seed

LEAST_SEEDS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareMethodsOptions(CheckedOptions):
    """Tabulate the cost of each method's mixture and the quality of base models trained with it.

    examples/compare_methods.sh trains and evaluates the base models, and then calls this tool.
    """

    run: Path
    """The run folder, which contains 1-corpus to 6-evaluation."""
    mixtures: tuple[str, ...]
    """Names of the mixtures in 4-mixture, in the order of the table's columns."""
    seeds: tuple[Seed, ...]
    """Seeds of the base models, at least three. Every mixture needs a base model of each seed."""
    baseline: str = "uniform"
    """The baseline mixture, with which the perplexities of the other mixtures are compared."""
    reference: str | None = None
    """The mixture whose cost divides all costs; default: chameleon, or chameleon-pretrain, if it is
    compared."""
    name: str = "compare_methods"
    """Name of the files in 7-report, before .txt, .md, .csv, .json and .png."""
    record: Path | None = None
    """A .json file that also records the date, the machine, the versions and --command; a Markdown
    file of the same name is written next to it."""
    command: str | None = None
    """The command line that made the compared runs, for --record."""
    wall_seconds: NonNegative | None = None
    """Wall time of --command in seconds, for --record."""
    targets: tuple[str, ...] | None = None
    """Compare the losses of these held-out targets: RUN/targets/NAME is the run folder of the
    comparison with the held-out domain NAME. Without names, compare all targets in RUN/targets."""
    existing_model: bool = False
    """The model that embeds the domains existed before: its training is not part of the cost of
    Chameleon's mixtures."""
    check: Literal["choice", "evaluations", "downstream"] | None = None
    """Only check, without writing anything; exit with status 2 if the comparison is impossible.
    choice: check the names and seeds, before anything is trained. evaluations: check that each
    base run has an evaluation of its last checkpoint. downstream: check that each base run has
    downstream results of its last checkpoint."""

    def __post_init__(self) -> None:
        """Raise UserError if there are too few mixtures or seeds to compare."""
        super().__post_init__()
        for flag, values, least in (
            ("--mixtures", self.mixtures, 2 if self.check in (None, "choice") else 1),
            ("--seeds", self.seeds, LEAST_SEEDS),
        ):
            if len(set(values)) < len(values) or len(values) < least:
                raise UserError(
                    f"{flag} {' '.join(map(str, values))}: pass at least {least} different values"
                )
        if self.targets and len(set(self.targets)) < len(self.targets):
            raise UserError(f"--targets {' '.join(self.targets)}: a target is named twice")
        for flag, name in (("baseline", self.baseline), ("reference", self.reference)):
            if name not in (None, *self.mixtures) and self.check in (None, "choice"):
                raise UserError(
                    f"--{flag} {name} is not among --mixtures {' '.join(self.mixtures)}; add it, "
                    f"or choose another one ({flag.upper()}=NAME of examples/compare_methods.sh)"
                )
        if self.record is not None:
            if self.command is None:
                raise UserError("--record needs --command, the command line that made the runs")
            if self.record.suffix != ".json":
                raise UserError(f"--record {self.record}: the name must end in .json")

    def run_names(self, mixture: str) -> list[str]:
        """Names of the base runs of a mixture, and of their evaluations, in the order of seeds."""
        return [f"{mixture}-seed{seed}" for seed in self.seeds]


Projection = Literal["umap", "pca"]


@dataclasses.dataclass(frozen=True)
class ReportOptions(CheckedOptions):
    """Report a run in one HTML page: held-out perplexity, weights, tasks, cost, losses and more.

    Also writes the tables as Markdown and CSV, and the figures as PNG and PDF.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders that contain 1-corpus to 6-evaluation. Several folders are merged, and must have
    the same corpus."""
    baseline: str | None = None
    """Name of the evaluated run to compare with; default: the run trained with uniform weights."""
    output: Path | None = None
    """The folder to write to; default: 7-report of the first run folder."""
    projection: Projection = "umap"
    """Projection of the map of window embeddings: 'umap', which takes half a minute to compile, and
    becomes PCA without umap-learn or with fewer than 200 windows; or 'pca'."""
