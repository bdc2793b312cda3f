"""Weights that another program changes during a run: ``--reload-mixture``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_chameleon.artifacts import Mixture, MixtureWarning
from megatron_chameleon.blend.dataset import check_enough_tokens, check_weights
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan, weights_for


class ReloadedMixture(TrainingHook):
    """A hook that reads the mixture from a file every ``--reload-interval`` steps.

    Rank 0 reads the file, and all ranks use its weights from the same step on. A file that is
    missing, damaged or does not fit the run's domains leaves the weights unchanged, with a warning.

    Args:
        plan: plan of the run, with ``options.reload.reload_mixture`` set.
        layout: layout of the ranks.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__()
        path = plan.options.reload.reload_mixture
        assert path is not None
        self._path: Path = path
        self._plan, self._layout = plan, layout
        self.mixture_interval = plan.options.reload.reload_interval
        self._weights = list(plan.schedule.weights_at(0))
        self._changes = 0

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> list[float] | None:
        """Read the file; return its weights if they have changed."""
        weights = from_main(self._read)
        if weights is None or weights == self._weights:
            return None
        if self._layout.is_main:
            pairs = zip(self._plan.data.names, self._weights, weights, strict=True)
            moves = (f"{name} {old:.4f} -> {new:.4f}" for name, old, new in pairs if old != new)
            print(f"mixture of {self._path} from step {step} on: {', '.join(moves)}")
        self._weights = weights
        self._changes += 1
        return weights

    def _read(self) -> list[float] | None:
        """Weights of the run's domains in the file; None if they cannot be used."""
        data = self._plan.data
        try:
            weights = weights_for(data, Mixture.load(self._path))
            check_weights(data, weights)
            check_enough_tokens(data, weights, self._plan.options.seq_length)
        except UserError as error:
            warnings.warn(
                f"--reload-mixture: {error}; the weights are unchanged",
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
