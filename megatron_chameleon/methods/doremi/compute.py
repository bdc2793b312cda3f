"""DoReMi end to end: train the reference and the proxy, write the mixture.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1. The base model is trained with the mixture
afterwards, by tools/pretrain_gpt.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Corpus, Mixture, Stopwatch, TrainingRun
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doremi.hook import (
    ExcessLossReweighting,
    Reference,
    find_reference,
    parse_state,
    warn_reference_differences,
)
from megatron_chameleon.methods.doremi.options import DoremiOptions, DoremiRule
from megatron_chameleon.methods.output import epoch_limit
from megatron_chameleon.methods.proxy import (
    PROXY,
    HookedProxy,
    WeightPath,
    forward_only,
    is_finished,
    resolve_work_dir,
    train_proxy,
    training_options,
    write_mean_weights,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.doremi import RECIPES, DoremiRecipe
from megatron_chameleon.mixture.natural import natural_weights
from megatron_chameleon.model.flops import PaperSettings, paper_flops
from megatron_chameleon.model.sizes import ModelShape, name_of
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.run_folder import FRESH_START
from megatron_chameleon.training.stopping import StopRequests

REFERENCE, NATURAL = "reference", "natural"
FIX_UNSETTLED = "use a smaller --doremi-eta, a larger --doremi-eps or an --excess-ceiling"


@dataclasses.dataclass(frozen=True)
class DoremiPlan:
    """Validated options and the artifacts that they name.

    Attributes:
        options: of the method.
        corpus: of the domains.
        recipe: of the update rule.
        reference_dir: run folder of the reference.
        reference_run: its training options; None for a user-supplied reference.
        proxy: its run.
        shape: of the proxy.
    """

    options: DoremiOptions
    corpus: Corpus
    recipe: DoremiRecipe
    reference_dir: Path
    reference_run: PretrainOptions | None
    proxy: HookedProxy
    shape: ModelShape

    def reference(self) -> Reference:
        """The trained reference.

        Raises:
            UserError: if it is not finished, or its losses are not comparable with the proxy's.
        """
        name = "DoReMi's reference" if self.reference_run else "--reference"
        return find_reference(self.reference_dir, self.corpus, self.proxy.options, self.shape, name)


def compute_doremi(
    options: DoremiOptions,
    stops: StopRequests | None = None,
    reference_run: PretrainOptions | None = None,
) -> bool:
    """Train what is not trained yet, and write the mixture. Called on every rank.

    Args:
        options: of the method.
        stops: stop-signal handler; created for this call if None.
        reference_run: training options of the reference, if ``options`` do not determine them.

    Returns:
        Whether the mixture was written; False after a stop signal.

    Raises:
        UserError: for a mistake in the options or in what they name, before any training; later,
            as training does.
    """
    stops = stops or StopRequests(options.proxy.stopping)
    parallel = forward_only(options.proxy.parallel)
    with distributed(parallel, seed=0):
        plan = from_main(lambda: plan_doremi(options, reference_run))
        from_main(lambda: _write_natural(plan))
    run = plan.reference_run
    if run and not train_proxy(run, stops, name="DoReMi's reference"):
        return False
    with distributed(parallel, seed=0):
        reference = from_main(plan.reference)
    finished = train_proxy(
        plan.proxy.options,
        stops,
        lambda run, layout: ExcessLossReweighting(run, layout, reference, plan.recipe),
        name="DoReMi's proxy",
    )
    if finished:
        with distributed(parallel, seed=0):
            from_main(lambda: _write_mixture(plan, reference))
    return finished


def plan_doremi(
    options: DoremiOptions,
    reference_run: PretrainOptions | None = None,
) -> DoremiPlan:
    """Validate the options, what they name, and the content of the run folders. Writes nothing.

    Args:
        options: of the method.
        reference_run: training options of the reference, if ``options`` do not determine them.

    Raises:
        UserError: for the first mistake found.
    """
    recipe = recipe_of(options.rule)
    corpus = Corpus.load(options.corpus)
    if len(corpus.names) < 2:
        raise UserError(f"{corpus.root}: DoReMi needs at least 2 domains, there is 1; add another")
    epoch_limit(options, corpus, corpus.names).check()
    check_output(options.output, Mixture.KIND)
    folder = resolve_work_dir(options.output, options.work_dir)
    if options.reference is None:
        reference_run = reference_run or _reference_run(options, folder)
        reference_dir = reference_run.run_dir
    else:
        reference_dir = options.reference
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    proxy = HookedProxy("DoReMi", ExcessLossReweighting, proxy_run)
    training_plan = plan_training(proxy_run)
    plan = DoremiPlan(
        options=options,
        corpus=corpus,
        recipe=recipe,
        reference_dir=reference_dir,
        reference_run=reference_run,
        proxy=proxy,
        shape=training_plan.shape,
    )
    reference = None
    if reference_run is None:
        reference = plan.reference()
        warn_reference_differences(reference_dir, corpus, proxy_run)
    else:
        if options.reference_mixture == NATURAL:  # not written yet
            plan_training(dataclasses.replace(reference_run, mixture="uniform"))
        else:
            check_run_folder(plan_training(reference_run))
    state = proxy.saved_state(training_plan)
    if state is not None:
        if reference is None and not is_finished(reference_dir):
            raise UserError(
                f"{proxy_run.run_dir} holds a proxy, but its reference in {reference_dir} is "
                f"missing or not finished: restore it, or {FRESH_START}"
            )
        with proxy.folder_in_errors():
            parse_state(state, len(corpus.names), recipe, reference or plan.reference())
    return plan


def recipe_of(rule: DoremiRule) -> DoremiRecipe:
    """The recipe of the variant, with the values that ``rule`` sets.

    Raises:
        UserError: for values that do not go together.
    """
    recipe = RECIPES[rule.doremi_variant]
    try:
        return dataclasses.replace(
            recipe,
            eta=recipe.eta if rule.doremi_eta is None else rule.doremi_eta,
            eps=recipe.eps if rule.doremi_eps is None else rule.doremi_eps,
            floor=rule.excess_floor,
            ceiling=rule.excess_ceiling,
        )
    except ValueError as error:
        raise UserError(
            f"--doremi-eta, --doremi-eps, --excess-floor or --excess-ceiling: {error}"
        ) from error


def _reference_run(options: DoremiOptions, folder: Path) -> PretrainOptions:
    proxy = options.proxy
    if options.reference_model_size is not None:
        proxy = dataclasses.replace(proxy, model_size=options.reference_model_size)
    mixture = options.reference_mixture or "uniform"
    if mixture == NATURAL:
        mixture = str(folder / "reference-mixture.json")
    return training_options(proxy, options.corpus, folder / REFERENCE, mixture)


def _write_natural(plan: DoremiPlan) -> None:
    """Write the natural mixture if the reference is trained with it."""
    if plan.options.reference_mixture == NATURAL and plan.reference_run is not None:
        tokens = plan.corpus.train_tokens
        shares = natural_weights(list(tokens.values())).tolist()
        mixture = Mixture(dict(zip(tokens, shares, strict=True)), method=NATURAL)
        mixture.save(Path(str(plan.reference_run.mixture)))


def _write_mixture(plan: DoremiPlan, reference: Reference) -> None:
    """Write the mean weights of the finished proxy and print them, on one rank."""
    stopwatch, recipe = Stopwatch(), plan.recipe
    trained = TrainingRun.load(plan.reference_dir)
    proxy = plan.proxy.finished()
    names = plan.corpus.names
    state = parse_state(proxy.state, len(names), recipe, reference)

    def by_name(values: Array) -> dict[str, float]:
        return dict(zip(names, values.tolist(), strict=True))

    steps = state.counted - int(recipe.count_first)
    path = WeightPath(by_name(state.weights), by_name(state.mean), state.moved, steps)
    path.warn_unsettled(FIX_UNSETTLED)
    write_mean_weights(
        path,
        [trained, proxy.run],
        plan.options,
        plan.corpus,
        stopwatch,
        method="doremi",
        settings=_settings(plan, reference, trained),
        steps_averaged=state.counted,
        scores=by_name(state.excess),
        inputs={"reference": reference.checkpoint.hash, "proxy": proxy.hash},
        paper_flops=_paper_flops(plan, reference, trained, proxy.run),
        heading=f"\nDoReMi, {plan.options.rule.doremi_variant}, eta {recipe.eta:g}, eps "
        f"{recipe.eps:g}: mean weights of {proxy.run.step:,} steps, reference {trained.root}; "
        "score: last excess loss",
        closing=f"cost: reference {trained.cost.flops:.2e} FLOPs, proxy {proxy.run.cost.flops:.2e}",
    )


def _settings(plan: DoremiPlan, reference: Reference, trained: TrainingRun) -> dict[str, Any]:
    return {
        "variant": plan.options.rule.doremi_variant,
        "eta": plan.recipe.eta,
        "eps": plan.recipe.eps,
        "excess_floor": plan.recipe.floor,
        "excess_ceiling": plan.recipe.ceiling,
        "reference": {
            "model_size": name_of(reference.shape.size),
            "train_iters": trained.step,
            "mixture": trained.mixture,
        },
        "proxy": {
            "model_size": name_of(plan.shape.size),
            "train_iters": plan.proxy.options.train_iters,
        },
    }


def _paper_flops(
    plan: DoremiPlan, reference: Reference, trained: TrainingRun, proxy: TrainingRun
) -> float:
    """FLOPs by the formulas of Chameleon's tables: the two training runs alone.

    The tables count pairs of runs of one size and length; each run here is half of such a pair.
    """
    both = ((reference.shape.size, trained), (plan.shape.size, proxy))
    pairs = (PaperSettings(model_size=size, trained_tokens=run.tokens) for size, run in both)
    return sum(paper_flops("doremi", pair) for pair in pairs) / 2
