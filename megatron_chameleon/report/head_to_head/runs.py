"""The base models of a head-to-head: finished, trained by what they are called after, evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import EvaluationResult, Mixture, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, checkpoint_folders
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import same_weights
from megatron_chameleon.report.run_folder import BASE, EVALUATION, RunFolder

HOW = "examples/compare_methods.sh goes on with what is missing"
# Options of a base run that may differ between those that are compared: where it is, what is
# compared, and what changes no result.
MAY_DIFFER = {"run_dir", "mixture", "seed", "micro_batch_size", "compile_layers", "parallel"}
MAY_DIFFER |= {"dry_first_step", "log_interval", "save_interval", "overwrite", "checkpointing"}
MAY_DIFFER |= {"stopping", "validation", "logging", "profiling"}


def finished_run(folder: RunFolder, name: str) -> TrainingRun:
    """The base run ``name``. Raises UserError unless it is there and has come to its end."""
    run = folder.base_runs.get(name)
    if run is None or run.status != "finished":
        what = "is not there" if run is None else f"is {run.status}"
        raise UserError(f"{folder.root / BASE / name} {what}; {HOW}")
    return run


def last_checkpoint(run: TrainingRun) -> CheckpointRecord:
    """What the last checkpoint of ``run`` says of itself; the weights are not read.

    Raises:
        UserError: if there is none, or a file of it lacks bytes.
    """
    folders = checkpoint_folders(run.root)
    if not folders:
        raise UserError(
            f"{run.root} has no checkpoint, by which its evaluation is known; put it back, or "
            f"delete the run, and {HOW}"
        )
    return CheckpointRecord.load(folders[-1])


def evaluation_of(folder: RunFolder, name: str, run: TrainingRun) -> EvaluationResult:
    """The evaluation of the base run ``name``. Raises UserError unless of its last weights."""
    result, path = folder.evaluations.get(name), folder.root / EVALUATION / f"{name}.json"
    if result is None:
        raise UserError(f"{path} is not there; {HOW}")
    require_of_last_checkpoint(path, result, run)
    return result


def require_of_last_checkpoint(path: Path, result: EvaluationResult, run: TrainingRun) -> None:
    """``result``, which ``path`` holds, is of the weights that ``run`` ended with.

    Raises:
        UserError: if it is of another step or of other weights.
    """
    if result.step != run.step:
        raise UserError(f"{path} is of step {result.step}, the run has {run.step}; {HOW}")
    checkpoint = last_checkpoint(run)
    if result.checkpoint_hash != checkpoint.hash:
        raise UserError(
            f"{path} is of other weights than {checkpoint.root} (it names {result.checkpoint}); "
            f"{HOW}"
        )


def require_drawn_by(mixture: Mixture, path: str, name: str, run: TrainingRun, seed: int) -> None:
    """The base run ``name`` drew by ``mixture``, which ``path`` holds, with ``seed``.

    Raises:
        UserError: if it did not.
    """
    if not same_weights(run.mixture, mixture.weights):
        raise UserError(
            f"{path} has changed since {BASE}/{name} was trained with it; delete that run and its "
            f"evaluation, and {HOW}"
        )
    trained_with = run.provenance.options.get("seed")
    if trained_with != seed:
        raise UserError(
            f"{BASE}/{name} was trained with --seed {trained_with}, which its name does not say; "
            f"delete it, and {HOW}"
        )


def require_same_settings(runs: Iterable[TrainingRun]) -> None:
    """Base models that are compared differ in their mixture and seed alone.

    Raises:
        UserError: naming two that do not, and the option.
    """
    first, *others = runs
    for run in others:
        one, other = (_that_matter(r.provenance.options) for r in (first, run))
        different = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        if different:
            raise UserError(
                f"{run.root} and {first.root} differ in the option {different[0]} "
                f"({other.get(different[0])} and {one.get(different[0])}); compare runs that "
                "differ in their mixture and seed alone"
            )


def _that_matter(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in MAY_DIFFER}
