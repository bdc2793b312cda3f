"""Accuracy on downstream tasks by lm-eval: tools/evaluate.py downstream, and lm-eval's own command.

    python -m megatron_chameleon.evaluation.downstream run \
      --model megatron_chameleon --model_args checkpoint=runs/mine/5-base/uniform-seed1 --tasks sciq

lm-eval 0.4.13 cannot discover models of other packages: only those registered before model lookup
are available. :func:`main` registers ours and calls lm-eval. Under torchrun, start it with -m.
lm-eval is optional, so modules that import it are imported lazily.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron_chameleon.artifacts import Cost, Provenance, Stopwatch, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.downstream_result import (
    Accuracy,
    DownstreamPart,
    DownstreamProtocol,
    DownstreamResult,
    Gap,
    PartSettings,
    ShotScore,
    TaskScore,
    find_part,
    part_path,
)
from megatron_chameleon.artifacts.files import require_writable
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.checkpoint.convert import find_tokenizer
from megatron_chameleon.checkpoint.load import open_reader, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import DownstreamOptions
from megatron_chameleon.evaluation.scoring import Scorer
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.parallel.layout import distributed, from_main

if TYPE_CHECKING:
    from megatron_chameleon.evaluation.lm_eval_model import ScorerLM
    from megatron_chameleon.evaluation.tasks import LoadedTask

MODEL_NAME = "megatron_chameleon"
NOTES = {
    "race": "since version 3 (May 2026), its definition fills in the blanks of an article's "
    "earlier questions; the paper's version kept the blanks",
}


def require_lm_eval() -> str:
    """The version of lm-eval.

    Raises:
        UserError: if it is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "downstream tasks need lm-eval, which is not installed: "
            "pip install 'megatron-chameleon[eval]'"
        )
    return metadata.version("lm_eval")


def register_model() -> None:
    """Register our model with lm-eval by name, imported lazily."""
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        target = "megatron_chameleon.evaluation.lm_eval_model:CheckpointLM"
        model_registry.register(MODEL_NAME, target=target)


def main() -> None:
    """Run lm-eval's command. User errors exit with status 2 and a one-line message."""
    if int(os.environ.get("RANK", "0")) > 0:
        os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")  # rank 0 logs
    try:
        require_lm_eval()
        from lm_eval.__main__ import cli_evaluate

        register_model()
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@dataclasses.dataclass(frozen=True)
class DownstreamPlan:
    """Validated options and the artifacts that they name.

    ``data`` identifies the data set of each task (see PartSettings).
    """

    options: DownstreamOptions
    checkpoint: CheckpointRecord
    protocol: DownstreamProtocol
    provenance: Provenance
    data: dict[str, str | None]

    def settings(self, task: str, shots: int) -> PartSettings:
        """Settings that determine the result of a task with a number of shots."""
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

    def parts(self, task: str) -> dict[int, DownstreamPart | None]:
        """The existing part of each number of shots. Raises UserError if it has other settings."""
        folder = self.options.parts_dir
        return {n: find_part(folder, self.settings(task, n)) for n in self.options.shots}

    def missing(self) -> dict[str, list[int]]:
        """Tasks with the numbers of shots that are still to be evaluated, in their order."""
        return {
            task: numbers
            for task in self.options.tasks
            if (numbers := [shots for shots, part in self.parts(task).items() if not part])
        }


def evaluate_downstream(options: DownstreamOptions) -> DownstreamResult:
    """Evaluate a checkpoint on all tasks with all numbers of shots, and write the result.

    Every rank calls this, and every rank gets the result. Existing parts are not evaluated again; a
    task that cannot be evaluated leaves a gap.

    Raises:
        UserError: for invalid options or inputs, or if no task can be evaluated.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan, missing = from_main(lambda: plan_downstream(options))
        gaps: list[Gap] = []
        if missing:
            from megatron_chameleon.evaluation.lm_eval_model import ScorerLM

            tokenizer = find_tokenizer(options.tokenizer, plan.checkpoint)
            is_bf16 = options.evaluation_dtype == "bfloat16"
            reader = open_reader(plan.checkpoint, layout, bf16=is_bf16)
            scorer = Scorer(reader, options.evaluation_batch_size, tokenizer)
            if layout.is_main:
                gaps = evaluate_parts(plan, missing, ScorerLM(scorer))
                scorer.stop()
            else:
                scorer.serve()
        result = from_main(lambda: collect(plan, gaps))
        if not result.tasks:
            raise UserError(f"no task could be evaluated, and nothing is written; {result.gaps[0]}")
        if layout.is_main:
            result.save(options.output)
            print_result(result)
            print(f"written to {options.output}; next: the same for what it is compared with")
        return result


def plan_downstream(options: DownstreamOptions) -> tuple[DownstreamPlan, dict[str, list[int]]]:
    """Load and check what ``options`` name, and find the missing parts; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    version = require_lm_eval()
    from megatron_chameleon.evaluation.tasks import TaskLibrary

    record = CheckpointRecord.load(find_checkpoint(options.checkpoint))
    shape = shape_of(record)
    check_model_layout(shape.size, options.parallel, shape.max_sequence_length)
    tokenizer = find_tokenizer(options.tokenizer, record)
    library = TaskLibrary(options.tasks, options.data_dir)  # rejects unknown names
    check_output(options.output, DownstreamResult.KIND)
    require_writable(options.parts_dir, f"--work-dir {options.parts_dir}")
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
    return plan, plan.missing()


def evaluate_parts(
    plan: DownstreamPlan, missing: dict[str, list[int]], model: ScorerLM
) -> list[Gap]:
    """Write every missing part as soon as it is complete; return the gaps."""
    from megatron_chameleon.evaluation.tasks import TaskLibrary, TaskUnavailableError

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # lm-eval logs every default
    library = TaskLibrary(list(missing), plan.options.data_dir)
    gaps: list[Gap] = []
    total, done, stopwatch = sum(map(len, missing.values())), 0, Stopwatch()
    for task, numbers in missing.items():
        loaded = None
        for shots in numbers:
            done += 1
            try:
                loaded = loaded or library.load(task)
                part = evaluate_part(model, loaded, plan.settings(task, shots))
            except TaskUnavailableError as error:
                gaps.append(Gap(task, shots if loaded else None, str(error)))
                line = f"not evaluated: {gaps[-1]}"
                done += 0 if loaded else len(numbers) - 1
            else:
                part.save(part_path(plan.options.parts_dir, task, shots))
                accuracy = _percent(Accuracy.of(part.values))
                questions = f"{len(part.answers):,} questions"
                line = f"{task}, {shots}-shot: {part.metric} {accuracy} of {questions}"
            left = tqdm.format_interval(stopwatch.seconds() / done * (total - done))
            print(f"{line} ({done}/{total}, {left} left)", flush=True)
            if loaded is None:
                break
    return gaps


def evaluate_part(model: ScorerLM, loaded: LoadedTask, settings: PartSettings) -> DownstreamPart:
    """Evaluate one task with one number of shots; rank 0 calls this, the others serve.

    Raises:
        TaskUnavailableError: if the task or its data do not allow it.
        UserError: if the model has diverged.
    """
    from lm_eval.evaluator import evaluate

    from megatron_chameleon.evaluation.tasks import TaskUnavailableError, in_one_line

    stopwatch = Stopwatch()
    model.reset(f"{loaded.name}, {settings.shots}-shot")
    loaded.set_shots(settings.shots, settings.fewshot_seed)
    try:
        found: dict[str, Any] | None = evaluate(
            lm=model,
            task_dict={"tasks": {loaded.name: loaded.task}},
            limit=settings.limit,
            bootstrap_iters=0,  # standard errors are computed over questions, here
            log_samples=True,
        )
    except Exception as error:  # of the definition, of a document or of a request: any type
        if model.failed:
            raise  # the model's: other ranks may be waiting
        raise TaskUnavailableError(in_one_line(error)) from error
    assert found is not None, "lm-eval sees a single rank"
    # Only the first filter's samples, in the order of the data set.
    samples = found["samples"][loaded.name]
    samples = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    samples.sort(key=lambda sample: int(sample["doc_id"]))
    if not samples:
        raise TaskUnavailableError("its data set has no questions")
    if not all(sample.get(loaded.metric) in (0, 1) for sample in samples):
        raise TaskUnavailableError(f"its {loaded.metric} is not 0 or 1 for each question")
    hashes = "\n".join(sample["doc_hash"] for sample in samples)
    return DownstreamPart(
        settings=settings,
        metric=loaded.metric,
        version=str(loaded.task.VERSION),
        shots_from=loaded.shots_from,
        answers="".join("1" if sample[loaded.metric] else "0" for sample in samples),
        truncated_requests=model.num_truncated,
        requests_hash=model.digest.hexdigest(),
        questions_hash=hashlib.sha256(hashes.encode()).hexdigest(),
        cost=stopwatch.cost(model.flops, model.scorer.layout.world_size),
    )


def collect(plan: DownstreamPlan, gaps: Iterable[Gap]) -> DownstreamResult:
    """The result, from the existing parts."""
    tasks: dict[str, TaskScore] = {}
    cost, gaps = Cost(), list(gaps)
    for task in plan.options.tasks:
        found = plan.parts(task)
        parts = {shots: part for shots, part in sorted(found.items()) if part is not None}
        if len({part.questions_hash for part in parts.values()}) > 1:
            reason = (
                "its questions differ between numbers of shots, since its data set has changed; "
                f"delete {plan.options.parts_dir}/{task}-*shot.json and run again"
            )
            gaps.append(Gap(task, None, reason))
        elif parts:
            some = next(iter(parts.values()))
            by_shots = {
                shots: ShotScore(
                    **vars(Accuracy.of(part.values)),
                    documents=len(part.answers),
                    truncated_requests=part.truncated_requests,
                    requests_hash=part.requests_hash,
                )
                for shots, part in parts.items()
            }
            means = [sum(v) / len(v) for v in zip(*(p.values for p in parts.values()), strict=True)]
            mean = Accuracy.of(means) if len(parts) == len(found) else None
            tasks[task] = TaskScore(some.metric, some.version, some.shots_from, by_shots, mean)
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


def print_result(result: DownstreamResult) -> None:
    """Print percentages by task and number of shots, gaps and notes."""
    shots = result.protocol.shots
    names = list(dict.fromkeys([*result.tasks, *(gap.task for gap in result.gaps)]))
    mean = f"mean of {len(result.complete_tasks)} of {len(names)} tasks"
    rows = [("accuracy, %", "metric", [f"{n}-shot" for n in shots], "mean ± standard error")]
    for name in names:
        score = result.tasks.get(name)
        if score is None:
            rows.append((name, "-", ["-"] * len(shots), "-"))
        else:
            accuracies = [score.by_shots.get(number) for number in shots]
            cells = [f"{100 * each.accuracy:.2f}" if each else "-" for each in accuracies]
            rows.append((name, score.metric, cells, _percent(score.mean)))
    rows.append((mean, "", [""] * len(shots), _percent(result.mean)))
    width = max(len(row[0]) for row in rows)
    for name, metric, cells, total in rows:
        print(f"{name:{width}}  {metric:11} {''.join(f'{cell:>8}' for cell in cells)}  {total}")
    for gap in result.gaps:
        print(f"not evaluated: {gap}")
    for name, score in result.tasks.items():
        if name in NOTES:
            print(f"note: {name}: {NOTES[name]}")
        truncated = sum(each.truncated_requests for each in score.by_shots.values())
        if truncated:
            print(
                f"note: {name}: {truncated:,} requests were longer than the model's sequence "
                "length; their contexts were truncated on the left"
            )


def _percent(found: Accuracy | None) -> str:
    if found is None:
        return "-"
    error = "" if found.standard_error is None else f" ± {100 * found.standard_error:.2f}"
    return f"{100 * found.accuracy:.2f}{error}"


if __name__ == "__main__":
    main()
