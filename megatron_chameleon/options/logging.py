"""Where a run's figures go, besides metrics.jsonl and the terminal."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoggingOptions:
    """Where a run's figures go, besides metrics.jsonl and the terminal."""

    tensorboard: bool = True
    """Write them for TensorBoard too, to the folder 'tensorboard' of the run."""
    wandb_project: str | None = None
    """Send them to this project of Weights & Biases too. Where WANDB_API_KEY is set they are sent
    without it, to WANDB_PROJECT."""
    wandb_exp_name: str | None = None
    """What Weights & Biases calls the run; the name of its folder unless given."""
