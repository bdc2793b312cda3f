"""A finished part of a downstream evaluation on disk: one task with one number of shots."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.record import Count, Positive, read_record, write_record
from megatron_chameleon.errors import UserError

KIND = "downstream evaluation's part"
FORMAT_VERSION = 2  # 2: with what is known of the data
MADE_BY = "tools/evaluate.py downstream writes it anew if it is deleted"


@dataclasses.dataclass(frozen=True)
class PartSettings:
    """All that a part depends on. Two that differ have nothing to do with each other.

    Attributes:
        data: where the task's data set was: "hub", or of a local copy "sha256:" and the hash of its
            files. None only in what is looked for: any.
    """

    checkpoint_hash: str
    lm_eval_version: str
    task: str
    shots: Count
    limit: Positive | None
    fewshot_seed: int
    dtype: str
    data: str | None


@dataclasses.dataclass(frozen=True)
class DownstreamPart:
    """What one task gave with one number of shots.

    Attributes:
        settings: what it depends on.
        metric: lm-eval's name of the metric.
        version: of the task's definition.
        shots_from: the split that shots are drawn from.
        answers: "1" for each question that was answered rightly, "0" for the others, in order.
        truncated_requests: see ShotScore.
        requests_hash: see ShotScore.
        questions_hash: hex SHA-256 of the questions without any examples, the same with any shots.
        cost: of asking.
    """

    settings: PartSettings
    metric: str
    version: str
    shots_from: str
    answers: Annotated[str, Field(pattern="^[01]+$")]
    truncated_requests: Count
    requests_hash: str
    questions_hash: str
    cost: Cost

    @property
    def values(self) -> list[float]:
        """1 or 0 for each question."""
        return [float(answer) for answer in self.answers]

    def save(self, work_dir: Path) -> None:
        """Write the part into ``work_dir``, under the name of its task and shots."""
        path = part_path(work_dir, self.settings.task, self.settings.shots)
        write_record(path, self, kind=KIND, version=FORMAT_VERSION)


def part_path(work_dir: Path, task: str, shots: int) -> Path:
    """Where the part of a task with so many shots lies."""
    return work_dir / f"{task}-{shots}shot.json"


def find_part(work_dir: Path, settings: PartSettings) -> DownstreamPart | None:
    """The part with these settings, if it is finished.

    Raises:
        UserError: if there is one with others, or a damaged one.
    """
    path = part_path(work_dir, settings.task, settings.shots)
    if not path.exists():
        return None
    part = read_record(path, DownstreamPart, kind=KIND, version=FORMAT_VERSION, made_by=MADE_BY)
    for field in dataclasses.fields(PartSettings):
        there, wanted = getattr(part.settings, field.name), getattr(settings, field.name)
        if there != wanted and not (field.name == "data" and wanted is None):
            raise UserError(
                f"{path} is of another evaluation: {field.name} is {there} there and {wanted} "
                "here; give another --output or --work-dir, or delete the folder"
            )
    return part
