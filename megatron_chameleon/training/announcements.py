"""What a run says at its beginning and at its end, on rank 0."""

from __future__ import annotations

from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.training.drawn import drawn_lines, planned_epochs
from megatron_chameleon.training.metrics import duration
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.records import RunRecords


def announce(records: RunRecords) -> None:
    """Say what starts."""
    if not records.layout.is_main:
        return
    plan, layout, step = records.plan, records.layout, records.first_step
    verb = f"continuing at step {step}" if step else "training"
    print(
        f"{verb}: {_size(plan)}, {plan.shape.num_parameters:,} parameters, "
        f"{plan.options.train_iters} steps of {plan.tokens_per_step:,} tokens on "
        f"{layout.world_size} x {layout.describe()['device']} (tensor {layout.tensor_size}, "
        f"pipeline {layout.pipeline_size}, data {layout.data_size})"
    )
    if plan.pretrained and not step:
        print("\n".join(plan.pretrained.lines))
    print("\n".join(_mixture_lines(records)))
    behind = plan.options.profiling.profile_step_start
    if plan.options.profiling.profile and behind < step:
        print(f"no --profile: the run is past --profile-step-start {behind}; give {step} or more")


def say_finished(records: RunRecords, step: int) -> None:
    """Say what was made, and what can be run next."""
    if not records.layout.is_main:
        return
    options = records.plan.options
    print(
        f"{_summary(records, step)}\n"
        f"next: tools/compute_mixture.py or tools/evaluate.py perplexity, with "
        f"--corpus {options.corpus or 'CORPUS'} --checkpoint {options.run_dir}"
    )


def say_stopped(records: RunRecords, step: int, stopped_by: str, *, saved: bool) -> None:
    """Say why the run leaves early, and how it goes on."""
    if not records.layout.is_main:
        return
    nothing = f"stopped at step {step}: no step has updated the model, so there is nothing to save"
    print(
        f"{_summary(records, step) if saved else nothing}\n"
        f"stopped by {stopped_by} at step {step} of {records.plan.options.train_iters}; to go on, "
        "run the same command again"
    )


def say_not_begun(records: RunRecords, stopped_by: str) -> None:
    """Say that a run leaves before its first step, with its folder as it was."""
    if records.layout.is_main:
        print(
            f"stopped by {stopped_by} before step {records.first_step + 1} of "
            f"{records.plan.options.train_iters}; to go on, run the same command again"
        )


def _size(plan: TrainingPlan) -> str:
    size = plan.shape.size
    return plan.options.model_size or f"{size.num_layers} layers of width {size.hidden_size}"


def _summary(records: RunRecords, step: int) -> str:
    cost = records.cost(step)
    return (
        f"trained to step {step} in {duration(cost.wall_seconds)}, {cost.flops:.2e} FLOPs\n"
        f"drawn so far:\n{drawn_lines(records.drawn())}\n"
        f"checkpoint: {step_folder(records.plan.options.run_dir, step)}"
    )


def _mixture_lines(records: RunRecords) -> list[str]:
    """The mixture that the run starts or goes on with, and those that are planned."""
    plan, schedule = records.plan, records.samples.schedule
    epochs = planned_epochs(plan.data, schedule, plan.num_samples, plan.options.seq_length)
    lines = [
        f"mixture {plan.mixture.method}: "
        + ", ".join(
            f"{name} {domain.weight:.3f} ({epochs[name]:.2f} epochs)"
            for name, domain in records.drawn().items()
        )
    ]
    done = records.samples_at(records.first_step)
    for phase in schedule.phases:
        if phase.first_sample >= max(done, 1):
            shares = zip(plan.data.names, phase.weights, strict=True)
            step = phase.first_sample // plan.options.global_batch_size
            lines.append(f"from step {step}: " + ", ".join(f"{n} {w:.3f}" for n, w in shares))
    return lines
