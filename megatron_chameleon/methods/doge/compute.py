"""DoGE: train the proxy with the DoGE hook, and write the mixture.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1. The base model is trained with the mixture
afterwards, by pretrain_gpt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doge import MU, MU_OUT_OF_DOMAIN, DogeOptions
from megatron_chameleon.methods.output import by_name, epoch_limit, select_domains
from megatron_chameleon.methods.proxy import MeanWeightsHook, ProxyMethod
from megatron_chameleon.mixture.doge import (
    DogeRecipe,
    DogeState,
    Roles,
    clip_factors,
    gradient_weights,
)
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.domain_gradients import DomainGradients
from megatron_chameleon.training.plan import TrainingPlan


class GradientAlignment(MeanWeightsHook[DogeState]):
    """Weight the gradient of each domain by its alignment with the gradient of the target.

    Samples always follow the run's mixture; only the weights of their gradients change.

    Args:
        names: the k domains of the corpus.
        recipe: parameters of the update rule.
        roles: which domains are trained on, and which are the target.
    """

    combines_gradients = True

    def __init__(self, names: Sequence[str], recipe: DogeRecipe, roles: Roles) -> None:
        settings = {
            "rule": dataclasses.asdict(recipe),
            "trained_on": [names[position] for position in roles.train],
            "target_domains": [names[position] for position in roles.target],
        }
        super().__init__(names, roles.train, DogeState.first(len(names), roles), settings)
        self._recipe, self._roles = recipe, roles

    def gradient_weights(self, gradients: DomainGradients) -> torch.Tensor:
        """Update the domain weights by the gradients' inner products; weight the gradients by them.

        Products that are not finite are ignored. If they belong to a training domain, the trainer
        skips the step.
        """
        products = gradients.dot_products().cpu().numpy()
        present, factors = gradients.present, np.ones(len(self.names))
        if np.isfinite(products).all():
            factors = clip_factors(products, self._recipe.max_norm)
            self.state = self.state.after(
                products, present, gradients.learning_rate, self._recipe, self._roles
            )
        return torch.from_numpy(gradient_weights(self.state, factors, present, self._roles))

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and each domain's alignment."""
        return {**super().metrics(), "alignment": by_name(self.names, self.state.alignment)}


class Doge(ProxyMethod[DogeOptions, DogeState]):
    """DoGE: mean weights of a proxy, updated by the alignment of gradients with the target."""

    name, title = "doge", "DoGE"

    def __init__(self, options: DogeOptions) -> None:
        super().__init__(options)
        self.roles = roles_of(options, self.corpus)
        is_trained_on = set(self.roles.target) <= set(self.roles.train)
        self.recipe = options.rule.resolve(MU if is_trained_on else MU_OUT_OF_DOMAIN)
        # A target that is not trained on gets no weight, so its tokens do not help to fill the
        # budget.
        trained = [self.corpus.names[position] for position in self.roles.train]
        epoch_limit(options, self.corpus, trained).check()
        self.check_proxy()

    def make_hook(self, plan: TrainingPlan, layout: Layout | None) -> GradientAlignment:
        """Construct the hook of the proxy's run."""
        return GradientAlignment(self.corpus.names, self.recipe, self.roles)

    def write_mixture(self) -> None:
        """Write the mean weights of the finished proxy. Called on one rank."""
        options, recipe, target = self.options, self.recipe, "all domains"
        run, hook, inputs = self.finished()
        if options.target is not None:
            names = ", ".join(self.corpus.names[position] for position in self.roles.target)
            target = f"{names} ({'' if options.train_on_target else 'not '}trained on)"
        self.write_mean_weights(
            hook,
            hook.state.counted,
            [run],
            settings=hook.settings,
            scores=hook.state.mean_alignment,
            inputs=inputs,
            paper_flops=paper_flops(self.plan.config, trained_tokens=run.tokens),
            heading=f"\nDoGE, target {target}, mu {recipe.mu:g}, eps {recipe.eps:g}: mean weights "
            f"of {run.step:,} steps; the score is the mean alignment with the target",
            hint="use a larger --doge-mu or --doge-eps",
        )


def roles_of(options: DogeOptions, corpus: Corpus) -> Roles:
    """Return the positions of the training domains and of the target domains.

    Raises:
        UserError: for an unknown domain, or fewer than two training domains.
    """
    everything = tuple(range(len(corpus.names)))
    if options.target is None:
        roles = Roles(everything, everything)
    else:
        named = set(select_domains(options.target, corpus.names, corpus.root, "--target"))
        target = tuple(i for i, name in enumerate(corpus.names) if name in named)
        others = tuple(i for i in everything if i not in target)
        roles = Roles(everything if options.train_on_target else others, target)
    if len(roles.train) < 2:
        subject = f"--target {options.target}" if options.target else f"{corpus.root}"
        fix = "name fewer target domains, or add --train-on-target"
        if not options.target:
            fix = "add a domain"
        raise UserError(
            f"{subject}: DoGE needs at least 2 training domains, but there is "
            f"{len(roles.train)}; {fix}"
        )
    return roles
