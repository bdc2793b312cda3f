"""Chameleon during training: the mixture follows the trained model's own domain embeddings.

Xie, Tonin, Cevher: Chameleon, ICML 2025, Algorithm 1, at regular intervals on the model in training
instead of a proxy. The paper leaves this to future work; the smoothing is not from the paper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from megatron_chameleon.corpus.domains import load_windows
from megatron_chameleon.corpus.windows import WINDOW_LENGTH
from megatron_chameleon.embedding.embed import embed_windows, windows_flops
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon.weigh import (
    Shrinkage,
    shrunk,
    warn_degenerate,
    weigh_means,
)
from megatron_chameleon.methods.online.hook import OnlineHook
from megatron_chameleon.methods.output import warn
from megatron_chameleon.mixture import RECIPES
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.model.readout import Reader, check_layer
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.progress import progress_bar
from megatron_chameleon.training.plan import TrainingPlan


class OnlineChameleon(OnlineHook):
    """Recompute the mixture every ``--online-interval`` steps.

    The same windows, sampled by the run's seed and the domain, are embedded every time, in batches
    of the micro-batch size. Domains with weight 0 in the run's mixture keep weight 0.

    Args:
        plan: plan of the run.
        layout: layout of the ranks.

    Raises:
        UserError: for a layer that the model does not have, or fewer than two domains with a
            weight.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__(plan, layout)
        options = plan.options
        self._shape, self._batch_size = plan.config, options.micro_batch_size
        layer = self.online.setting("online_layer")
        self._layer = check_layer(plan.config.num_layers, layer, "--online-layer")
        self._has_warned = False  # that the model is like an undertrained proxy
        count = self.online.setting("online_windows")
        length = min(WINDOW_LENGTH, options.seq_length)
        self._windows = {
            domain.name: load_windows(domain, length, count, options.seed)
            for domain in plan.data.domains
            if domain.name in self.names
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
        # All ranks need equal weights, but the last digits may differ between processors. So rank 0
        # computes the weights and broadcasts them.
        weights = from_main(lambda: self._smoothed(step, means))
        count = sum(len(windows) for _tokens, windows in self._windows.values())
        seconds = time.perf_counter() - start
        return self.change(step, weights, f"; {count:,} windows embedded in {seconds:.2f} s")

    def _embed(self, model: Sequence[torch.nn.Module]) -> Array:
        """Compute the mean embedding of each weighted domain, in the training precision.

        The model's parameters, gradients and random states are unchanged.

        Raises:
            UserError: if hidden states are not finite.
        """
        for chunk in model:
            if self.layout.overlap_param_gather:
                # Gather all parameters now. The layers' forward passes would otherwise gather them
                # by collectives, which would not match, since ranks run different batches.
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
            chunk.eval()
        first, *later = map(unwrap, model)
        reader, means = Reader(first, self._shape, self.layout, later), []
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

    def _smoothed(self, step: int, means: Array) -> Array:
        """Smooth the weights of the weighted domains; ``means`` are their embeddings.

        Early in training, the model is like an undertrained proxy, so its weights are shrunk if the
        user asks for it.
        """
        recipe = RECIPES[self.online.setting("online_recipe")]
        plain = weigh_means(means, "pretrain", recipe)
        hint = "try --online-recipe scaled, or a longer --online-interval"
        warn_degenerate(self.names, plain, hint)
        shrinkage = Shrinkage.of(plain)
        applies: bool = self.online.setting("online_shrink")
        if shrinkage.factor < 1.0 and not self._has_warned:
            self._has_warned = True
            advice = None if applies else "start later (--online-interval), or pass --online-shrink"
            warn(f"step {step}: {shrinkage.explain(plain, advice)}")
        result = shrunk(plain, shrinkage.factor if applies else 1.0)
        kept: float = self.online.setting("online_smoothing")
        return kept * self.weights + (1 - kept) * result.weights
