"""Which steps of a run update its model, and what is remembered of those that do not."""

from __future__ import annotations

from typing import Any

from megatron_chameleon.errors import UserError
from megatron_chameleon.training.guards import StepGuard
from megatron_chameleon.training.metrics import IntervalMeter
from megatron_chameleon.training.records import RunRecords
from megatron_chameleon.training.skipped import SkippedStep, streak_message
from megatron_chameleon.training.step import StepResult


class SkippedSteps:
    """Asks the guard about each step, and keeps the steps that it refuses.

    Args:
        records: of the run.
        meter: which knows the losses of a step by domain.
        state: what :meth:`state` gave when the checkpoint was written that the run goes on from;
            empty for a new run.
        hook_mixes: whether a hook decides on the mixture.

    Attributes:
        streak: those skipped in a row, up to the last step.
    """

    def __init__(
        self,
        records: RunRecords,
        meter: IntervalMeter,
        state: dict[str, Any],
        *,
        hook_mixes: bool = False,
    ) -> None:
        self._records, self._meter, self._hook_mixes = records, meter, hook_mixes
        self._options = records.plan.options
        self._guard = StepGuard(self._options.guards, state)
        self._objection: str | None = None
        self._since_log: list[SkippedStep] = []
        # Checkpoints of before did not keep it.
        self.streak = [SkippedStep.restored(step) for step in state.get("streak", ())]

    @property
    def count(self) -> int:
        """Steps skipped over the whole run."""
        return self._guard.skipped

    @property
    def updates(self) -> int:
        """Steps of the whole run that were not skipped."""
        return self._guard.updates

    def accepts(self, step: int, loss: float | None, grad_norm: float) -> bool:
        """Whether the step after ``step`` steps may update the model.

        Args:
            step: steps done before it.
            loss: mean over its tokens; None where none has a loss.
            grad_norm: of its gradient, before clipping.
        """
        schedule = self._records.samples.schedule
        phase = schedule.phases[schedule.phase_at(self._records.samples_at(step))]
        self._objection = self._guard.judge(loss, grad_norm, phase.first_sample)
        return self._objection is None

    def note(self, step: int, result: StepResult) -> None:
        """Keep the step that ``step`` ends with, if it was skipped; every rank calls this."""
        if not result.skipped:
            self.streak = []
            return
        assert self._objection is not None
        skipped = SkippedStep(
            step,
            self._objection,
            self._records.domain_samples(step),
            self._meter.domain_losses(result.domain_sums),
        )
        self.streak.append(skipped)
        self._since_log.append(skipped)
        if self._records.layout.is_main:
            print(skipped.line())

    def too_many(self, *, is_last: bool) -> bool:
        """Whether the run has to give up: after so many in a row, or with nothing learnt at all."""
        limit = self._options.guards.max_consecutive_skipped_steps
        return bool(self.streak) and (len(self.streak) >= limit or (is_last and not self.updates))

    def error(self) -> UserError:
        """What a run raises that gives up."""
        before = self._records.last_checkpoint(before_step=self.streak[0].step)
        return UserError(
            streak_message(
                self.streak,
                before,
                self._options.data.permutation,
                is_newest=before == self._records.last_checkpoint(),
                hook_mixes=self._hook_mixes,
                way_out=self._records.plan.way_out,
            )
        )

    def since_log(self) -> list[SkippedStep]:
        """Those that this has not given yet."""
        given, self._since_log = self._since_log, []
        return given

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that the run goes on as if it had not been interrupted."""
        return {**self._guard.state(), "streak": [step.saved() for step in self.streak]}
