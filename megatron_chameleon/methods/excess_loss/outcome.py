"""From the proxy's run on disk to the mixture: weights, how steady they were, what they cost."""

from __future__ import annotations

import os
from typing import Any

from megatron_chameleon.artifacts import Mixture, Stopwatch, TrainingRun, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.finish import write_and_tell
from megatron_chameleon.methods.common.settled import steadiness, warn_of_unsettled
from megatron_chameleon.methods.excess_loss.hook import (
    ExcessLossReweighting,
    require_found_with,
    standing_of,
)
from megatron_chameleon.methods.excess_loss.plan import DoremiPlan, Reference
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.doremi import DoremiState
from megatron_chameleon.mixture.exponentiated import total_variation
from megatron_chameleon.model.paper_flops import TRAINING, paper_parameters
from megatron_chameleon.model.sizes import name_of

WAY_OUT = "try a smaller --doremi-eta, a larger --doremi-eps or an --excess-ceiling"


def write_mixture(plan: DoremiPlan, reference: Reference) -> None:
    """Write the mean weights of the finished proxy and print them. The first rank calls this.

    Raises:
        UserError: if the proxy was trained with another rule or reference, or without.
    """
    stopwatch, options = Stopwatch(), plan.options

    def named(values: Array) -> dict[str, float]:
        return dict(zip(plan.corpus.names, values.tolist(), strict=True))

    runs = [TrainingRun.load(plan.reference_dir), TrainingRun.load(plan.proxy_run.run_dir)]
    proxy = CheckpointRecord.load(step_folder(runs[1].root, runs[1].step))
    standing = _standing_of(proxy, plan, reference)
    warn_of_unsettled(plan.corpus.names, standing.weights, standing.mean, WAY_OUT)
    own = stopwatch.cost(num_devices=runs[1].cost.num_devices)
    total = runs[0].cost + runs[1].cost + own
    inputs = {
        "corpus": plan.corpus.hash,
        "reference": reference.checkpoint.hash,
        "proxy": proxy.hash,
    }
    mixture = Mixture(
        **limit_of(options, plan.corpus, plan.corpus.names).fields(standing.mean),
        method="doremi",
        parameters={
            **_settings(plan, reference),
            **steadiness(named(standing.weights), named(standing.mean), runs[1]),
            "steps_averaged": standing.counted,
            "moved_per_step": standing.moved / max(runs[1].step, 1),
            "made_from": [os.path.relpath(run.root, options.output.parent) for run in runs],
            "total_cost": {"flops": total.flops, "device_seconds": total.device_seconds},
            "paper_flops": _paper_flops(plan, reference, runs),
        },
        scores=named(standing.excess),
        provenance=provenance(options, inputs),
        cost=own,
    )
    write_and_tell(mixture, options, _heading(plan, runs), *_closing(standing, runs))


def _standing_of(proxy: CheckpointRecord, plan: DoremiPlan, reference: Reference) -> DoremiState:
    """Where the weights were at the end of the proxy's run."""
    if proxy.hook is None or proxy.hook.name != ExcessLossReweighting.__name__:
        raise UserError(
            f"{plan.proxy_run.run_dir} holds a finished run that DoReMi has not watched; choose "
            "another --work-dir"
        )
    require_found_with(proxy.hook.state, plan.recipe, reference)
    return standing_of(proxy.hook.state)


def _settings(plan: DoremiPlan, reference: Reference) -> dict[str, Any]:
    rule = {name: getattr(plan.recipe, name) for name in ("eta", "eps")}
    run = TrainingRun.load(plan.reference_dir)
    return {
        "variant": plan.options.rule.doremi_variant,
        **rule,
        "excess_floor": plan.recipe.floor,
        "excess_ceiling": plan.recipe.ceiling,
        "reference": {
            "model_size": name_of(reference.shape.size),
            "train_iters": run.step,
            "mixture": run.mixture,
        },
        "proxy": {
            "model_size": name_of(plan.shape.size),
            "train_iters": plan.proxy_run.train_iters,
        },
    }


def _paper_flops(plan: DoremiPlan, reference: Reference, runs: list[TrainingRun]) -> float:
    """FLOPs as Chameleon's tables count them: of the two trainings alone."""
    parameters = [paper_parameters(shape.size) for shape in (reference.shape, plan.shape)]
    return float(sum(TRAINING * n * run.tokens for n, run in zip(parameters, runs, strict=True)))


def _heading(plan: DoremiPlan, runs: list[TrainingRun]) -> str:
    recipe = plan.recipe
    return (
        f"\nDoReMi, {plan.options.rule.doremi_variant}, eta {recipe.eta:g}, eps {recipe.eps:g}: "
        f"mean weights of {runs[1].step:,} steps against {runs[0].root}; score: last excess loss"
    )


def _closing(standing: DoremiState, runs: list[TrainingRun]) -> list[str]:
    flops = [run.cost.flops for run in runs]
    distance, steps = total_variation(standing.weights, standing.mean), max(runs[1].step, 1)
    return [
        f"total variation: the last weights are {distance:.3f} from their mean, and moved "
        f"{standing.moved / steps:.3f} in a step",
        f"the reference took {flops[0]:.2e} FLOPs, the proxy {flops[1]:.2e}",
    ]
