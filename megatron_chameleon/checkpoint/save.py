"""Writing a checkpoint: by all ranks, under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, hash_files
from megatron_chameleon.artifacts.checkpoint_upkeep import (
    naming_latest,
    remove_leftovers,
    temporary_name,
)
from megatron_chameleon.artifacts.files import flush_to_disk, replace_folder
from megatron_chameleon.checkpoint.state import State
from megatron_chameleon.checkpoint.write import HashingSaveStrategy, Shares, first_line
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import from_main


class SaveError(UserError):
    """A checkpoint could not be written; every rank raises it. Earlier ones are as they were."""


def save_checkpoint(state: State, record: CheckpointRecord) -> None:
    """Write ``state`` and ``record`` to ``record.root``. Every rank calls this.

    The folder has its name only once it is complete; a copy left by a killed run is removed.

    Raises:
        UserError: on every rank, if the disk of any is full or refuses; earlier checkpoints are as
            they were.
    """
    try:
        plan_save(state, record).execute_sync()
    except SaveError as error:
        raise UserError(
            f"{error}; free space or choose another folder, and run again: earlier checkpoints are "
            "as they were"
        ) from error


def plan_save(state: State, record: CheckpointRecord, *, is_latest: bool = False) -> AsyncRequest:
    """What is left to do of a save: all but the planning. Every rank calls this.

    Each data-parallel rank writes a part of what they have in common
    (:class:`FullyParallelSaveStrategyWrapper`). Nothing waits for a rank on which something fails.

    Args:
        state: what is saved; its tensors may change once the request's writing has begun.
        record: what is said of it. Its ``files`` are filled in.
        is_latest: whether it becomes the latest checkpoint of the run whose folder it is in.

    Raises:
        SaveError: on every rank, here or by the last of the request's functions.
    """
    save = _Save(record, is_latest, temporary_name(record.root, from_main(_token)))
    shards, common = save_preprocess(state)
    from_main(lambda: save.begin(common))
    strategy = FullyParallelSaveStrategyWrapper(
        HashingSaveStrategy(save.complete),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    return strategy.async_save(shards, str(save.temporary))


@dataclasses.dataclass(frozen=True)
class _Save:
    """What rank 0 does of a save, before the others and after them."""

    record: CheckpointRecord
    is_latest: bool
    temporary: Path

    def begin(self, common: dict[str, Any]) -> None:
        """Make the temporary folder, with the values in it that are no tensors."""
        with self._refusing():
            remove_leftovers(self.record.root)
            self.temporary.mkdir(parents=True)
            TorchCommonSaveStrategy("torch", 1).save_common(common, self.temporary)

    def complete(self, shares: Shares) -> None:
        """Write what is missing, and give the folder its name."""
        with self._refusing():
            if shares.problem:
                raise OSError(shares.problem)
            shares.write_index()
            save_config(CheckpointingConfig("torch_dist", 1), str(self.temporary))
            own = hash_files(self.temporary, leave_out=shares.files)
            files = dict(sorted({**shares.files, **own}.items()))
            dataclasses.replace(self.record, root=self.temporary, files=files).save()
            for name in own:
                flush_to_disk(self.temporary / name)
            flush_to_disk(self.temporary)
            with naming_latest(self.record.root) if self.is_latest else contextlib.nullcontext():
                replace_folder(self.temporary, self.record.root)
            flush_to_disk(self.record.root.parent)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Tell in one line what goes wrong; what cannot be used takes no room then."""
        try:
            yield
        except (OSError, RuntimeError, UserError) as error:  # RuntimeError: of torch, for files
            shutil.rmtree(self.temporary, ignore_errors=True)
            raise SaveError(
                f"cannot write the checkpoint {self.record.root} ({first_line(error)})"
            ) from error


def _token() -> str:
    return uuid.uuid4().hex[:8]
