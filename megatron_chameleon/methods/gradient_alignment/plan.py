"""What DoGE was asked for: the proxy's run, the update rule and the target, all checked."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.proxy_run import BY_WORK_DIR, training_options, way_out_of
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.methods.common.watched_proxy import Watcher, state_so_far
from megatron_chameleon.methods.common.work_dir import check_output, work_dir_of
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.gradient_alignment.hook import GradientAlignment, require_found_with
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.way_out import WayOut

PROXY = "proxy"
WATCHER = Watcher("DoGE", GradientAlignment)
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
        elsewhere: how a person chooses another folder for the run.
    """

    options: DogeOptions
    corpus: Corpus
    recipe: DogeRecipe
    roles: Roles
    proxy_run: PretrainOptions
    shape: ModelShape
    elsewhere: str

    @property
    def way_out(self) -> WayOut:
        """What to advise where the proxy's folder holds another one."""
        return way_out_of(self.proxy_run.run_dir, self.elsewhere)


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
    check_output(options.output)
    folder = work_dir_of(options.output, options.work_dir)
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    way_out = way_out_of(proxy_run.run_dir, elsewhere)
    proxy = plan_training(proxy_run, way_out)
    state = state_so_far(proxy, WATCHER)
    if state is not None:
        require_found_with(state, corpus.names, recipe, roles, way_out)
    return DogePlan(options, corpus, recipe, roles, proxy_run, proxy.shape, elsewhere)


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
