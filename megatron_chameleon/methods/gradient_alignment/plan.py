"""What DoGE was asked for: the proxy's run, the update rule and the target, all checked."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.proxy_run import training_options
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.methods.common.work_dir import work_dir_of
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.plan import plan_training

PROXY = "proxy"
# The paper's for the universal target, and for targets that are not trained on.
MU, MU_OUT_OF_DOMAIN = 0.01, 0.05


@dataclasses.dataclass(frozen=True)
class DogePlan:
    """The options with what they name, all checked.

    Attributes:
        options: what was asked for.
        corpus: what the proxy is trained on.
        recipe: of the update rule.
        roles: of the corpus's domains, in its order.
        proxy_run: how the proxy is trained.
        shape: of the proxy.
    """

    options: DogeOptions
    corpus: Corpus
    recipe: DogeRecipe
    roles: Roles
    proxy_run: PretrainOptions
    shape: ModelShape


def plan_doge(options: DogeOptions) -> DogePlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    corpus = Corpus.load(options.corpus)
    roles = roles_of(options, corpus)
    recipe = recipe_of(options.rule, roles)
    limit_of(options, corpus, corpus.names).check()
    folder = work_dir_of(options.output, options.work_dir)
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    shape = plan_training(proxy_run).shape
    return DogePlan(options, corpus, recipe, roles, proxy_run, shape)


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
        target = _positions(options.target, corpus)
        others = tuple(position for position in everything if position not in target)
        roles = Roles(everything if options.train_on_target else others, target)
    if len(roles.train) < 2:
        way_out = "give fewer, or --train-on-target" if options.target else "add another one"
        raise UserError(
            f"{'--target ' + options.target if options.target else corpus.root}: "
            f"{len(roles.train)} domain(s) are left to weigh against each other; {way_out}"
        )
    return roles


def _positions(target: str, corpus: Corpus) -> tuple[int, ...]:
    asked = {name.strip() for name in target.split(",") if name.strip()}
    unknown = sorted(asked - set(corpus.names))
    if unknown or not asked:
        problem = f"there is no domain '{unknown[0]}'" if unknown else "it names no domain"
        raise UserError(
            f"--target {target}: {problem}; those of {corpus.root} are {listed(corpus.names)}"
        )
    return tuple(position for position, name in enumerate(corpus.names) if name in asked)


def recipe_of(rule: DogeRule, roles: Roles) -> DogeRecipe:
    """The rule, with the paper's mu where none is given.

    Raises:
        UserError: for a value that the rule cannot have.
    """
    trained_on = set(roles.target) <= set(roles.train)
    default = MU if trained_on else MU_OUT_OF_DOMAIN
    try:
        return DogeRecipe(
            mu=default if rule.doge_mu is None else rule.doge_mu,
            eps=rule.doge_eps,
            dw_min=rule.doge_dw_min,
            dw_max=rule.doge_dw_max,
            max_norm=rule.doge_max_norm,
        )
    except ValueError as error:
        argument, _, problem = str(error).partition(" ")
        raise UserError(f"--doge-{argument.replace('_', '-')} {problem}") from error
