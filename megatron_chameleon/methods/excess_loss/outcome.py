"""From the proxy's run on disk to the mixture: weights, how steady they were, what they cost."""

from __future__ import annotations

from typing import Any

from megatron_chameleon.artifacts import Stopwatch, TrainingRun
from megatron_chameleon.methods.common.settled import WeightPath
from megatron_chameleon.methods.common.watched_mixture import FoundWeights, write_found
from megatron_chameleon.methods.common.watched_proxy import finished_proxy
from megatron_chameleon.methods.excess_loss.hook import require_found_with, standing_of
from megatron_chameleon.methods.excess_loss.plan import WATCHER, DoremiPlan
from megatron_chameleon.methods.excess_loss.reference import Reference
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.paper_flops import PaperSettings, paper_flops
from megatron_chameleon.model.sizes import name_of

WAY_OUT = "try a smaller --doremi-eta, a larger --doremi-eps or an --excess-ceiling"


def write_mixture(plan: DoremiPlan, reference: Reference) -> None:
    """Write the mean weights of the finished proxy and print them. The first rank calls this.

    Raises:
        UserError: if the proxy was trained with another rule or reference, or without.
    """
    stopwatch = Stopwatch()
    trained = TrainingRun.load(plan.reference_dir)
    proxy = finished_proxy(plan.proxy_run.run_dir, WATCHER, plan.way_out)
    require_found_with(proxy.state, plan.recipe, reference, plan.way_out)
    standing = standing_of(proxy.state, len(plan.corpus.names), plan.way_out)

    def named(values: Array) -> dict[str, float]:
        return dict(zip(plan.corpus.names, values.tolist(), strict=True))

    steps = standing.counted - int(plan.recipe.count_first)
    path = WeightPath(named(standing.weights), named(standing.mean), standing.moved, steps)
    found = FoundWeights(
        method="doremi",
        settings=_settings(plan, reference, trained),
        path=path,
        steps_averaged=standing.counted,
        scores=named(standing.excess),
        runs=[trained, proxy.run],
        inputs={"reference": reference.checkpoint.hash, "proxy": proxy.hash},
        paper_flops=_paper_flops(plan, reference, trained, proxy.run),
        way_out=WAY_OUT,
        heading=_heading(plan, trained, proxy.run),
        closing=_closing(path, trained, proxy.run),
    )
    write_found(found, plan.options, plan.corpus, stopwatch)


def _settings(plan: DoremiPlan, reference: Reference, trained: TrainingRun) -> dict[str, Any]:
    rule = {name: getattr(plan.recipe, name) for name in ("eta", "eps")}
    return {
        "variant": plan.options.rule.doremi_variant,
        **rule,
        "excess_floor": plan.recipe.floor,
        "excess_ceiling": plan.recipe.ceiling,
        "reference": {
            "model_size": name_of(reference.shape.size),
            "train_iters": trained.step,
            "mixture": trained.mixture,
        },
        "proxy": {
            "model_size": name_of(plan.shape.size),
            "train_iters": plan.proxy_run.train_iters,
        },
    }


def _paper_flops(
    plan: DoremiPlan, reference: Reference, trained: TrainingRun, proxy: TrainingRun
) -> float:
    """FLOPs as Chameleon's tables count them: of the two trainings alone.

    The tables count pairs of one size and length; each of the two is half of such a pair.
    """
    both = ((reference.shape.size, trained), (plan.shape.size, proxy))
    pairs = (PaperSettings(model_size=size, trained_tokens=run.tokens) for size, run in both)
    return sum(paper_flops("doremi", pair) for pair in pairs) / 2


def _heading(plan: DoremiPlan, trained: TrainingRun, proxy: TrainingRun) -> str:
    recipe = plan.recipe
    return (
        f"\nDoReMi, {plan.options.rule.doremi_variant}, eta {recipe.eta:g}, eps {recipe.eps:g}: "
        f"mean weights of {proxy.step:,} steps against {trained.root}; score: last excess loss"
    )


def _closing(path: WeightPath, trained: TrainingRun, proxy: TrainingRun) -> list[str]:
    return [
        f"total variation: the last weights are {path.last_from_mean:.3f} from their mean, and "
        f"moved {path.moved_per_step:.3f} in a step",
        f"the reference took {trained.cost.flops:.2e} FLOPs, the proxy {proxy.cost.flops:.2e}",
    ]
