"""The options of tools/evaluate.py downstream with what they name, all checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from megatron_chameleon.artifacts import Provenance, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.downstream_part import DownstreamPart, PartSettings, find_part
from megatron_chameleon.artifacts.downstream_result import KIND, DownstreamProtocol
from megatron_chameleon.artifacts.output_path import check_folder, check_output
from megatron_chameleon.checkpoint.convert import find_tokenizer
from megatron_chameleon.checkpoint.load import shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.installed import require_harness
from megatron_chameleon.evaluation.downstream.tasks import TaskLibrary
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.options.downstream import DownstreamOptions
from megatron_chameleon.options.ranges import check_ranges


@dataclasses.dataclass(frozen=True)
class DownstreamPlan:
    """What is to be asked, and where the answers go.

    ``data`` is what each task's data set is known by (see PartSettings).
    """

    options: DownstreamOptions
    checkpoint: CheckpointRecord
    protocol: DownstreamProtocol
    provenance: Provenance
    data: dict[str, str | None]

    @property
    def work_dir(self) -> Path:
        """Where parts are kept."""
        return work_dir_of(self.options)

    def part(self, task: str, shots: int) -> DownstreamPart | None:
        """The part, if it is finished. Raises UserError if there is one of other settings."""
        return find_part(self.work_dir, self.settings(task, shots))

    def settings(self, task: str, shots: int) -> PartSettings:
        """What the part of a task with so many shots depends on."""
        return PartSettings(
            checkpoint_hash=self.checkpoint.hash,
            lm_eval_version=self.protocol.lm_eval_version,
            task=task,
            shots=shots,
            limit=self.protocol.limit,
            fewshot_seed=self.protocol.fewshot_seed,
            dtype=self.protocol.dtype,
            data=self.data[task],
        )

    def missing(self) -> Iterator[tuple[str, list[int]]]:
        """Tasks with the numbers of shots that are not finished, in the order of the options."""
        for task in self.options.tasks:
            shots = [number for number in self.options.shots if self.part(task, number) is None]
            if shots:
                yield task, shots


def work_dir_of(options: DownstreamOptions) -> Path:
    """Where parts are kept."""
    return options.work_dir or options.output.with_suffix("")


def plan_downstream(options: DownstreamOptions) -> DownstreamPlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    version = require_harness()
    _check_numbers(options)
    record = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    shape = shape_of(record)
    check_model_layout(shape.size, options.parallel, shape.max_sequence_length)
    tokenizer = find_tokenizer(options.tokenizer, record)
    library = TaskLibrary(options.tasks, options.data_dir)  # a misspelt name shows at once
    _check_places(options)
    plan = DownstreamPlan(
        options=options,
        checkpoint=record,
        protocol=DownstreamProtocol(
            lm_eval_version=version,
            shots=sorted(options.shots),
            limit=options.limit,
            fewshot_seed=options.fewshot_seed,
            dtype=options.evaluation_dtype,
        ),
        provenance=provenance(options, {"checkpoint": record.hash, "tokenizer": tokenizer.sha256}),
        data={task: library.data_of(task) for task in options.tasks},
    )
    list(plan.missing())  # so does a part of another evaluation
    return plan


def _check_places(options: DownstreamOptions) -> None:
    if options.work_dir is None and options.output.suffix != ".json":
        raise UserError(
            f"--output {options.output}: give a name that ends with .json, since finished parts go "
            "to the folder of that name without it; or give that folder by --work-dir"
        )
    check_output(options.output, KIND)
    work_dir = work_dir_of(options)
    check_folder(work_dir, f"--work-dir {work_dir}")


def _check_numbers(options: DownstreamOptions) -> None:
    check_ranges(options)
    for flag, values in (("--tasks", options.tasks), ("--shots", options.shots)):
        if not values:
            raise UserError(f"{flag} is empty; name at least one")
        if len(set(values)) < len(values):
            raise UserError(f"{flag} {' '.join(map(str, values))}: one is given twice")
