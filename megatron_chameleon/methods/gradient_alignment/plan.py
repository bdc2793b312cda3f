"""What DoGE was asked for: the proxy's run, the update rule and the target, all checked."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.mixture import KIND
from megatron_chameleon.artifacts.output_path import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.chosen import chosen_domains
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.proxy_run import training_options, way_out_of
from megatron_chameleon.methods.common.watched_proxy import (
    PROXY,
    WatchedPlan,
    Watcher,
    state_so_far,
)
from megatron_chameleon.methods.common.work_dir import BY_WORK_DIR, work_dir_of
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.gradient_alignment.hook import (
    GradientAlignment,
    require_found_with,
    standing_of,
)
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.training.plan import plan_training

WATCHER = Watcher("DoGE", GradientAlignment)
# The paper's for the universal target, and for targets that are not trained on.
MU, MU_OUT_OF_DOMAIN = 0.01, 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class DogePlan(WatchedPlan):
    """The options with what they name, all checked.

    Attributes:
        options: what was asked for.
        recipe: of the update rule.
        roles: of the corpus's domains, in its order.
    """

    options: DogeOptions
    recipe: DogeRecipe
    roles: Roles


def plan_doge(options: DogeOptions, elsewhere: str = BY_WORK_DIR) -> DogePlan:
    """Read and check what ``options`` name, and what the run's folder holds; nothing is written.

    Args:
        options: what is asked for.
        elsewhere: how a person chooses another folder for the run.

    Raises:
        UserError: for the first mistake found.
    """
    corpus = Corpus.load(options.corpus)
    roles = roles_of(options, corpus)
    recipe = recipe_of(options.rule, default_mu(roles))
    # Of those that get a weight alone: a target that is not trained on fills no budget.
    limit_of(options, corpus, [corpus.names[position] for position in roles.train]).check()
    check_output(options.output, KIND)
    folder = work_dir_of(options.output, options.work_dir)
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    way_out = way_out_of(proxy_run.run_dir, elsewhere)
    proxy = plan_training(proxy_run, way_out)
    state = state_so_far(proxy, WATCHER)
    if state is not None:
        require_found_with(state, corpus.names, recipe, roles, way_out)
        standing_of(state, len(corpus.names), roles, way_out)
    return DogePlan(
        options=options,
        corpus=corpus,
        recipe=recipe,
        roles=roles,
        proxy_run=proxy_run,
        shape=proxy.shape,
        elsewhere=elsewhere,
    )


def roles_of(options: DogeOptions, corpus: Corpus) -> Roles:
    """Which domains are trained on, and which are the target.

    Raises:
        UserError: for a domain that the corpus does not have, or fewer than two to weigh.
    """
    everything = tuple(range(len(corpus.names)))
    if options.target is None:
        if options.train_on_target:
            raise UserError("--train-on-target: there is no --target; leave it out, or give one")
        roles = Roles(everything, everything)
    else:
        named = chosen_domains(options.target, corpus, "--target")
        target = tuple(corpus.names.index(name) for name in named)
        others = tuple(position for position in everything if position not in target)
        roles = Roles(everything if options.train_on_target else others, target)
    if len(roles.train) < 2:
        way_out = "give fewer, or --train-on-target" if options.target else "add another one"
        raise UserError(
            f"{'--target ' + options.target if options.target else corpus.root}: "
            f"{len(roles.train)} domain(s) are left to weigh against each other; {way_out}"
        )
    return roles


def default_mu(roles: Roles) -> float:
    """The paper's, which depends on whether the target is trained on."""
    return MU if set(roles.target) <= set(roles.train) else MU_OUT_OF_DOMAIN


def recipe_of(rule: DogeRule, mu: float) -> DogeRecipe:
    """The rule, with ``mu`` where it has none.

    Raises:
        UserError: for a value that the rule cannot have.
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
