"""Aioli during training: steps with perturbed mixtures show how each domain lowers each loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.evaluation.held_out import HeldOutText
from megatron_chameleon.methods.online.hook import OnlineHook
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.mixture.aioli import (
    aioli_weights,
    mixing_matrix,
    normalized_gains,
    perturbed_mixture,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.run_folder import FRESH_START
from megatron_chameleon.training.step import BatchShape, Passes
from megatron_chameleon.training.validation import Validation, held_out_texts, read_target_texts


class Aioli(OnlineHook):
    """Aioli (Chen et al. 2024), in rounds of ``--online-interval`` steps.

    A round begins with steps of the current mixture. At its end, each of several sweeps visits all
    K domains in random order, and trains ``--aioli-steps`` steps with a mixture that emphasizes the
    domain; the losses on the valid splits before and after these steps are a column of the mixing
    law's matrix. The next round uses the new mixture. In the authors' code, the sweeps are at the
    beginning of a round; here they are at the end, so that the first matrix is not that of an
    untrained model. A last round without steps after it has no sweeps.

    The losses are those of the domains in the mixture, in equal parts. With ``--target``, they are
    those of its domains and texts. A target that only the mixture records is not used.

    Args:
        plan: plan of the run.
        layout: layout of the ranks.

    Raises:
        UserError: if the sweeps do not fit into a round, or a domain has no valid split.
    """

    def __init__(self, plan: TrainingPlan, layout: Layout) -> None:
        super().__init__(plan, layout)
        options, count = plan.options, len(self.names)
        self._steps: int = self.online.setting("aioli_steps")
        self._sweeps: int = self.online.setting("aioli_sweeps")
        self._emphasis: float = self.online.setting("aioli_emphasis")
        estimation = self._steps * self._sweeps * count
        self._round: int = self.online.setting("online_interval") or 2 * estimation
        self._start, self.mixture_interval = self._round - estimation, self._steps
        if self._start <= 0 or self._round % self._steps or self._round >= options.train_iters:
            raise UserError(
                f"--online-interval {self._round}: must be a multiple of --aioli-steps "
                f"{self._steps}, below --train-iters {options.train_iters} and above {estimation} "
                f"(--aioli-steps {self._steps} times --aioli-sweeps {self._sweeps} times {count} "
                "domains); pass another interval, or fewer --aioli-steps or --aioli-sweeps"
            )
        if self._emphasis <= 1 / count:
            raise UserError(
                f"--aioli-emphasis {self._emphasis}: must be above 1 / {count}, the weight of each "
                "domain in a uniform mixture"
            )
        self._plan, self._mixture = plan, self.initial
        self._windows: int = self.online.setting("online_windows")
        self._target = plan.target if options.target.target is not None else None
        self._shares: Array | None = None
        self._measured = self.names
        if self._target is not None:
            self._shares = np.array(list(self._target.shares.values()))
            self._measured = list(self._target.shares)
        self._texts = self._read_texts()
        self._validation: Validation | None = None
        self._gains: Array | None = None
        self._before: Array | None = None
        """Losses [m] before the current mixture of a sweep; None outside of sweeps."""
        self._drops = np.zeros((len(self._measured), count))

    def _read_texts(self) -> list[HeldOutText]:
        """Return the windows of each domain or text whose loss is measured. Collective."""
        plan, names, has_target = self._plan, list(self._plan.data.names), self._target is not None
        found = held_out_texts(plan, self._windows, held_out=has_target)
        if has_target:
            names += [domain.name for domain in plan.data.held_out]
        texts = {name: text for name, text in zip(names, found, strict=True) if text is not None}
        if self._target is not None and self._target.texts:
            read = from_main(lambda: read_target_texts(plan, self._windows))
            texts |= zip(self._target.texts, read, strict=True)
        if missing := [name for name in self._measured if name not in texts]:
            raise UserError(
                f"--online aioli: these domains of {plan.data.where} have no valid split: "
                f"{format_names(missing)}; change --split, or leave out these domains"
            )
        return [texts[name] for name in self._measured]

    def new_mixture(self, step: int, model: Sequence[torch.nn.Module]) -> list[float] | None:
        """Return the weights to use from ``step`` on; None if they are unchanged."""
        place = step % self._round
        first = step - (place or self._round)
        if first + self._round >= self._plan.options.train_iters:
            return None  # no steps would use the mixture that this round finds
        if place == self._start:
            self._drops = np.zeros_like(self._drops)
        elif self._before is None:  # before the sweeps, or after a loss that is not finite
            return None
        losses = self._losses(model)
        if not np.isfinite(losses).all():
            warn(f"mixture unchanged at step {step}: a validation loss is not finite")
            self._before = None
            return self.perturb(self._mixture)
        if self._before is not None:
            domain = self._domain(step - self._steps)
            self._drops[:, domain] += (self._before - losses) / self._sweeps
        if place == 0:
            self._before = None
            return self._end_round(step)
        self._before = losses
        shape = len(self.names), self._emphasis
        return self.perturb(perturbed_mixture(self._domain(step), *shape))

    def _domain(self, step: int) -> int:
        """The domain that the mixture from ``step`` on emphasizes."""
        number = (step % self._round - self._start) // self._steps
        sweep, place = divmod(number, len(self.names))
        seed = self._plan.options.seed, step // self._round, sweep
        return int(np.random.default_rng(seed).permutation(len(self.names))[place])

    def _end_round(self, step: int) -> list[float] | None:
        """Compute the next round's mixture from the drops of this round's losses."""

        def compute() -> tuple[Array, Array]:
            matrix = mixing_matrix(self._drops, self._emphasis)
            gains = normalized_gains(matrix, self._shares)
            if self._gains is not None:  # the first round has no average
                kept = self.online.setting("online_smoothing")
                gains = kept * self._gains + (1 - kept) * gains
            return gains, aioli_weights(self.initial, gains, self.online.setting("aioli_eta"))

        # All ranks need equal weights, but the last digits may differ between processors.
        before, (self._gains, self._mixture) = self._mixture, from_main(compute)
        self.perturb(before)  # so that the log line compares the mixtures of two rounds
        return self.change(step, self._mixture) or list(self._rounded().values())

    def _losses(self, model: Sequence[torch.nn.Module]) -> Array:
        """Compute the mean loss of the windows of each measured domain or text: [m], in nats."""
        if self._validation is None:
            shape = BatchShape.of(self._plan.options, self.layout.data_size)
            passes = Passes(model, shape, len(self._measured))
            self._validation = Validation(self._texts, self._measured, passes, self.layout)
        losses = self._validation.losses()
        self.flops += self._validation.flops(self._plan.config)
        return np.array([losses[name] for name in self._measured])

    def metrics(self) -> dict[str, Any]:
        """Return the weights in use, and each domain's effect on all losses."""
        gains = {} if self._gains is None else {"gains": by_name(self.names, self._gains)}
        return {**super().metrics(), **gains}

    @property
    def _schedule(self) -> dict[str, Any]:
        """Flags that must not change within a round: its lengths, mixtures and losses."""
        value = self._plan.options.target.target
        if self._target is not None and self._target.texts:
            value = f"{value} (files {self._target.texts_hash[:8]})"
        return {
            "--target": value,
            "--online-interval": self._round,
            "--online-windows": self._windows,
            "--aioli-steps": self._steps,
            "--aioli-sweeps": self._sweeps,
            "--aioli-emphasis": self._emphasis,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, the round's schedule and mixture, and its losses so far."""
        return {
            **super().state_dict(),
            "schedule": self._schedule,
            "mixture": self._mixture.tolist(),
            "gains": None if self._gains is None else self._gains.tolist(),
            "before": None if self._before is None else self._before.tolist(),
            "drops": None if self._before is None else self._drops.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``; raise UserError if a round would change in its middle."""
        for flag, value in self._schedule.items():
            if (before := state["schedule"].get(flag)) != value:
                raise UserError(
                    f"the run was started with {flag} {before}, not {value}; {FRESH_START}"
                )
        super().load_state_dict(state)
        self._mixture = np.array(state["mixture"])
        self._gains = None if state["gains"] is None else np.array(state["gains"])
        self._before = None if state["before"] is None else np.array(state["before"])
        if self._before is not None:
            self._drops = np.array(state["drops"])
