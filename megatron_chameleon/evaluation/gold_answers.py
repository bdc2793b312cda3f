"""Gold answers of downstream tasks with their contexts, as text."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream import require_lm_eval
from megatron_chameleon.evaluation.options import TaskOptions


@dataclasses.dataclass(frozen=True)
class GoldAnswer:
    """A gold answer that lm-eval scores.

    Attributes:
        context: text before the answer, the few-shot examples included.
        continuation: text whose log-likelihood is requested.
        num_bytes: UTF-8 bytes of the answer.
    """

    context: str
    continuation: str
    num_bytes: int


def gold_answers(options: TaskOptions) -> dict[str, list[GoldAnswer]]:
    """Return task -> the gold answer of every question.

    Raises:
        UserError: for several numbers of shots, a task that is unknown or unavailable, or a
            question without a gold answer.
    """
    if len(options.shots) > 1:
        raise UserError(f"--shots {' '.join(map(str, options.shots))}: pass one number")
    require_lm_eval()
    from megatron_chameleon.evaluation.tasks import TaskLibrary, TaskUnavailableError

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # hide lm-eval's logs of default values
    library = TaskLibrary(options.tasks, options.data_dir)
    found = dict[str, list[GoldAnswer]]()
    for name in options.tasks:
        try:
            loaded = library.load(name)
            loaded.set_shots(options.shots[0], options.fewshot_seed)
            loaded.require_gold_answers(options.limit)
            found[name] = _answers_of(loaded, options.limit)
        except TaskUnavailableError as error:
            raise UserError(f"--tasks {name}: {error}") from error
    return found


def _answers_of(loaded: Any, limit: int | None) -> list[GoldAnswer]:
    """Let lm-eval build the requests of a task; return those for the gold answers.

    Raises:
        TaskUnavailableError: if lm-eval fails.
    """
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    from megatron_chameleon.evaluation.tasks import TaskUnavailableError, in_one_line

    class Unscored(LM):
        """A model that gives every continuation the same likelihood."""

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return [(0.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return [0.0] * len(requests)

        def generate_until(self, requests: list[Any]) -> list[str]:
            return [""] * len(requests)

    try:
        results = evaluate(
            lm=Unscored(),
            task_dict={"tasks": {loaded.name: loaded.task}},
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
        )
    except Exception as error:  # a task can raise any type of error
        raise TaskUnavailableError(in_one_line(error)) from error
    assert results is not None, "lm-eval runs as a single rank"
    samples = results["samples"][loaded.name]
    answers = []
    for sample in samples:
        if sample["filter"] != samples[0]["filter"]:
            continue
        gold = loaded.gold_answer(sample["doc"])
        assert gold is not None, "require_gold_answers() has checked it"
        number, answer = gold
        context, continuation = sample["arguments"][number][:2]
        answers.append(GoldAnswer(context, continuation, len(answer.encode())))
    return answers
