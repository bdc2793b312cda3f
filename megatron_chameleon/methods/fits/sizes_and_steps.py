"""Losses predicted for more steps or a larger model, before mixing laws are fitted to them.

Ye et al.: Data Mixing Laws, ICLR 2025, section 4: step law, then size law, then mixing law.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.scaling_laws import FEWEST_POINTS, PowerLaws, fit_power_laws
from megatron_chameleon.model.sizes import ModelShape, model_size


@dataclasses.dataclass(frozen=True, eq=False)
class Predicted:
    """Losses [n, k] to fit mixing laws to, NaN where a member diverged, and how they came about."""

    losses: Array
    told: list[str]
    parameters: dict[str, Any]


def check_laws_of_growth(options: MixingLawsOptions) -> None:
    """Raises UserError where there would be too few points for a law over steps or sizes."""
    laws = options.laws
    if options.ratios is not None and (laws.target_steps or laws.model_sizes or laws.target_size):
        raise UserError(
            "--target-steps, --model-sizes and --target-size are for proxies that are trained here,"
            " whose losses are known on the way; leave them out beside --ratios"
        )
    if laws.target_steps is not None:
        _check_steps(options)
    elif laws.fit_steps_from is not None:
        raise UserError("--fit-steps-from chooses what --target-steps is predicted from: give both")
    if (laws.target_size is None) != (not laws.model_sizes):
        raise UserError("--model-sizes and --target-size belong together: give both or neither")
    if laws.model_sizes:
        _check_sizes(laws)


def _check_steps(options: MixingLawsOptions) -> None:
    steps, target = measured_steps(options), options.laws.target_steps
    if target is None or target <= options.swarm.train_iters:
        raise UserError(
            f"--target-steps {target} is not beyond --train-iters {options.swarm.train_iters}, "
            "whose losses are measured; leave it out"
        )
    used = [step for step in steps if step >= first_step(options)]
    if len(used) < FEWEST_POINTS:
        raise UserError(
            f"--target-steps takes {FEWEST_POINTS} measurements from step {first_step(options)} on,"
            f" and there are {len(used)}; give a smaller --eval-interval or --fit-steps-from"
        )


def _check_sizes(laws: LawOptions) -> None:
    for name in (*laws.model_sizes, laws.target_size):
        model_size(name or "")
    if len(set(laws.model_sizes)) < FEWEST_POINTS:
        raise UserError(
            f"--model-sizes {' '.join(laws.model_sizes)}: a law over sizes takes {FEWEST_POINTS} "
            "different ones"
        )
    largest = max(laws.model_sizes, key=_parameters_of)
    if _parameters_of(laws.target_size or "") <= _parameters_of(largest):
        raise UserError(
            f"--target-size {laws.target_size} is not larger than {largest}, the largest of "
            "--model-sizes, whose losses are measured; name a larger one"
        )


def measured_steps(options: MixingLawsOptions) -> list[int]:
    """After which steps a swarm's held-out losses are measured."""
    last, interval = options.swarm.train_iters, options.swarm.eval_interval
    between = range(interval, last, interval) if interval > 0 else range(0)
    return [*between, last]


def first_step(options: MixingLawsOptions) -> int:
    """The first step whose measurement counts for the law over steps."""
    given = options.laws.fit_steps_from
    return -(-options.swarm.train_iters // 3) if given is None else given


def grown(options: MixingLawsOptions, swarms: dict[str, SwarmResult]) -> Predicted:
    """The losses at the target's steps and size, from the swarms of each model size.

    Args:
        options: what was asked for.
        swarms: model size -> its swarm; all on the same mixtures.
    """
    told: list[str] = []
    parameters: dict[str, Any] = {}
    at_steps = {}
    for name, swarm in swarms.items():
        at_steps[name] = swarm.losses[:, -1]
        if options.laws.target_steps is not None:
            at_steps[name], law, error = _at_target_steps(options, swarm)
            ahead = "" if error is None else f"; it predicts the last one within {error:.4f}"
            told.append(
                f"losses of {name} at step {options.laws.target_steps:,} by a power law of exponent"
                f" {law.exponent:.3g} over the measurements{ahead}"
            )
            parameters[f"step_law_{name}"] = {"exponent": law.exponent, "backtest_mae": error}
    if options.laws.target_size is None:
        (losses,) = at_steps.values()
        return Predicted(losses, told, parameters)
    losses, law = _at_target_size(options, at_steps)
    told.append(
        f"losses of {options.laws.target_size} by a power law over {', '.join(at_steps)} of "
        f"exponent {law.exponent:.3g}"
    )
    parameters["size_law"] = {"exponent": law.exponent, "sizes": list(at_steps)}
    return Predicted(losses, told, parameters)


def _at_target_steps(
    options: MixingLawsOptions, swarm: SwarmResult
) -> tuple[Array, PowerLaws, float | None]:
    """Losses [n, k] at the target's steps, the law, and its mean error one measurement ahead.

    That is of a law over all measurements but the last; None where these are too few for one.
    """
    steps = np.array(swarm.steps, np.float64)
    used = steps >= first_step(options)
    curves, there = _curves(swarm.losses[:, used].swapaxes(1, 2))
    law = fit_power_laws(steps[used], curves)
    found = np.full(there.shape, np.nan)
    found[there] = law.predict(float(options.laws.target_steps or 0))
    before = steps[used][:-1]
    if len(before) < FEWEST_POINTS:
        return found, law, None
    ahead = fit_power_laws(before, curves[:, :-1]).predict(steps[-1])
    return found, law, float(np.abs(ahead - curves[:, -1]).mean())


def _at_target_size(
    options: MixingLawsOptions, at_steps: dict[str, Array]
) -> tuple[Array, PowerLaws]:
    """Losses [n, k] of the target's size, NaN where a member of any size diverged."""
    names = sorted(at_steps, key=_parameters_of)
    sizes = np.array([_parameters_of(name) for name in names])
    curves, there = _curves(np.stack([at_steps[name] for name in names], axis=2))
    law = fit_power_laws(sizes, curves)
    found = np.full(there.shape, np.nan)
    found[there] = law.predict(_parameters_of(options.laws.target_size or ""))
    return found, law


def _parameters_of(name: str) -> float:
    """Parameters of a model size, without its embeddings."""
    shape = ModelShape(model_size(name), vocab_size=0, max_sequence_length=0)
    return float(shape.size.num_layers * shape.layer_parameters)


def _curves(losses: Array) -> tuple[Array, NDArray[np.bool_]]:
    """The curves [curves, points] of ``losses`` [n, k, points] without NaN, and where they are."""
    there = np.all(np.isfinite(losses), axis=2)
    return losses[there], there
