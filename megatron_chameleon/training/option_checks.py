"""What is checked of the options of saving, guards, stopping, validation and profiling."""

from __future__ import annotations

import math

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.checkpointing import CheckpointingOptions
from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.profiling import ProfilingOptions
from megatron_chameleon.options.stopping import StoppingOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.options.validation import ValidationOptions


def check_watching(options: PretrainOptions) -> None:
    """Raises UserError for values by which a run cannot be watched."""
    check_checkpointing(options.checkpointing)
    check_guards(options.guards)
    check_stopping(options.stopping)
    check_validation(options.validation)
    check_profiling(options.profiling, options.train_iters)


def check_checkpointing(options: CheckpointingOptions) -> None:
    """Raises UserError for a number of checkpoints that cannot be kept."""
    if options.keep_last_checkpoints < 0:
        raise UserError(
            f"--keep-last-checkpoints {options.keep_last_checkpoints}: give 0 for all, or more"
        )


def check_guards(options: GuardOptions) -> None:
    """Raises UserError for numbers that no step can be judged by."""
    if options.max_consecutive_skipped_steps < 1:
        raise UserError(
            f"--max-consecutive-skipped-steps {options.max_consecutive_skipped_steps}: give a "
            "whole number from 1 on"
        )
    if not 0 <= options.spike_factor < math.inf:
        raise UserError(f"--spike-factor {options.spike_factor}: give 0 for none, or a number")
    if options.spike_window < 2:
        raise UserError(f"--spike-window {options.spike_window}: give a whole number from 2 on")


def check_stopping(options: StoppingOptions) -> None:
    """Raises UserError for a time that has passed before the start."""
    minutes = options.exit_duration_in_mins
    if minutes is not None and not 0 < minutes < math.inf:
        raise UserError(f"--exit-duration-in-mins {minutes}: give a number above 0")


def check_validation(options: ValidationOptions) -> None:
    """Raises UserError for counts that no validation can have."""
    if options.eval_interval < 0:
        raise UserError(f"--eval-interval {options.eval_interval}: give 0 for never, or more")
    if options.eval_iters < 1:
        raise UserError(f"--eval-iters {options.eval_iters}: give a whole number from 1 on")


def check_profiling(options: ProfilingOptions, train_iters: int) -> None:
    """Raises UserError for steps that cannot be profiled."""
    start, end = options.profile_step_start, options.profile_step_end
    if options.profile and not 0 <= start < end <= train_iters:
        raise UserError(
            f"--profile-step-start {start} --profile-step-end {end}: give steps from 0 to "
            f"--train-iters {train_iters}, the first below the second"
        )
