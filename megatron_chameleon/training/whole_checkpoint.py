"""The newest checkpoint of a run of which every byte is as it was written."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, checkpoint_folders
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout, from_main, on_every_rank
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.way_out import WayOut


@dataclasses.dataclass(frozen=True)
class Found:
    """The newest whole checkpoint, if any, and what is wrong with those that are newer."""

    checkpoint: CheckpointRecord | None
    problems: list[str]


def newest_whole_checkpoint(run_dir: Path, layout: Layout, way_out: WayOut) -> Found:
    """Look through the checkpoints of a run, newest first. Every rank calls this.

    Raises:
        UserError: on every rank, if there are checkpoints and all of them are damaged.
    """
    folders = from_main(lambda: checkpoint_folders(run_dir))
    problems: list[str] = []
    for folder in reversed(folders):
        try:
            checkpoint = from_main(partial(CheckpointRecord.load, folder))
            verify_together(checkpoint, layout)
        except UserError as error:
            problems.append(str(error))
        else:
            return Found(checkpoint, problems)
    if problems:
        raise UserError(
            f"{problems[0]}: no checkpoint of {run_dir} is whole; restore one from a copy, or "
            f"{way_out.anew}"
        )
    return Found(None, [])


def verify_together(checkpoint: CheckpointRecord, layout: Layout) -> None:
    """Compare the hashes of all files; the ranks share the work.

    Raises:
        UserError: on every rank, if one of them finds a file that is not as it was written.
    """
    share = layout.rank, layout.world_size
    total = checkpoint.share_bytes(*share)
    what = f"verifying step {checkpoint.step}"
    with progress_bar(total, "B", what, quiet=not layout.is_main) as bar:
        on_every_rank(lambda: checkpoint.verify(*share, bar.update))
