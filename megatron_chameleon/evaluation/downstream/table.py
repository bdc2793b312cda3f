"""A downstream result for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_chameleon.artifacts.downstream_result import Accuracy, DownstreamResult
from megatron_chameleon.evaluation.downstream.tasks import NOTES

WIDTH = 7
GAP = "-"


def print_result(result: DownstreamResult) -> None:
    """Percentages by task and number of shots, what is missing, and what to know about them."""
    names = {*result.tasks, *(gap.task for gap in result.gaps)}
    width = max(len("mean of 13 of 13 tasks"), *map(len, names))
    shots = result.protocol.shots
    numbers = "".join(f"{f'{number}-shot':>{WIDTH}} " for number in shots)
    print(f"{'accuracy, %':{width}}  {'metric':11}  {numbers} mean ± standard error")
    for name, score in result.tasks.items():
        found = [score.by_shots.get(number) for number in shots]
        cells = "".join(f"{_percent(each):>{WIDTH}} " for each in found)
        print(f"{name:{width}}  {score.metric:11}  {cells} {_with_error(score.mean)}")
    for name in dict.fromkeys(gap.task for gap in result.gaps if gap.task not in result.tasks):
        print(f"{name:{width}}  {GAP:11}  " + f"{GAP:>{WIDTH}} " * len(shots) + f" {GAP:>{WIDTH}}")
    whole = f"mean of {len(result.complete_tasks)} of {len(names)} tasks"
    print(f"{whole:{width}}  {'':11}  {' ' * (WIDTH + 1) * len(shots)} {_with_error(result.mean)}")
    for line in (*(f"not asked: {gap}" for gap in result.gaps), *_notes(result)):
        print(line)


def _notes(result: DownstreamResult) -> Iterator[str]:
    for name, score in result.tasks.items():
        if name in NOTES:
            yield f"note: {name}: {NOTES[name]}"
        cut = sum(each.truncated_requests for each in score.by_shots.values())
        if cut:
            yield (
                f"note: {name}: {cut:,} requests were too long for the model; the beginning of "
                "what stands before the answer was cut off"
            )


def _percent(found: Accuracy | None) -> str:
    return GAP if found is None else f"{100 * found.accuracy:.2f}"


def _with_error(found: Accuracy | None) -> str:
    error = "" if found is None or found.standard_error is None else found.standard_error
    return f"{_percent(found):>{WIDTH}}" + (f" ± {100 * error:.2f}" if error != "" else "")
