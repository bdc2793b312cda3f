"""tools/evaluate.py downstream: all tasks with all numbers of shots, part by part."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from megatron_chameleon.artifacts import Cost, Stopwatch
from megatron_chameleon.artifacts.downstream_part import DownstreamPart
from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamResult,
    Gap,
    ShotScore,
    TaskScore,
)
from megatron_chameleon.checkpoint.convert import find_tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.asking import ask
from megatron_chameleon.evaluation.downstream.checkpoint_model import open_shared_model
from megatron_chameleon.evaluation.downstream.harness_model import HarnessModel
from megatron_chameleon.evaluation.downstream.plan import DownstreamPlan, plan_downstream
from megatron_chameleon.evaluation.downstream.table import print_result
from megatron_chameleon.evaluation.downstream.tasks import CannotAskError, TaskLibrary
from megatron_chameleon.options.downstream import DownstreamOptions
from megatron_chameleon.parallel.layout import Layout, distributed, from_main


def evaluate_downstream(options: DownstreamOptions) -> DownstreamResult:
    """Ask a checkpoint all tasks with all numbers of shots, and write what it gave.

    Every rank calls this, and every rank gets the result. What is finished already is not asked
    again; a task that cannot be asked leaves a gap, and the rest goes on.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_downstream(options))
        anything_missing = from_main(lambda: any(plan.missing()))
        gaps = _ask_what_is_missing(plan, layout) if anything_missing else []
        result = from_main(lambda: collect(plan, gaps))
        _require_any(result)
        if layout.is_main:
            result.save(options.output)
            print_result(result)
            print(f"written to {options.output}; next: the same for what it is compared with")
        return result


def _require_any(result: DownstreamResult) -> None:
    if not result.tasks:
        raise UserError(f"no task could be asked, and nothing is written; {result.gaps[0]}")


def _ask_what_is_missing(plan: DownstreamPlan, layout: Layout) -> list[Gap]:
    """Ask on rank 0, answer on all; what could not be asked, known to rank 0 alone."""
    options = plan.options
    tokenizer = find_tokenizer(options.tokenizer, plan.checkpoint)
    shared = open_shared_model(
        plan.checkpoint,
        tokenizer,
        layout,
        options.evaluation_batch_size,
        bf16=options.evaluation_dtype == "bfloat16",
    )
    if not layout.is_main:
        shared.serve()
        return []
    gaps = ask_all(plan, HarnessModel(shared, tokenizer))
    shared.stop()
    return gaps


def ask_all(plan: DownstreamPlan, model: HarnessModel) -> list[Gap]:
    """Write every missing part, each as soon as it is there; what could not be asked."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it tells of each default that it takes
    missing = list(plan.missing())
    library = TaskLibrary([task for task, _ in missing], plan.options.data_dir)
    advance = Advance(sum(len(shots) for _, shots in missing))
    gaps: list[Gap] = []
    for task, numbers in missing:
        try:
            loaded = library.load(task)
        except CannotAskError as error:
            gaps.append(Gap(task, None, str(error)))
            advance.tell_gap(gaps[-1], len(numbers))
            continue
        for shots in numbers:
            try:
                part = ask(model, loaded, plan.settings(task, shots))
            except CannotAskError as error:
                gaps.append(Gap(task, shots, str(error)))
                advance.tell_gap(gaps[-1], 1)
                continue
            part.save(plan.work_dir)
            advance.tell(part)
    return gaps


class Advance:
    """Says after each part what it gave, and about how long the rest takes."""

    def __init__(self, parts: int) -> None:
        self.parts, self.done, self.stopwatch = parts, 0, Stopwatch()

    def tell(self, part: DownstreamPart) -> None:
        """A part is there."""
        found = Accuracy.of(part.values)
        error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.2f}"
        self._count(
            1,
            f"{part.settings.task}, {part.settings.shots}-shot: {part.metric} "
            f"{100 * found.accuracy:.2f}{error} of {len(part.answers):,} questions",
        )

    def tell_gap(self, gap: Gap, parts: int) -> None:
        """So many parts will not be there."""
        self._count(parts, f"not asked: {gap}")

    def _count(self, parts: int, what: str) -> None:
        self.done += parts
        seconds = self.stopwatch.seconds() / self.done * (self.parts - self.done)
        left = f", about {seconds / 60:.0f} min left" if seconds >= 60 else ""
        print(f"{what} ({self.done}/{self.parts}{left})", flush=True)


def collect(plan: DownstreamPlan, gaps: list[Gap]) -> DownstreamResult:
    """The result, of the parts that are there."""
    tasks: dict[str, TaskScore] = {}
    cost, gaps = Cost(), list(gaps)
    for task in plan.options.tasks:
        found = [(shots, plan.part(task, shots)) for shots in plan.protocol.shots]
        parts = {shots: part for shots, part in found if part is not None}
        if len({part.questions_hash for part in parts.values()}) > 1:
            gaps.append(Gap(task, None, _other_questions(plan, task)))
        elif parts:
            tasks[task] = task_score(parts, is_complete=len(parts) == len(found))
            cost = sum((part.cost for part in parts.values()), cost)
    return DownstreamResult(
        checkpoint=str(plan.checkpoint.root),
        checkpoint_hash=plan.checkpoint.hash,
        step=plan.checkpoint.step,
        protocol=plan.protocol,
        tasks=tasks,
        gaps=gaps,
        provenance=plan.provenance,
        cost=cost,
    )


def _other_questions(plan: DownstreamPlan, task: str) -> str:
    return (
        "its questions were not the same with every number of shots, since its data set has "
        f"changed; delete {plan.work_dir}/{task}-*shot.json, and start again"
    )


def task_score(parts: dict[int, DownstreamPart], *, is_complete: bool) -> TaskScore:
    """What a task gave, from its parts by their number of shots, of which there is one."""
    some = next(iter(parts.values()))
    by_question = zip(*(part.values for part in parts.values()), strict=True)
    return TaskScore(
        metric=some.metric,
        version=some.version,
        shots_from=some.shots_from,
        by_shots={shots: shot_score(part) for shots, part in parts.items()},
        mean=Accuracy.of([mean_of(values) for values in by_question]) if is_complete else None,
    )


def shot_score(part: DownstreamPart) -> ShotScore:
    """What a task gave with one number of shots."""
    found = Accuracy.of(part.values)
    return ShotScore(
        accuracy=found.accuracy,
        standard_error=found.standard_error,
        documents=len(part.answers),
        truncated_requests=part.truncated_requests,
        requests_hash=part.requests_hash,
    )


def mean_of(values: Iterable[float]) -> float:
    """The mean; of at least one value."""
    each = list(values)
    return sum(each) / len(each)
