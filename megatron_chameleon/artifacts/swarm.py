"""A swarm's folder: the settings that determine its members' results, and the results.

``swarm.json`` holds the settings, the hash of the corpus, and the mixtures. ``members/00012.json``
holds the held-out losses and the cost of member 12, or the reason why its run diverged.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.mixture import SUM_TOLERANCE, Mixture
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import Count, FileRecord, FolderRecord, Share
from megatron_chameleon.artifacts.training_run import TrainingRun
from megatron_chameleon.errors import UserError

RATIOS_NAME, METRICS_NAME = "ratios.csv", "metrics.csv"
"""Tables of the members' mixtures and losses."""


@dataclasses.dataclass(frozen=True)
class SwarmRecord(FolderRecord):
    """``swarm.json``: everything that determines the members' results.

    A command that would change ``settings`` is rejected. ``swarm run`` trains members with
    ``provenance.options``.
    ``held_out`` lists the held-out domains of the corpus, whose losses are measured too.
    ``frozen_mixture`` is the hash of the mixture of ``--freeze``, whose ratios all members have.
    """

    KIND = "swarm"
    FILE_NAME = "swarm.json"
    MADE_BY = "megatron-chameleon swarm generate and compute_mixture write it"

    settings: dict[str, Any]
    corpus_hash: str
    domains: list[str]
    mixtures: list[list[Share]]
    provenance: Provenance
    held_out: list[str] = dataclasses.field(default_factory=list)
    frozen_mixture: str | None = None

    def __post_init__(self) -> None:
        if len({*self.domains, *self.held_out}) < len(self.domains) + len(self.held_out):
            raise ValueError("domains and held_out name a domain twice")
        for member, mixture in enumerate(self.mixtures):
            if len(mixture) != len(self.domains) or abs(sum(mixture) - 1.0) > SUM_TOLERANCE:
                raise ValueError(
                    f"mixture {member} must have a weight for each domain, and a sum of 1"
                )

    @property
    def tasks(self) -> list[str]:
        """Tasks on which the members are evaluated."""
        return list(self.settings.get("tasks", []))

    @property
    def cost(self) -> Cost:
        """Total cost of the finished members, including members finished in earlier sessions.

        Raises:
            UserError: for a damaged member file.
        """
        return sum((member.cost for member in self.finished.values()), start=Cost())

    @property
    def finished(self) -> dict[int, MemberRecord]:
        """Results of the finished members, by number.

        Raises:
            UserError: for a damaged member file, or the result of another member.
        """
        found = finished_members(self.root, len(self.mixtures))
        for member, record in found.items():
            path = member_path(self.root, member)
            run, mixture = path.with_suffix(""), self.mixture_of(member).hash
            problem = None
            if record.member != member:
                problem = f"is the result of member {record.member}"
            elif TrainingRun.exists(run):
                made_by = TrainingRun.load(run).provenance
                if made_by.inputs.get("mixture") != mixture:
                    problem = f"has the run of another mixture ({run})"
            if problem:
                raise UserError(
                    f"{path} {problem}; delete it and the folder {run.name}, and train member "
                    f"{member} again"
                )
        return found

    def mixture_of(self, member: int) -> Mixture:
        """The mixture of a member."""
        return Mixture(dict(zip(self.domains, self.mixtures[member], strict=True)), method="swarm")


@dataclasses.dataclass(frozen=True)
class MemberRecord(FileRecord):
    """Result of one member.

    Attributes:
        member: number of the member.
        steps: steps at which held-out losses were measured.
        losses: [steps][domains, then held-out domains] nats per token; None where a domain has no
            held-out text.
        bits_per_byte: task -> bits per byte of its gold answers after the last step.
        diverged: why the member diverged; None if it did not.
        cost: cost of its run and of its evaluation on tasks; device time is divided among members
            trained concurrently.
    """

    KIND = "swarm-member"
    MADE_BY = "megatron-chameleon swarm run and compute_mixture write it"

    member: Count
    steps: list[Count]
    losses: list[list[float | None]]
    diverged: str | None = None
    bits_per_byte: dict[str, float] = dataclasses.field(default_factory=dict)
    cost: Cost = dataclasses.field(default_factory=Cost)


def member_path(folder: Path, member: int) -> Path:
    """File of a member's result."""
    return folder / "members" / f"{member:05d}.json"


def finished_members(folder: Path, num_members: int) -> dict[int, MemberRecord]:
    """Results of the finished members, by number."""
    paths = {member: member_path(folder, member) for member in range(num_members)}
    return {member: MemberRecord.load(path) for member, path in paths.items() if path.is_file()}
