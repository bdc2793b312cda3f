"""One task with one number of shots: asked by lm-eval, answered by our model."""

from __future__ import annotations

import hashlib
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
    samples = _of_first_filter(found["samples"][loaded.name], loaded.metric)
    layout = model.shared.layout
    return DownstreamPart(
        settings=settings,
        metric=loaded.metric,
        version=loaded.version,
        shots_from=loaded.shots_from,
        answers="".join("1" if sample[loaded.metric] else "0" for sample in samples),
        truncated_requests=model.tally.truncated,
        requests_hash=model.tally.digest.hexdigest(),
        questions_hash=_hash_of([sample["doc_hash"] for sample in samples]),
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


def _of_first_filter(samples: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """What lm-eval tells of each question, in the order of the data set, by the first filter.

    Raises:
        CannotAskError: if there is no question, or the metric has values other than 0 and 1.
    """
    if not samples:
        raise CannotAskError("its data set has no questions")
    first_filter = samples[0]["filter"]
    kept = sorted(
        (sample for sample in samples if sample["filter"] == first_filter),
        key=lambda sample: int(sample["doc_id"]),
    )
    if not all(sample.get(metric) in (0, 1) for sample in kept):
        raise CannotAskError(f"its {metric} is not right or wrong for each question")
    return kept


def _hash_of(hashes: list[str]) -> str:
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()
