"""One task with one number of shots: asked by lm-eval, answered by our model."""

from __future__ import annotations

from typing import Any

from lm_eval.evaluator import evaluate

from megatron_chameleon.artifacts.cost import Stopwatch
from megatron_chameleon.artifacts.downstream_part import DownstreamPart, PartSettings
from megatron_chameleon.evaluation.downstream.harness_model import HarnessModel
from megatron_chameleon.evaluation.downstream.tasks import (
    CannotAskError,
    LoadedTask,
    in_one_line,
)


def ask(model: HarnessModel, loaded: LoadedTask, settings: PartSettings) -> DownstreamPart:
    """Ask ``loaded`` with the shots of ``settings``; rank 0 calls this, the others serve.

    Raises:
        CannotAskError: if the task and its data do not allow it.
        UserError: if the model has diverged.
    """
    stopwatch = Stopwatch()
    model.new_tally(f"{loaded.name}, {settings.shots}-shot")
    loaded.set_shots(settings.shots, settings.fewshot_seed)
    found = _evaluated(model, loaded, settings.limit)
    layout = model.shared.layout
    return DownstreamPart(
        settings=settings,
        metric=loaded.metric,
        version=loaded.version,
        shots_from=loaded.shots_from,
        answers=_answers(found["samples"][loaded.name], loaded.metric),
        truncated_requests=model.tally.truncated,
        requests_hash=model.tally.digest.hexdigest(),
        cost=stopwatch.cost(model.tally.flops, layout.world_size),
    )


def _evaluated(model: HarnessModel, loaded: LoadedTask, limit: int | None) -> dict[str, Any]:
    """What lm-eval gives, with its samples."""
    try:
        found: dict[str, Any] | None = evaluate(
            lm=model,
            task_dict={"tasks": {loaded.name: loaded.task}},
            limit=limit,
            bootstrap_iters=0,  # standard errors are computed over questions, here
            log_samples=True,
        )
    except Exception as error:  # of the definition, of a document or a request: of any kind
        if model.failed:
            raise  # of the model: other ranks may be waiting
        raise CannotAskError(in_one_line(error)) from error
    assert found is not None, "lm-eval is told of one rank, which gets the results"
    return found


def _answers(samples: list[dict[str, Any]], metric: str) -> str:
    """A "1" or a "0" for each question, in the order of the data set, by the task's first filter.

    Raises:
        CannotAskError: if the metric has other values.
    """
    first_filter = samples[0]["filter"]
    kept = sorted(
        (sample for sample in samples if sample["filter"] == first_filter),
        key=lambda sample: int(sample["doc_id"]),
    )
    values = [float(sample[metric]) for sample in kept]
    if not set(values) <= {0.0, 1.0}:
        raise CannotAskError(f"its {metric} is not right or wrong for each question")
    return "".join("1" if value else "0" for value in values)
