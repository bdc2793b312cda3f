"""From the proxy's run on disk to the mixture: weights, how steady they were, what they cost."""

from __future__ import annotations

from megatron_chameleon.artifacts import Stopwatch, TrainingRun
from megatron_chameleon.methods.common.settled import WeightPath
from megatron_chameleon.methods.common.watched_mixture import FoundWeights, write_found
from megatron_chameleon.methods.common.watched_proxy import finished_proxy
from megatron_chameleon.methods.gradient_alignment.hook import (
    found_with,
    require_found_with,
    standing_of,
    weights_by_name,
)
from megatron_chameleon.methods.gradient_alignment.plan import WATCHER, DogePlan
from megatron_chameleon.model.paper_flops import PaperSettings, paper_flops
from megatron_chameleon.model.sizes import name_of

WAY_OUT = "try a larger --doge-mu or --doge-eps"


def write_mixture(plan: DogePlan) -> None:
    """Write the mean weights of the finished proxy and print them. The first rank calls this.

    Raises:
        UserError: if the proxy was trained with another rule or target, or without any.
    """
    stopwatch, names, roles = Stopwatch(), plan.corpus.names, plan.roles
    proxy = finished_proxy(plan.proxy_run.run_dir, WATCHER, plan.way_out)
    require_found_with(proxy.state, names, plan.recipe, roles, plan.way_out)
    run = proxy.run
    standing = standing_of(proxy.state, len(names), roles, plan.way_out)
    path = WeightPath(
        last=weights_by_name(names, roles, standing.weights),
        mean=weights_by_name(names, roles, standing.mean),
        moved=standing.moved,
        steps=standing.counted,
    )
    size, iters = plan.shape.size, plan.proxy_run.train_iters
    found = FoundWeights(
        method="doge",
        settings={
            **found_with(names, plan.recipe, roles),
            "proxy": {"model_size": name_of(size), "train_iters": iters},
        },
        path=path,
        steps_averaged=standing.counted,
        scores=dict(zip(names, standing.mean_alignment.tolist(), strict=True)),
        runs=[run],
        inputs={"proxy": proxy.hash},
        paper_flops=paper_flops("doge", PaperSettings(model_size=size, trained_tokens=run.tokens)),
        way_out=WAY_OUT,
        heading=_heading(plan, run),
        closing=_closing(path, run),
    )
    write_found(found, plan.options, plan.corpus, stopwatch)


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


def _closing(path: WeightPath, run: TrainingRun) -> list[str]:
    return [
        f"total variation: the last weights are {path.last_from_mean:.3f} from their mean, and "
        f"moved {path.moved_per_step:.3f} in a step",
        f"the proxy took {run.cost.flops:.2e} FLOPs",
    ]
