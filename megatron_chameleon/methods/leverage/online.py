"""Chameleon during training: the mixture follows the model's own embeddings of the domains.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1, on the model that is trained in place of a
proxy, every so many steps. The paper names such weights as work to come; smoothing is ours.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.artifacts import MixtureWarning
from megatron_chameleon.embedding.embed import embed_windows, windows_flops
from megatron_chameleon.embedding.windows import HeldWindows, hold_windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.mixture import DegenerateScoreWarning, chameleon_weights
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.readout import Reader, check_layer
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.reading import reading

# Layouts differ by rounding, and mixtures of other digits draw other samples.
DECIMALS = 6
MOVES_SHOWN = 3


class OnlineChameleon(TrainingHook):
    """Weighs the domains anew every ``--online-interval`` steps.

    The windows that are embedded are drawn once, by the run's seed and the domain. As many go
    through the model at a time as a micro-batch has sequences, so that a training step takes more
    memory. Domains that the run's mixture gives no weight stay without; the others have text for a
    sample at least, or the plan would have refused them.

    Args:
        plan: of the run, with ``options.online.online_interval`` given.
        layout: of the ranks.

    Raises:
        UserError: for a layer that the model does not have, or fewer than two domains with a
            weight.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__()
        options = plan.options
        online = options.online
        assert online.online_interval is not None
        self.mixture_interval = online.online_interval
        self._online, self._shape, self._layout = online, plan.shape, layout
        self._batch_size = options.micro_batch_size
        self._layer = check_layer(plan.shape, online.online_layer, "--online-layer")
        weights = np.array(plan.schedule.weights_at(0), np.float64)
        self._weights = dict(zip(plan.data.names, (weights / weights.sum()).tolist(), strict=True))
        self._names = [name for name, weight in self._weights.items() if weight > 0]
        self._recomputed = 0
        if len(self._names) < 2:
            raise UserError(
                f"--online-interval weighs domains against each other, and only '{self._names[0]}' "
                f"of {plan.data.where} has a weight; give two of them one, or leave it out"
            )
        self._held = hold_all(plan, self._names)

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> list[float] | None:
        """The weights from ``step`` on; None where they stay as they are.

        Hidden states that are not finite say nothing of the domains: the weights stay, with a
        warning, and whether the run can go on is for its guard to judge.
        """
        start = time.perf_counter()
        with reading(model, self._shape, self._layout) as reader:
            means = self._means(reader)
        if isinstance(means, str):
            warnings.warn(
                f"the mixture stays as it is at step {step}: hidden states of '{means}' after "
                f"layer {self._layer} are not finite; the run goes on as long as its loss is",
                MixtureWarning,
                stacklevel=2,
            )
            return None
        before = self._in_use()
        # On one rank alone: the last digits may hang on the processor, and ranks that draw by
        # other weights would not train on the same batches.
        self._weights = from_main(lambda: self._weigh(means))
        self._recomputed += 1
        after = self._in_use()
        if after == before:
            return None
        if self._layout.is_main:
            seconds = time.perf_counter() - start
            count = sum(len(held.windows) for held in self._held.values())
            print(
                f"mixture from step {step} on: {largest_moves(before, after)}; "
                f"{count:,} windows embedded in {seconds:.2f} s"
            )
        return list(after.values())

    def metrics(self) -> dict[str, Any]:
        """The weights in use, and how many times they were computed."""
        return {"weights": self._in_use(), "recomputed": self._recomputed}

    def state_dict(self) -> dict[str, Any]:
        """The weights with all their digits, and how many times they were computed."""
        return {"weights": dict(self._weights), "recomputed": self._recomputed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the weights of ``state``."""
        self._weights, self._recomputed = dict(state["weights"]), state["recomputed"]

    def _in_use(self) -> dict[str, float]:
        return {name: round(weight, DECIMALS) for name, weight in self._weights.items()}

    def _means(self, reader: Reader) -> Array | str:
        """[k, h] float64: the mean embedding of each domain that has a weight, on every rank.

        The name of a domain instead, if its hidden states are not finite.
        """
        rows = []
        for name, held in self._held.items():
            self.flops += windows_flops(self._shape, self._layer, held.windows)
            with progress_bar(len(held.windows), " windows", quiet=True) as silent:
                try:
                    vectors = embed_windows(
                        reader, held.tokens, held.windows, self._layer, self._batch_size, silent
                    )
                except UserError:  # it says that they are not, and what to do about a proxy
                    return name
            rows.append(vectors.mean(axis=0, dtype=np.float64))
        return np.stack(rows)

    def _weigh(self, means: Array) -> dict[str, float]:
        """Every domain's smoothed weight, from the embeddings of those that have one."""
        with warnings.catch_warnings():
            # Told below, by the domains' names instead of their positions.
            warnings.simplefilter("ignore", DegenerateScoreWarning)
            result = chameleon_weights(means, "pretrain", self._online.online_recipe)
        if result.degenerate:
            held = ", ".join(f"'{self._names[position]}'" for position in result.degenerate)
            warnings.warn(
                f"the leverage score of {held} is at a limit, so these weights say little: try "
                "--online-recipe scaled, or a longer --online-interval",
                DegenerateScoreWarning,
                stacklevel=2,
            )
        kept = self._online.online_smoothing
        new = dict(zip(self._names, result.weights.tolist(), strict=True))
        return {
            name: kept * weight + (1 - kept) * new.get(name, 0.0)
            for name, weight in self._weights.items()
        }


def hold_all(plan: TrainingPlan, names: Sequence[str]) -> dict[str, HeldWindows]:
    """Domain -> its windows, for those of ``names``."""
    options = plan.options
    return {
        domain.name: hold_windows(
            domain,
            options.seq_length,
            options.online.online_windows,
            options.seed,
        )
        for domain in plan.data.domains
        if domain.name in names
    }


def largest_moves(before: dict[str, float], after: dict[str, float]) -> str:
    """The domains whose weights change most, with both."""
    order = sorted(after, key=lambda name: -abs(after[name] - before[name]))
    moves = [f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in order[:MOVES_SHOWN]]
    others = len(order) - len(moves)
    return ", ".join(moves) + (f", {others} more by less" if others else "")
