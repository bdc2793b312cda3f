"""DoGE end to end: train the proxy, write the mixture.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1. The base model is trained with the mixture
afterwards, by tools/pretrain_gpt.py.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Corpus, Mixture, Stopwatch
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doge.hook import GradientAlignment
from megatron_chameleon.methods.doge.options import DogeOptions, DogeRule
from megatron_chameleon.methods.output import (
    epoch_limit,
    select_domains,
)
from megatron_chameleon.methods.proxy import (
    PROXY,
    HookedProxy,
    WeightPath,
    forward_only,
    resolve_work_dir,
    train_proxy,
    training_options,
    write_mean_weights,
)
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from megatron_chameleon.model.flops import PaperSettings, paper_flops
from megatron_chameleon.model.sizes import ModelShape, name_of
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.stopping import StopRequests

# The paper's values for the universal target, and for a target that is not trained on.
MU, MU_OUT_OF_DOMAIN = 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class DogePlan:
    """Validated options and the artifacts that they name.

    Attributes:
        options: of the method.
        corpus: of the domains.
        recipe: of the update rule.
        roles: of the corpus's domains, in its order.
        proxy: its run.
        shape: of the proxy.
    """

    options: DogeOptions
    corpus: Corpus
    recipe: DogeRecipe
    roles: Roles
    proxy: HookedProxy
    shape: ModelShape


def compute_doge(options: DogeOptions, stops: StopRequests | None = None) -> bool:
    """Train the proxy unless it is finished, and write the mixture. Called on every rank.

    Args:
        options: of the method.
        stops: stop-signal handler; created for this call if None.

    Returns:
        Whether the mixture was written; False after a stop signal.

    Raises:
        UserError: for a mistake in the options or in what they name, before any training; later,
            as training does.
    """
    stops = stops or StopRequests(options.proxy.stopping)
    parallel = forward_only(options.proxy.parallel)
    with distributed(parallel, seed=0):
        plan = from_main(lambda: plan_doge(options))
    names = plan.corpus.names
    finished = train_proxy(
        plan.proxy.options,
        stops,
        lambda _run, _layout: GradientAlignment(names, plan.recipe, plan.roles),
        name="DoGE's proxy",
    )
    if finished:
        with distributed(parallel, seed=0):
            from_main(lambda: _write_mixture(plan))
    return finished


def plan_doge(options: DogeOptions) -> DogePlan:
    """Validate the options, what they name, and the content of the run folder. Writes nothing.

    Args:
        options: of the method.

    Raises:
        UserError: for the first mistake found.
    """
    corpus = Corpus.load(options.corpus)
    roles = roles_of(options, corpus)
    is_trained_on = set(roles.target) <= set(roles.train)
    recipe = recipe_of(options.rule, MU if is_trained_on else MU_OUT_OF_DOMAIN)
    # A target that is not trained on gets no weight, so that its tokens fill no budget.
    epoch_limit(options, corpus, [corpus.names[position] for position in roles.train]).check()
    check_output(options.output, Mixture.KIND)
    folder = resolve_work_dir(options.output, options.work_dir)
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    proxy = HookedProxy("DoGE", GradientAlignment, proxy_run)
    training_plan = plan_training(proxy_run)
    proxy.check_saved(training_plan, GradientAlignment(corpus.names, recipe, roles).load_state_dict)
    return DogePlan(options, corpus, recipe, roles, proxy, training_plan.shape)


def roles_of(options: DogeOptions, corpus: Corpus) -> Roles:
    """Positions of the domains that are trained on, and of the target.

    Raises:
        UserError: for an unknown domain, or fewer than two to weigh.
    """
    everything = tuple(range(len(corpus.names)))
    if options.target is None:
        roles = Roles(everything, everything)
    else:
        named = set(select_domains(options.target, corpus, "--target"))
        target = tuple(i for i, name in enumerate(corpus.names) if name in named)
        others = tuple(i for i in everything if i not in target)
        roles = Roles(everything if options.train_on_target else others, target)
    if len(roles.train) < 2:
        subject = f"--target {options.target}" if options.target else f"{corpus.root}"
        fix = "name fewer, or add --train-on-target" if options.target else "add a domain"
        raise UserError(
            f"{subject}: DoGE needs at least 2 domains to weigh, there is {len(roles.train)}; {fix}"
        )
    return roles


def recipe_of(rule: DogeRule, mu: float) -> DogeRecipe:
    """The recipe of ``rule``, with ``mu`` unless it sets one.

    Raises:
        UserError: for values that do not go together.
    """
    try:
        return DogeRecipe(
            mu=mu if rule.doge_mu is None else rule.doge_mu,
            eps=rule.doge_eps,
            dw_min=rule.doge_dw_min,
            dw_max=rule.doge_dw_max,
            max_norm=rule.doge_max_norm,
        )
    except ValueError as error:
        argument, _, problem = str(error).partition(" ")
        raise UserError(f"--doge-{argument.replace('_', '-')} {problem}") from error


def _write_mixture(plan: DogePlan) -> None:
    """Write the mean weights of the finished proxy and print them, on one rank."""
    stopwatch, names, roles, recipe = Stopwatch(), plan.corpus.names, plan.roles, plan.recipe
    run, proxy_hash, saved = plan.proxy.finished()
    hook = GradientAlignment(names, recipe, roles)
    hook.load_state_dict(saved)
    logged, steps = hook.metrics(), hook.state.counted
    target = "all domains"
    if plan.options.target is not None:
        trained = "trained on" if plan.options.train_on_target else "not trained on"
        target = f"{', '.join(names[position] for position in roles.target)} ({trained})"
    size = plan.shape.size
    write_mean_weights(
        WeightPath(
            last=logged["weights"],
            mean=logged["mean_weights"],
            moved=logged["moved"],
            steps=steps,
            averaged=steps,
        ),
        [run],
        plan.options,
        plan.corpus,
        stopwatch,
        method="doge",
        settings={
            **hook.settings,
            "proxy": {
                "model_size": name_of(size),
                "train_iters": plan.proxy.options.train_iters,
            },
        },
        scores=dict(zip(names, hook.state.mean_alignment.tolist(), strict=True)),
        inputs={"proxy": proxy_hash},
        paper_flops=paper_flops("doge", PaperSettings(model_size=size, trained_tokens=run.tokens)),
        heading=f"\nDoGE, target {target}, mu {recipe.mu:g}, eps {recipe.eps:g}: mean weights of "
        f"{run.step:,} steps; score: mean alignment with the target",
        fix_unsettled="use a larger --doge-mu or --doge-eps",
    )
