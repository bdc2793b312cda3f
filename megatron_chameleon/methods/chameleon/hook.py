"""Chameleon during training: the mixture follows the trained model's own domain embeddings.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1, at regular intervals on the model in training
instead of a proxy. The paper leaves this to future work; the smoothing is not from the paper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.embedding.embed import embed_windows, windows_flops
from megatron_chameleon.embedding.windows import load_windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon.compute import warn_degenerate, weigh_means
from megatron_chameleon.methods.output import by_name, format_names, warn
from megatron_chameleon.mixture import RECIPES
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.model.readout import Reader, check_layer
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.hook import TrainingHook
from megatron_chameleon.training.plan import TrainingPlan

# Weights are rounded to this many decimals, so that rounding errors, which differ between parallel
# layouts, do not change the samples.
DECIMALS = 6


class OnlineChameleon(TrainingHook):
    """Recompute the mixture every ``--online-interval`` steps.

    The same windows, sampled by the run's seed and the domain, are embedded every time, in batches
    of the micro-batch size. Domains with weight 0 in the run's mixture keep weight 0.

    Args:
        plan: plan of the run, with ``options.online.online_interval`` set.
        layout: layout of the ranks.

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
        self._online, self._shape, self._layout = online, plan.config, layout
        self._batch_size = options.micro_batch_size
        self._layer = check_layer(plan.config.num_layers, online.online_layer, "--online-layer")
        weights = np.array(plan.schedule.weights_at(0), np.float64)
        self._weights = by_name(plan.data.names, weights / weights.sum())
        self._names = [name for name, weight in self._weights.items() if weight > 0]
        self._recomputed = 0
        if len(self._names) < 2:
            raise UserError(
                f"--online-interval {online.online_interval}: requires two domains with a weight "
                f"above 0, but in {plan.data.where} only '{self._names[0]}' has one; give another "
                "domain a weight, or omit --online-interval"
            )
        self._windows = {
            domain.name: load_windows(
                domain, options.seq_length, online.online_windows, options.seed
            )
            for domain in plan.data.domains
            if domain.name in self._names
        }

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> list[float] | None:
        """Return the weights to use from ``step`` on; None if they are unchanged.

        If hidden states are not finite, the weights are unchanged, with a warning; the run's guards
        decide whether to stop.
        """
        start = time.perf_counter()
        try:
            means = self._embed(model)
        except UserError as error:  # raised if hidden states are not finite
            warn(f"mixture unchanged at step {step}: {str(error).partition(';')[0]}")
            return None
        before = self._rounded()
        # All ranks need equal weights, but the last digits may differ between processors. So rank 0
        # computes the weights and broadcasts them.
        self._weights = from_main(lambda: self._smoothed(means))
        self._recomputed += 1
        after = self._rounded()
        if after == before:
            return None
        if self._layout.is_main:
            order = sorted(after, key=lambda name: -abs(after[name] - before[name]))
            moves = [f"{name} {before[name]:.4f} -> {after[name]:.4f}" for name in order]
            count = sum(len(windows) for _tokens, windows in self._windows.values())
            print(
                f"mixture from step {step} on: {format_names(moves)}; "
                f"{count:,} windows embedded in {time.perf_counter() - start:.2f} s"
            )
        return list(after.values())

    def metrics(self) -> dict[str, Any]:
        """Return the current rounded weights, and how often weights were recomputed."""
        return {"weights": self._rounded(), "recomputed": self._recomputed}

    def state_dict(self) -> dict[str, Any]:
        """Return the weights in full precision, and how often they were recomputed."""
        return {"weights": dict(self._weights), "recomputed": self._recomputed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``."""
        self._weights, self._recomputed = dict(state["weights"]), state["recomputed"]

    def _embed(self, model: Sequence[torch.nn.Module]) -> Array:
        """Compute the mean embedding of each weighted domain, in the training precision.

        The model's parameters, gradients and random states are unchanged.

        Raises:
            UserError: if hidden states are not finite.
        """
        for chunk in model:
            if self._layout.overlap_param_gather:
                # Gather all parameters now. The layers' forward passes would otherwise gather them
                # by collectives, which would not match, since ranks run different batches.
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
            chunk.eval()
        first, *later = map(unwrap, model)
        reader, means = Reader(first, self._shape, self._layout, later), []
        try:
            # Run eagerly: torch.compile would compile the layers again for each new shape.
            with torch.compiler.set_stance("force_eager"):
                for name, (tokens, windows) in self._windows.items():
                    self.flops += windows_flops(reader, self._layer, windows)
                    with progress_bar(len(windows), " windows", quiet=True) as progress:
                        vectors = embed_windows(
                            reader, tokens, windows, self._layer, self._batch_size, progress, name
                        )
                    means.append(vectors.mean(axis=0, dtype=np.float64))
        finally:
            for chunk in model:
                chunk.train()
        return np.stack(means)

    def _rounded(self) -> dict[str, float]:
        return {name: round(weight, DECIMALS) for name, weight in self._weights.items()}

    def _smoothed(self, means: Array) -> dict[str, float]:
        """Smooth the weights of all domains; ``means`` are embeddings of the weighted domains."""
        result = weigh_means(means, "pretrain", RECIPES[self._online.online_recipe])
        hint = "try --online-recipe scaled, or a longer --online-interval"
        warn_degenerate(self._names, result, hint)
        kept = self._online.online_smoothing
        new = by_name(self._names, result.weights)
        return {
            name: kept * weight + (1 - kept) * new.get(name, 0.0)
            for name, weight in self._weights.items()
        }
