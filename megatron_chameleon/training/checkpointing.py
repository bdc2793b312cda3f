"""Writing the checkpoints of a run as it goes on, whatever becomes of a single one."""

from __future__ import annotations

import warnings

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, CheckpointWarning
from megatron_chameleon.artifacts.checkpoint_upkeep import keep_last
from megatron_chameleon.artifacts.training_run import FailedSave
from megatron_chameleon.checkpoint.save import SaveError, plan_save
from megatron_chameleon.checkpoint.state import State
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.records import RunRecords


class Checkpointing:
    """Every rank makes the same calls at the same steps; one save at most is under way.

    A save that fails is told in a :class:`CheckpointWarning` and in ``records.failed_saves``, and
    the run goes on; the checkpoint before it is as it was.
    """

    def __init__(self, records: RunRecords) -> None:
        options = records.plan.options
        self._options, self._run_dir = options.checkpointing, options.run_dir
        self._interval, self._records = options.save_interval, records
        self._queue = AsyncCallsQueue()
        self._under_way: CheckpointRecord | None = None

    def save(self, state: State, record: CheckpointRecord, *, is_last: bool) -> None:
        """Write a checkpoint, or begin to.

        Args:
            state: what it holds; with ``--async-save`` it may change as soon as this returns.
            record: what is said of it.
            is_last: whether the run leaves after it. It is then written before this returns, and
                has to succeed, since all since the one before would be lost.

        Raises:
            UserError: on every rank, if the last one cannot be written.
        """
        self.wait()
        try:
            request = plan_save(state, record, is_latest=True)
            if self._options.async_save and not is_last:
                self._queue.schedule_async_request(request)
                self._under_way = record
                return
            request.execute_sync()
        except SaveError as error:
            if is_last:
                raise UserError(
                    f"{error}; free space and run the same command again: it goes on from "
                    f"{self._records.last_checkpoint() or 'the beginning'}"
                ) from error
            self._note_failure(record, error)
            return
        if not record.guard.get("streak"):  # or the one from before the skipped steps might go
            self._forget_old_ones()

    def poll(self) -> bool:
        """Whether the save that was under way has come to its end, well or not."""
        return self._finish(blocking=False)

    def wait(self) -> bool:
        """Let the save that is under way come to its end; whether there was one."""
        return self._finish(blocking=True)

    def _finish(self, *, blocking: bool) -> bool:
        record = self._under_way
        if record is None:
            return False
        try:
            if not self._queue.maybe_finalize_async_calls(blocking=blocking):
                return False
        except SaveError as error:
            self._note_failure(record, error)
        else:
            self._forget_old_ones()
        self._under_way = None
        return True

    def _note_failure(self, record: CheckpointRecord, error: SaveError) -> None:
        self._records.failed_saves.append(FailedSave(record.step, str(error)))
        before = self._records.last_checkpoint()
        warnings.warn(
            f"{error}; training goes on, and {before or 'no checkpoint'} is the last one: free "
            f"space, the next is tried after the next {self._interval} steps",
            CheckpointWarning,
            stacklevel=2,
        )

    def _forget_old_ones(self) -> None:
        if not self._records.layout.is_main:
            return
        try:
            keep_last(self._run_dir, self._options.keep_last_checkpoints)
        except OSError as error:
            warnings.warn(f"cannot delete an old checkpoint: {error}", CheckpointWarning, 2)
