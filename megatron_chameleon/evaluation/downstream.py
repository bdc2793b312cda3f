"""Measure scores on downstream tasks by `evaluate downstream` or lm-eval's own command.

    python -m megatron_chameleon.evaluation.downstream run \
      --model megatron_chameleon --model_args checkpoint=runs/mine/5-base/uniform-seed1 --tasks sciq

lm-eval 0.4.13 cannot discover models of other packages: a model must be registered before lm-eval
looks it up. :func:`main` registers ours and runs lm-eval's command. Under torchrun, start this
module with -m. lm-eval is an optional dependency, so modules that import it are imported lazily.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron_chameleon.artifacts import Cost, Provenance, Stopwatch, provenance
from megatron_chameleon.artifacts.downstream_result import (
    DownstreamPart,
    DownstreamProtocol,
    DownstreamResult,
    Gap,
    PartSettings,
    Score,
    ShotScore,
    TaskScore,
    find_part,
    part_path,
)
from megatron_chameleon.artifacts.files import require_writable
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.checkpoint.open_model import Model, open_model
from megatron_chameleon.console import align_columns
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import DownstreamOptions, TaskOptions
from megatron_chameleon.evaluation.scoring import Scorer
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.parallel.options import is_rank_0

if TYPE_CHECKING:
    from megatron_chameleon.evaluation.lm_eval_model import ScorerLM
    from megatron_chameleon.evaluation.tasks import LoadedTask


def require_lm_eval() -> str:
    """Return the version of lm-eval.

    Raises:
        UserError: if lm-eval is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "downstream tasks need lm-eval, which is not installed: "
            "pip install 'megatron-chameleon[eval]'"
        )
    return metadata.version("lm_eval")


def register_model() -> None:
    """Register ``CheckpointLM`` with lm-eval as "megatron_chameleon", imported on first use."""
    from lm_eval.api.registry import model_registry

    model_registry.register(
        "megatron_chameleon", target="megatron_chameleon.evaluation.lm_eval_model:CheckpointLM"
    )


def main() -> None:
    """Run lm-eval's command. User errors exit with status 2 and a one-line message."""
    if not is_rank_0():
        os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")  # only rank 0 logs
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

    Attributes:
        options: options of the evaluation.
        model: the model to evaluate.
        protocol: version of lm-eval, numbers of shots and other settings that results must share to
            be comparable.
        provenance: command, software and hashes of the inputs, which the result records.
        settings: settings of each part of the evaluation; a part is one task with one number of
            shots.
        parts: finished parts by their settings. Rank 0 adds each missing part once it is evaluated.
    """

    options: DownstreamOptions
    model: Model
    protocol: DownstreamProtocol
    provenance: Provenance
    settings: list[PartSettings]
    parts: dict[PartSettings, DownstreamPart]

    def missing(self) -> list[PartSettings]:
        """Settings of the parts that are not finished yet."""
        return [each for each in self.settings if each not in self.parts]


def evaluate_downstream(options: DownstreamOptions) -> DownstreamResult:
    """Evaluate a model on all tasks with all numbers of shots, and write the result.

    Every rank calls this function and gets the result (collective). Existing parts are not
    evaluated again; a task that cannot be evaluated leaves a gap.

    Raises:
        UserError: for invalid options or inputs, or if no task can be evaluated.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_downstream(options))
        gaps: list[Gap] = []
        if plan.missing():
            from megatron_chameleon.evaluation.lm_eval_model import ScorerLM

            reader = plan.model.reader(layout, bf16=options.evaluation_dtype == "bfloat16")
            scorer = Scorer(reader, options.evaluation_batch_size, plan.model.tokenizer())
            if layout.is_main:
                gaps = evaluate_parts(plan, ScorerLM(scorer))
                scorer.stop()
            else:
                scorer.serve()
        result = from_main(lambda: combine_parts(plan, gaps))
        if layout.is_main:
            result.save(options.output)
            print_result(result)
            print(f"written to {options.output}; next: evaluate the models to compare it with")
        return result


def check_tasks(options: TaskOptions) -> None:
    """Load the tasks with their data, and check that the gold answers of all questions are scored.

    Raises:
        UserError: for a task that is unknown or unavailable, or a question without a gold answer.
    """
    require_lm_eval()
    from megatron_chameleon.evaluation.tasks import TaskLibrary, TaskUnavailableError

    library = TaskLibrary(options.tasks, options.data_dir)
    for name in options.tasks:
        try:
            loaded = library.load(name)
            for shots in options.shots:
                loaded.set_shots(shots, options.fewshot_seed)
            loaded.require_gold_answers(options.limit)
        except TaskUnavailableError as error:
            raise UserError(f"--tasks {name}: {error}") from error


def plan_downstream(options: DownstreamOptions) -> DownstreamPlan:
    """Load and check the artifacts that ``options`` name, and the finished parts, without writing.

    Raises:
        UserError: for the first mistake found.
    """
    version = require_lm_eval()
    from megatron_chameleon.evaluation.tasks import TaskLibrary

    opened = open_model(options.checkpoint, tokenizer=options.tokenizer)
    model, tokenizer = opened.with_own_vocabulary()
    config, weights = model.config, model.hash
    check_model_layout(config, options.parallel, config.max_sequence_length)
    library = TaskLibrary(options.tasks, options.data_dir)  # raises for unknown task names
    check_output(options.output, DownstreamResult.KIND)
    require_writable(options.parts_dir, f"--work-dir {options.parts_dir}")
    protocol = DownstreamProtocol(
        lm_eval_version=version,
        shots=sorted(options.shots),
        limit=options.limit,
        fewshot_seed=options.fewshot_seed,
        dtype=options.evaluation_dtype,
    )
    common = {k: v for k, v in vars(protocol).items() if k != "shots"}
    data = {task: library.data_of(task) for task in options.tasks}
    settings = [
        PartSettings(checkpoint_hash=weights, task=task, shots=n, data=data[task], **common)
        for task in options.tasks
        for n in options.shots
    ]
    found = {each: find_part(options.parts_dir, each) for each in settings}
    parts = {each: part for each, part in found.items() if part is not None}
    inputs = {"checkpoint": weights, "tokenizer": tokenizer.sha256}
    return DownstreamPlan(options, model, protocol, provenance(options, inputs), settings, parts)


def evaluate_parts(plan: DownstreamPlan, model: ScorerLM) -> list[Gap]:
    """Evaluate the missing parts, write each as soon as it is complete, and return the gaps."""
    from megatron_chameleon.evaluation.tasks import TaskLibrary, TaskUnavailableError

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # hide lm-eval's logs of default values
    missing, start = plan.missing(), time.monotonic()
    tasks = list(dict.fromkeys(each.task for each in missing))
    library, loaded = TaskLibrary(tasks, plan.options.data_dir), None
    gaps: list[Gap] = []
    for done, each in enumerate(missing, 1):
        if (each.task, None) in [(gap.task, gap.shots) for gap in gaps]:
            continue
        shots = None  # a task that cannot be loaded leaves one gap for all shots
        try:
            if loaded is None or loaded.name != each.task:
                loaded = library.load(each.task)
            shots = each.shots
            part = evaluate_part(model, loaded, each)
        except TaskUnavailableError as error:
            gaps.append(Gap(each.task, shots, str(error)))
            print(f"not evaluated: {gaps[-1]}", flush=True)
            continue
        part.save(part_path(plan.options.parts_dir, each.task, each.shots))
        plan.parts[each] = part
        left = (time.monotonic() - start) / done * (len(missing) - done)
        score = part.score
        bits = "" if score.bits_per_byte is None else f", {_bits(score)} bits per byte"
        print(
            f"{done} of {len(missing)}: {each.task}, {each.shots}-shot: {part.metric} "
            f"{_percent(score)}{bits}, {len(part.answers):,} questions; "
            f"{tqdm.format_interval(left)} left",
            flush=True,
        )
    return gaps


def evaluate_part(model: ScorerLM, loaded: LoadedTask, settings: PartSettings) -> DownstreamPart:
    """Evaluate one task with one number of shots.

    Rank 0 calls this function while the other ranks serve the scorer's collective calls.

    Raises:
        TaskUnavailableError: if the task cannot be evaluated.
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
            bootstrap_iters=0,  # no bootstrap: Score.of computes the standard errors
            log_samples=True,
        )
    except Exception as error:  # a task can raise any type of error
        if model.failed:
            raise  # end the evaluation: other ranks may wait for a collective
        raise TaskUnavailableError(in_one_line(error)) from error
    assert found is not None, "lm-eval runs as a single rank"
    # If the task defines several filters of answers, the first one counts.
    samples = found["samples"][loaded.name]
    samples = [sample for sample in samples if sample["filter"] == samples[0]["filter"]]
    samples.sort(key=lambda sample: int(sample["doc_id"]))
    if not samples:
        raise TaskUnavailableError("the task's data set has no questions")
    if not all(sample.get(loaded.metric) in (0, 1) for sample in samples):
        raise TaskUnavailableError(f"the task's {loaded.metric} is not 0 or 1 for each question")
    has_acc = loaded.metric == "acc_norm" and all(sample.get("acc") in (0, 1) for sample in samples)
    bits = [each for each in map(loaded.gold_bits_per_byte, samples) if each is not None]
    hashes = "\n".join(sample["doc_hash"] for sample in samples)
    return DownstreamPart(
        settings=settings,
        metric=loaded.metric,
        version=str(loaded.task.VERSION),
        shots_from=loaded.shots_from,
        answers=_digits(samples, loaded.metric),
        acc_answers=_digits(samples, "acc") if has_acc else None,
        bits_per_byte=bits if len(bits) == len(samples) else None,
        truncated_requests=model.num_truncated,
        requests_hash=model.digest.hexdigest(),
        questions_hash=hashlib.sha256(hashes.encode()).hexdigest(),
        cost=stopwatch.cost(model.flops, model.scorer.layout.world_size),
    )


def _digits(samples: Sequence[dict[str, Any]], metric: str) -> str:
    return "".join("1" if sample[metric] else "0" for sample in samples)


def combine_parts(plan: DownstreamPlan, gaps: list[Gap]) -> DownstreamResult:
    """Combine the finished parts into the result of the evaluation.

    Raises:
        UserError: if no part is finished.
    """
    tasks: dict[str, TaskScore] = {}
    cost = Cost()
    for task in plan.options.tasks:
        found = ((each.shots, part) for each, part in plan.parts.items() if each.task == task)
        parts = dict(sorted(found, key=lambda item: item[0]))
        if len({part.questions_hash for part in parts.values()}) > 1:
            reason = (
                "the questions differ between numbers of shots, since the data set has changed; "
                f"delete {plan.options.parts_dir}/{task}-*shot.json and run again"
            )
            gaps.append(Gap(task, None, reason))
        elif parts:
            first = next(iter(parts.values()))
            by_shots = {
                shots: ShotScore(
                    **vars(part.score),
                    documents=len(part.answers),
                    truncated_requests=part.truncated_requests,
                    requests_hash=part.requests_hash,
                )
                for shots, part in parts.items()
            }
            mean = None
            if len(parts) == len(plan.protocol.shots):
                every = parts.values()
                values = _mean_by_question([each.values for each in every])
                assert values is not None
                mean = Score.of(
                    values,
                    _mean_by_question([each.bits_per_byte for each in every]),
                    _mean_by_question([each.acc_values for each in every]),
                )
            tasks[task] = TaskScore(first.metric, first.version, first.shots_from, by_shots, mean)
            cost = sum((part.cost for part in parts.values()), cost)
    if not tasks:
        raise UserError(f"no task could be evaluated, and nothing is written; {gaps[0]}")
    return DownstreamResult(
        checkpoint=str(plan.model.where),
        checkpoint_hash=plan.provenance.inputs["checkpoint"],
        step=plan.model.step,
        protocol=plan.protocol,
        tasks=tasks,
        gaps=gaps,
        provenance=plan.provenance,
        cost=cost,
    )


def _mean_by_question(values: Sequence[Sequence[float] | None]) -> list[float] | None:
    """Average ``values`` [numbers of shots][questions] over the numbers of shots.

    The result is None if a number of shots has none.
    """
    known = [each for each in values if each is not None]
    if len(known) < len(values):
        return None
    return [sum(each) / len(each) for each in zip(*known, strict=True)]


def print_result(result: DownstreamResult) -> None:
    """Print scores by task, accuracies by number of shots, gaps and truncated requests."""
    shots = result.protocol.shots
    columns = ["", "metric", *(f"{n}-shot" for n in shots), "mean ± standard error", "acc"]
    rows = [[*columns, "bits per byte"]]
    for name, score in result.tasks.items():
        found = [score.by_shots.get(number) for number in shots]
        cells = [f"{100 * each.accuracy:.2f}" if each else "-" for each in found]
        acc = _in_percent(*score.unnormalized(score.mean))
        row = [name, score.metric, *cells, _percent(score.mean), acc, _bits(score.mean)]
        rows.append(row)
    total = len({*result.tasks, *(gap.task for gap in result.gaps)})
    mean = f"mean of {len(result.complete_tasks)} of {total} tasks"
    total_mean = result.mean
    acc = "-" if total_mean is None else _in_percent(total_mean.acc, total_mean.acc_error)
    rows.append([mean, "", *[""] * len(shots), _percent(total_mean), acc, _bits(total_mean)])
    print("accuracy, %, and acc and bits per byte of the gold answers (mean over shots):")
    print("\n".join(align_columns(rows)))
    for gap in result.gaps:
        print(f"not evaluated: {gap}")
    for name, score in result.tasks.items():
        if truncated := sum(each.truncated_requests for each in score.by_shots.values()):
            print(
                f"note: {name}: {truncated:,} requests were longer than the model's sequence "
                "length; their contexts were truncated on the left"
            )


def _percent(score: Score | None) -> str:
    return "-" if score is None else _in_percent(score.accuracy, score.standard_error)


def _in_percent(share: float | None, error: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.2f}" + ("" if error is None else f" ± {100 * error:.2f}")


def _bits(score: Score | None) -> str:
    if score is None or score.bits_per_byte is None:
        return "-"
    error = "" if score.bits_per_byte_error is None else f" ± {score.bits_per_byte_error:.4f}"
    return f"{score.bits_per_byte:.4f}{error}"


if __name__ == "__main__":
    main()
