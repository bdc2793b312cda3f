"""DoGE end to end: train the proxy, write the mixture.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1. The base model is trained with the mixture
afterwards, by tools/pretrain_gpt.py.
"""

from __future__ import annotations

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doge.hook import GradientAlignment
from megatron_chameleon.methods.doge.options import DogeOptions, DogeRule
from megatron_chameleon.methods.output import epoch_limit, select_domains
from megatron_chameleon.methods.proxy import ProxyMethod
from megatron_chameleon.mixture.doge import DogeRecipe, DogeState, Roles
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.plan import TrainingPlan

# The paper's values: all domains are the target, and the target is not trained on.
MU, MU_OUT_OF_DOMAIN = 0.01, 0.05


class Doge(ProxyMethod[DogeOptions, DogeState]):
    """DoGE: mean weights of a proxy, updated by the alignment of gradients with the target."""

    name, title, hook = "doge", "DoGE", GradientAlignment

    def __init__(self, options: DogeOptions) -> None:
        super().__init__(options)
        self.roles = roles_of(options, self.corpus)
        self.weighted = self.roles.train
        is_trained_on = set(self.roles.target) <= set(self.roles.train)
        self.recipe = recipe_of(options.rule, MU if is_trained_on else MU_OUT_OF_DOMAIN)
        # A target that is not trained on gets no weight: its tokens do not count.
        trained = [self.corpus.names[position] for position in self.roles.train]
        epoch_limit(options, self.corpus, trained).check()
        self.check_proxy()

    def make_hook(self, plan: TrainingPlan, layout: Layout | None) -> GradientAlignment:
        """Construct the hook of the proxy's run."""
        return GradientAlignment(self.corpus.names, self.recipe, self.roles)

    def write_mixture(self) -> None:
        """Write the mean weights of the finished proxy. Called on one rank."""
        names, options, recipe = self.corpus.names, self.options, self.recipe
        run, proxy_hash, state = self.finished()
        target = "all domains"
        if options.target is not None:
            trained = "trained on" if options.train_on_target else "not trained on"
            target = f"{', '.join(names[position] for position in self.roles.target)} ({trained})"
        self.write_mean_weights(
            state,
            state.counted,
            [run],
            settings=self.make_hook(self.plan, None).settings,
            scores=state.mean_alignment,
            inputs={"proxy": proxy_hash},
            paper_flops=paper_flops(self.plan.shape.size, trained_tokens=run.tokens),
            heading=f"\nDoGE, target {target}, mu {recipe.mu:g}, eps {recipe.eps:g}: mean weights "
            f"of {run.step:,} steps; score: mean alignment with the target",
            hint="use a larger --doge-mu or --doge-eps",
        )


def roles_of(options: DogeOptions, corpus: Corpus) -> Roles:
    """Positions of the training domains and of the target domains.

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
    """Recipe with the values of ``rule``; ``mu`` is its default.

    Raises:
        UserError: for values that contradict each other.
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
