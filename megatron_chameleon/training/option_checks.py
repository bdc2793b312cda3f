"""What is checked of the options of all that goes on beside the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.blend.data_path import DataPath
from megatron_chameleon.errors import UserError
from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.logging import LoggingOptions
from megatron_chameleon.options.online import OnlineOptions
from megatron_chameleon.options.profiling import ProfilingOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.options.validation import ValidationOptions
from megatron_chameleon.training.loggers import wants_wandb


def check_watching(options: PretrainOptions) -> None:
    """Raises UserError for values by which a run cannot be watched."""
    check_overwrite(options)
    check_guards(options.guards)
    check_validation(options.validation, options.train_iters)
    check_logging(options.logging)
    check_profiling(options.profiling, options.train_iters)
    check_online(options.online, options.train_iters)


def check_overwrite(options: PretrainOptions) -> None:
    """Raises UserError if --overwrite would delete what the run is to read."""
    if not options.overwrite:
        return
    data = options.data
    read: dict[str, Sequence[Path | str | None]] = {
        "--corpus": [options.corpus],
        "--pretrained-checkpoint": [options.pretrained_checkpoint],
        "--mixture": [options.mixture],
        "--tokenizer-model": [data.tokenizer_model],
        "--data-cache-path": [data.data_cache_path],
        "--data-path": DataPath.parse(data.data_path).prefixes if data.data_path else [],
        "--mixture-change": [change.partition("=")[2] for change in data.mixture_changes],
    }
    folder = options.run_dir.resolve()
    for flag, paths in read.items():
        for path in paths:
            if path and Path(path).resolve().is_relative_to(folder):
                raise UserError(
                    f"{flag} {path} lies in {options.run_dir}, which --overwrite deletes; choose "
                    "another --run-dir"
                )


def check_guards(options: GuardOptions) -> None:
    """Raises UserError for numbers that no step can be judged by."""
    if options.spike_factor == 0:
        _require_default(options, "spike_window", "only --spike-factor has a window")


def check_validation(options: ValidationOptions, train_iters: int) -> None:
    """Raises UserError for counts that no validation can have, or if there would be none."""
    if not 0 < options.eval_interval <= train_iters:
        never = f"--train-iters {train_iters} end before the first validation"
        if options.eval_interval > 0:
            _require_default(options, "eval_interval", never)
        why = never if options.eval_interval else "--eval-interval 0 validates never"
        _require_default(options, "eval_iters", why)


def check_logging(options: LoggingOptions) -> None:
    """Raises UserError for a name that nobody would be told."""
    if not wants_wandb(options):
        why = "without --wandb-project or WANDB_API_KEY nothing is sent to Weights & Biases"
        _require_default(options, "wandb_exp_name", why)


def check_profiling(options: ProfilingOptions, train_iters: int) -> None:
    """Raises UserError for steps that cannot be profiled."""
    start, end = options.profile_step_start, options.profile_step_end
    if not options.profile:
        for field in ("profile_step_start", "profile_step_end"):
            _require_default(options, field, "there is no trace without --profile")
    elif not 0 <= start < end <= train_iters:
        raise UserError(
            f"--profile-step-start {start} --profile-step-end {end}: give steps from 0 to "
            f"--train-iters {train_iters}, the first below the second"
        )


def check_online(options: OnlineOptions, train_iters: int) -> None:
    """Raises UserError for a mixture that would never be computed anew, or not at all."""
    interval = options.online_interval
    if interval is None:
        for field in ("online_windows", "online_layer", "online_recipe", "online_smoothing"):
            _require_default(options, field, "without --online-interval the mixture stays")
        return
    if not 1 <= interval < train_iters:
        raise UserError(
            f"--online-interval {interval}: give steps from 1 to {train_iters - 1}, one less than "
            "--train-iters, or leave it out"
        )


def _require_default(options: Any, field: str, why: str) -> None:
    """Refuse a value that would do nothing, if it was given."""
    value = getattr(options, field)
    if value != getattr(type(options)(), field):
        raise UserError(f"--{field.replace('_', '-')} {value}: {why}; leave it out")
