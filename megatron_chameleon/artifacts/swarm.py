"""A swarm's folder: what its members' results hang on, and what came of each of them.

swarm.json            settings, corpus and mixtures
members/00012.json    member 12's held-out losses and cost, or that it diverged
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import (
    Count,
    FolderRecord,
    Share,
    read_record,
    write_record,
)

FORMAT_VERSION = 1
MADE_BY = "a swarm of proxies writes it (tools/compute_mixture.py)"
MEMBER_KIND = "swarm-member"


@dataclasses.dataclass(frozen=True)
class SwarmRecord(FolderRecord):
    """What ``swarm.json`` says: all that its members' results hang on."""

    KIND = "swarm"
    FILE_NAME = "swarm.json"
    FORMAT_VERSION = FORMAT_VERSION
    MADE_BY = MADE_BY

    settings: dict[str, Any]
    corpus_hash: str
    domains: list[str]
    mixtures: list[list[Share]]
    provenance: Provenance

    @property
    def cost(self) -> Cost:
        """Of the members that have a result, over all sessions.

        Raises:
            UserError: for a member's file that is damaged.
        """
        members = finished_members(self.root, len(self.mixtures))
        return sum((member.cost for member in members.values()), start=Cost())


@dataclasses.dataclass(frozen=True)
class MemberRecord:
    """What came of one member.

    Attributes:
        member: its number.
        steps: when held-out losses were measured.
        losses: for each of ``steps``, of every domain; None where it has no held-out text.
        diverged: why it was left out, if it was.
        cost: its share of what its group took.
    """

    member: Count
    steps: list[Count]
    losses: list[list[float | None]]
    diverged: str | None = None
    cost: Cost = dataclasses.field(default_factory=Cost)

    @classmethod
    def load(cls, path: Path) -> MemberRecord:
        """Raises UserError naming the file and the field."""
        return read_record(path, cls, kind=MEMBER_KIND, version=FORMAT_VERSION, made_by=MADE_BY)

    def save(self, folder: Path) -> None:
        """Write it into the swarm's ``folder``."""
        path = member_path(folder, self.member)
        write_record(path, self, kind=MEMBER_KIND, version=FORMAT_VERSION)


def member_path(folder: Path, member: int) -> Path:
    """Where a member's result is."""
    return folder / "members" / f"{member:05d}.json"


def finished_members(folder: Path, num_members: int) -> dict[int, MemberRecord]:
    """Member -> its result, of those that have one."""
    paths = {member: member_path(folder, member) for member in range(num_members)}
    return {member: MemberRecord.load(path) for member, path in paths.items() if path.is_file()}
