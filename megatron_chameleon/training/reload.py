"""Weights that another program changes during a run: ``--reload-mixture``."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_chameleon.artifacts import Mixture, MixtureWarning
from megatron_chameleon.blend.dataset import check_enough_tokens, check_weights
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan, weights_for

LOG_NAME = "reloaded_mixtures.jsonl"
# Weights that differ by less are equal: files may hold rounded weights.
_SMALLEST_CHANGE = 1e-9


class ReloadedMixture(TrainingHook):
    """A hook that reads the mixture from a file every ``--reload-interval`` steps.

    Rank 0 reads the file, and all ranks use its weights from the next step on. A file that is
    missing, damaged or has other domains than the run leaves the weights unchanged, with a warning.

    The run's folder has a log of all reads. A resumed run repeats the reads after its checkpoint
    from this log, so that it samples what the interrupted run sampled.

    Args:
        plan: plan of the run, with ``options.reload.reload_mixture`` set.
        layout: layout of the ranks.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__()
        path = plan.options.reload.reload_mixture
        assert path is not None
        self._path, self._log = path, plan.options.run_dir / LOG_NAME
        self._plan, self._layout = plan, layout
        self.mixture_interval = plan.options.reload.reload_interval
        weights = np.array(plan.schedule.weights_at(0))
        self._weights: list[float] = (weights / weights.sum()).tolist()
        self._changes = 0
        self._earlier: dict[int, list[float] | None] = {}

    def prepare(self) -> None:
        """Read the log of an interrupted run; on rank 0, warn if the file cannot be used."""
        if self._layout.is_main:
            if not self._plan.options.overwrite and self._log.is_file():
                self._earlier = read_log(self._log)
            self._read("now")

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> list[float] | None:
        """Read the file; return its weights if they have changed."""
        weights = from_main(lambda: self._weights_at(step))
        if weights is None or np.allclose(weights, self._weights, rtol=0, atol=_SMALLEST_CHANGE):
            return None
        if self._layout.is_main:
            pairs = zip(self._plan.data.names, self._weights, weights, strict=True)
            moves = (f"{name} {old:.4f} -> {new:.4f}" for name, old, new in pairs if old != new)
            print(f"mixture of {self._path} from step {step + 1} on: {', '.join(moves)}")
        self._weights = weights
        self._changes += 1
        return weights

    def _weights_at(self, step: int) -> list[float] | None:
        """Weights of an earlier read after ``step`` steps, or else of the file, which is logged."""
        if step in self._earlier:
            return self._earlier[step]
        weights = self._read(f"after step {step}")
        try:
            _append_line(self._log, json.dumps({"step": step, "weights": weights}))
        except OSError as error:
            warnings.warn(f"cannot write {self._log}: {error}", stacklevel=2)
        return weights

    def _read(self, when: str) -> list[float] | None:
        """Weights of the run's domains in the file; None if they cannot be used."""
        data = self._plan.data
        try:
            mixture = Mixture.load(self._path)
            if missing := [name for name in data.names if name not in mixture.weights]:
                raise UserError(f"{self._path}: there is no weight of '{missing[0]}'")
            weights = weights_for(data, mixture)
            check_weights(data, weights)
            check_enough_tokens(data, weights, self._plan.options.seq_length)
        except UserError as error:
            warnings.warn(
                f"--reload-mixture, read {when}: {error}; the weights are unchanged",
                MixtureWarning,
                stacklevel=2,
            )
            return None
        return weights

    def metrics(self) -> dict[str, Any]:
        """Return the current weights, and how often they have changed."""
        names = self._plan.data.names
        return {"weights": dict(zip(names, self._weights, strict=True)), "changes": self._changes}

    def state_dict(self) -> dict[str, Any]:
        """Return the current weights, and how often they have changed."""
        return {"weights": self._weights, "changes": self._changes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self._weights, self._changes = list(state["weights"]), state["changes"]


def _append_line(path: Path, line: str) -> None:
    """Append ``line`` to a file, whose last line may be truncated."""
    with path.open("a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            if stream.read(1) != b"\n":
                stream.write(b"\n")  # or else this line would be lost, too
        stream.write(f"{line}\n".encode())


def read_log(path: Path) -> dict[int, list[float] | None]:
    """Return step -> weights that were read after it; None if the file could not be used.

    A line that a crash has truncated is skipped: its read has had no effect on a step.
    """
    found: dict[int, list[float] | None] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        found[record["step"]] = record["weights"]
    return found
