"""A proxy whose training a method watches: whether what its folder holds is the method's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, TrainingRun
from megatron_chameleon.artifacts.checkpoint import (
    CheckpointRecord,
    checkpoint_folders,
    step_folder,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.proxy_run import way_out_of
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.resume import check_run_folder
from megatron_chameleon.training.way_out import WayOut

# The folder of its run, below that of the method.
PROXY = "proxy"


@dataclasses.dataclass(frozen=True)
class Watcher:
    """The method that watches a proxy.

    Attributes:
        method: its name, for people.
        hook: by which it watches.
    """

    method: str
    hook: type[TrainingHook]

    def state_in(self, record: CheckpointRecord, run_dir: Path, way_out: WayOut) -> dict[str, Any]:
        """The state of the hook in a checkpoint of the run in ``run_dir``.

        Raises:
            UserError: if another method, or none, has watched the run.
        """
        if record.hook is not None and record.hook.name == self.hook.__name__:
            return record.hook.state
        watched_by = record.hook.name if record.hook else "nothing"
        raise UserError(
            f"{run_dir} holds a run that {self.method} has not watched ({watched_by} has); "
            f"{way_out}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedPlan:
    """What every method plans that watches a proxy; each adds its own.

    Attributes:
        corpus: what is trained on.
        proxy_run: how the proxy is trained.
        shape: of the proxy.
        elsewhere: how a person chooses another folder for what is trained.
    """

    corpus: Corpus
    proxy_run: PretrainOptions
    shape: ModelShape
    elsewhere: str

    @property
    def way_out(self) -> WayOut:
        """What to advise where the proxy's folder holds another one."""
        return way_out_of(self.proxy_run.run_dir, self.elsewhere)


@dataclasses.dataclass(frozen=True)
class FinishedProxy:
    """A proxy at the end of its run: the run, the hash of its weights, and the hook's state."""

    run: TrainingRun
    hash: str
    state: dict[str, Any]


def state_so_far(plan: TrainingPlan, watcher: Watcher) -> dict[str, Any] | None:
    """The hook's state at a run's newest checkpoint; None if there is none. Nothing is written.

    What training would refuse of the folder is so found before anything else is trained.

    Raises:
        UserError: if the folder holds a run of other options, or one that was not watched so.
    """
    run_dir = plan.options.run_dir
    record = _newest_record(run_dir) if check_run_folder(plan) else None
    return None if record is None else watcher.state_in(record, run_dir, plan.way_out)


def finished_proxy(run_dir: Path, watcher: Watcher, way_out: WayOut) -> FinishedProxy:
    """What a run that is trained to its end has come to.

    Raises:
        UserError: if it was not watched so.
    """
    run = TrainingRun.load(run_dir)
    record = CheckpointRecord.load(step_folder(run.root, run.step))
    return FinishedProxy(run, record.hash, watcher.state_in(record, run_dir, way_out))


def require_same_rule(
    before: Mapping[str, Any], now: Mapping[str, Any], way_out: WayOut | str
) -> None:
    """Raises UserError for the first knob of the rule that is not as a proxy was trained with."""
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                f"the proxy was trained with another rule: {name} {before.get(name)}, not {value}; "
                f"{way_out}"
            )


def state_arrays(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], way_out: WayOut | str
) -> dict[str, Array]:
    """The arrays of a hook's state, float64, each of the shape that ``shapes`` gives it.

    Raises:
        UserError: for one that is missing or of another shape, or holds what is no finite number,
            as in a file that was damaged.
    """
    found = {}
    for name, shape in shapes.items():
        try:
            array = np.array(state.get(name), np.float64)
        except (TypeError, ValueError):  # rows of several lengths, or words
            array = np.array(math.nan)
        if array.shape != shape or not np.isfinite(array).all():
            raise UserError(
                f"the checkpoint of the proxy is damaged: its '{name}' is not the "
                f"{' x '.join(map(str, shape))} finite numbers of its domains; {way_out}"
            )
        found[name] = array
    return found


def _newest_record(run_dir: Path) -> CheckpointRecord | None:
    for folder in reversed(checkpoint_folders(run_dir)):
        try:
            return CheckpointRecord.load(folder)
        except UserError:  # damaged: training tells of it, and goes on from the one before
            continue
    return None
