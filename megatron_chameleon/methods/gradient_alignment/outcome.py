"""From the proxy's run on disk to the mixture: weights, how steady they were, what they cost."""

from __future__ import annotations

import os

import numpy as np

from megatron_chameleon.artifacts import Mixture, Stopwatch, TrainingRun, provenance
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, step_folder
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.finish import write_and_tell
from megatron_chameleon.methods.common.settled import steadiness, warn_of_unsettled
from megatron_chameleon.methods.gradient_alignment.hook import (
    GradientAlignment,
    found_with,
    require_found_with,
    standing_of,
    weights_by_name,
)
from megatron_chameleon.methods.gradient_alignment.plan import DogePlan
from megatron_chameleon.mixture.doge import DogeState
from megatron_chameleon.mixture.exponentiated import total_variation
from megatron_chameleon.model.paper_flops import PaperSettings, paper_flops
from megatron_chameleon.model.sizes import name_of

WAY_OUT = "try a larger --doge-mu or --doge-eps"


def write_mixture(plan: DogePlan) -> Mixture:
    """Write the mean weights of the finished proxy and print them. The first rank calls this.

    Raises:
        UserError: if the proxy was trained with another rule or target, or without any.
    """
    stopwatch, options, names = Stopwatch(), plan.options, plan.corpus.names
    run = TrainingRun.load(plan.proxy_run.run_dir)
    proxy = CheckpointRecord.load(step_folder(run.root, run.step))
    standing = _standing_of(proxy, plan)
    trained_on = [names[position] for position in plan.roles.train]
    warn_of_unsettled(trained_on, standing.weights, standing.mean, WAY_OUT)
    last = weights_by_name(names, plan.roles, standing.weights)
    mean = weights_by_name(names, plan.roles, standing.mean)
    own = stopwatch.cost(num_devices=run.cost.num_devices)
    total = run.cost + own
    mixture = Mixture(
        **limit_of(options, plan.corpus, names).fields(np.array(list(mean.values()))),
        method="doge",
        parameters={
            **found_with(names, plan.recipe, plan.roles),
            "proxy": {
                "model_size": name_of(plan.shape.size),
                "train_iters": plan.proxy_run.train_iters,
            },
            **steadiness(last, mean, run),
            "steps_averaged": standing.counted,
            "moved_per_step": standing.moved / max(standing.counted, 1),
            "made_from": [os.path.relpath(run.root, options.output.parent)],
            "total_cost": {"flops": total.flops, "device_seconds": total.device_seconds},
            "paper_flops": _paper_flops(plan, run),
        },
        scores=dict(zip(names, standing.mean_alignment.tolist(), strict=True)),
        provenance=provenance(options, {"corpus": plan.corpus.hash, "proxy": proxy.hash}),
        cost=own,
    )
    write_and_tell(mixture, options, _heading(plan, run), *_closing(standing, run))
    return mixture


def _standing_of(proxy: CheckpointRecord, plan: DogePlan) -> DogeState:
    """Where the weights were at the end of the proxy's run."""
    if proxy.hook is None or proxy.hook.name != GradientAlignment.__name__:
        raise UserError(
            f"{plan.proxy_run.run_dir} holds a finished run that DoGE has not watched; choose "
            "another --work-dir"
        )
    require_found_with(proxy.hook.state, plan.corpus.names, plan.recipe, plan.roles)
    return standing_of(proxy.hook.state)


def _paper_flops(plan: DogePlan, run: TrainingRun) -> float:
    """FLOPs as Chameleon's tables count them: of the training."""
    settings = PaperSettings(model_size=plan.shape.size, trained_tokens=run.tokens)
    return paper_flops("doge", settings)


def _heading(plan: DogePlan, run: TrainingRun) -> str:
    names, roles, recipe = plan.corpus.names, plan.roles, plan.recipe
    target = "all domains"
    if plan.options.target is not None:
        trained = "also trained on" if plan.options.train_on_target else "not trained on"
        target = f"{', '.join(names[position] for position in roles.target)} ({trained})"
    return (
        f"\nDoGE towards {target}, mu {recipe.mu:g}, eps {recipe.eps:g}: mean weights of "
        f"{run.step:,} steps; score: mean alignment with the target"
    )


def _closing(standing: DogeState, run: TrainingRun) -> list[str]:
    distance = total_variation(standing.weights, standing.mean)
    return [
        f"the last weights are {distance:.3f} (total variation) from their mean",
        f"the proxy took {run.cost.flops:.2e} FLOPs",
    ]
