"""DoGE: train the proxy with the DoGE hook, and write the mixture.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024, Algorithm 1. The base model is trained with the mixture
afterwards, by pretrain_gpt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_chameleon.artifacts import Corpus, Mixture
from megatron_chameleon.artifacts.record import check_output
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.sampler import Batch, SampleSource
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.corpus.domains import Domains
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import Target, check_text_options, parse_target
from megatron_chameleon.corpus.target_corpus import FOLDER_NAME, corpus_with_texts
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doge import HELD_OUT, MU, MU_OUT_OF_DOMAIN, PAPER, DogeOptions
from megatron_chameleon.methods.limits import epoch_limit
from megatron_chameleon.methods.output import by_name
from megatron_chameleon.methods.predicted_gain import write_prior_without_gain
from megatron_chameleon.methods.train_proxy import MeanWeightsHook, ProxyMethod
from megatron_chameleon.mixture.doge import (
    DogeRule,
    DogeState,
    Roles,
    clip_factors,
    gradient_weights,
)
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.parallel.layout import Layout, from_main
from megatron_chameleon.training.domain_gradients import DomainGradients
from megatron_chameleon.training.plan import TrainingPlan


class GradientAlignment(MeanWeightsHook[DogeState]):
    """Weight the gradient of each domain by its alignment with the gradient of the target.

    Samples always follow the run's mixture; only the weights of their gradients change.

    Args:
        names: the k domains of the corpus.
        rule: parameters of the update rule.
        roles: which domains are trained on, and which are the target. Position k is the held-out
            mix.
        held_out: samples of the held-out mix, if it is the target.
        target_batch_size: number of these samples in each step.
        mixed: names of the domains in the held-out mix; default: all k domains.
        shares: name -> share of each target domain, if they are not equal.
    """

    combines_gradients = True

    def __init__(
        self,
        names: Sequence[str],
        rule: DogeRule,
        roles: Roles,
        held_out: SampleSource | None = None,
        target_batch_size: int = 0,
        mixed: Sequence[str] = (),
        shares: Mapping[str, float] | None = None,
    ) -> None:
        held = held_out is not None
        settings = {
            "rule": dataclasses.asdict(rule),
            "algorithm": HELD_OUT if held else PAPER,
            "trained_on": [names[position] for position in roles.train],
            "target_domains": list(mixed or names) if held else [names[i] for i in roles.target],
            "target_shares": None if shares is None else dict(shares),
        }
        first = DogeState.first(len(names) + int(held), roles)
        super().__init__(names, roles.train, first, settings)
        self._rule, self._roles, self._held_out = rule, roles, held_out
        self.target_batch_size = target_batch_size

    def prepare(self) -> None:
        """Check the files of the held-out text. Collective."""
        if isinstance(self._held_out, BlendedTokens):
            from_main(self._held_out.open)

    def target_batch(self, indices: Sequence[int]) -> Batch:
        """Read samples of the held-out mix."""
        assert self._held_out is not None
        return self._held_out.batch(indices)

    def gradient_weights(self, gradients: DomainGradients) -> torch.Tensor:
        """Update the domain weights by the gradients' inner products; weight the gradients by them.

        Products that are not finite are ignored. If they belong to a training domain, the trainer
        skips the step.
        """
        products = gradients.dot_products().cpu().numpy()
        present, factors = gradients.present, np.ones(len(products))
        if np.isfinite(products).all():
            factors = clip_factors(products, self._rule.max_norm)
            self.state = self.state.after(
                products, present, gradients.learning_rate, self._rule, self._roles
            )
        return torch.from_numpy(gradient_weights(self.state, factors, present, self._roles))

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and each domain's alignment."""
        alignment = self.state.alignment[: len(self.names)]
        return {**super().metrics(), "alignment": by_name(self.names, alignment)}


class Doge(ProxyMethod[DogeOptions, DogeState]):
    """DoGE: mean weights of a proxy, updated by the alignment of gradients with the target."""

    name, title = "doge", "DoGE"

    def __init__(self, options: DogeOptions) -> None:
        corpus, trained_on = Corpus.load(options.corpus), None
        check_output(options.output, Mixture.KIND)
        self.target: Target | None = None
        if options.target is not None:
            source = SourceOptions((), text_key=options.target_text_key)
            self.target = parse_target(options.target, list(corpus.all_domains), source)
            check_text_options(options, self.target)
        mixed = mixed_domains(options, corpus, self.target)
        self.roles = roles_of(options, corpus, self.target, targets_mix=bool(mixed))
        if self.target and self.target.texts:
            folder = options.runs_folder / FOLDER_NAME
            trained_on = corpus_with_texts(corpus, self.target, source, folder).root
        super().__init__(options, trained_on)
        self.mix = held_out_data(self.plan, mixed)
        is_trained_on = set(self.roles.target) <= set(self.roles.train)
        in_domain = is_trained_on or options.uses_held_out
        self.rule = options.rule.resolve(MU if in_domain else MU_OUT_OF_DOMAIN)
        self.target_batch_size = 0
        if self.mix is not None:
            texts = self.target.texts if self.target else ()
            check_held_out(self.mix, self.run.seq_length, texts)
            counts = len(self.corpus.names), len(self.mix.domains)
            self.target_batch_size = held_out_batch_size(self.run.global_batch_size, *counts)
        # A target that is not trained on gets no weight, so its tokens do not help to fill the
        # budget.
        trained = [self.corpus.names[position] for position in self.roles.train]
        epoch_limit(options, self.corpus, trained).check()
        self.check_proxy()

    def needs_no_proxy(self) -> bool:
        """Write the prior if no gain over it is certain; return whether it was written."""
        names = self.corpus.names
        domains = [names[position] for position in self.roles.train]
        assert self.run.corpus is not None
        return write_prior_without_gain(
            self.name,
            self.options,
            self.runs,
            self.target,
            self.run.corpus,
            domains=None if domains == names else domains,
        )

    def make_hook(self, plan: TrainingPlan, layout: Layout | None) -> GradientAlignment:
        """Construct the hook of the proxy's run."""
        names, size, mix = self.corpus.names, self.target_batch_size, self.mix
        shares = unequal_shares(self.target)
        if mix is None:
            return GradientAlignment(names, self.rule, self.roles, shares=shares)
        samples = held_out_mix(plan, mix, size, shares)
        return GradientAlignment(names, self.rule, self.roles, samples, size, mix.names, shares)

    def write_mixture(self) -> None:
        """Write the mean weights of the finished proxy. Called on one rank."""
        options, rule, size = self.options, self.rule, self.target_batch_size
        run, hook, inputs = self.finished()
        target = f"{size} held-out samples per step" if size else "all domains"
        settings = dict(hook.settings)
        if self.target is not None:
            settings["target"] = dataclasses.asdict(self.target.record)
            names = hook.settings["target_domains"]
            if shares := unequal_shares(self.target):
                names = [f"{name} {shares[name]:.0%}" for name in names]
            how = f"{'' if options.train_on_target else 'not '}trained on"
            if self.mix is not None:
                how = f"held-out text, {size} samples per step"
            target = f"{', '.join(names)} ({how})"
            if self.target.texts:
                inputs["target text"] = self.target.texts_hash
        computed = run.tokens + run.step * size * self.run.seq_length
        self.write_mean_weights(
            hook,
            hook.state.counted,
            [run],
            settings=settings,
            scores=hook.state.mean_alignment[: len(self.corpus.names)],
            inputs=inputs,
            paper_flops=paper_flops(self.plan.config, trained_tokens=computed),
            heading=f"\nDoGE, target {target}, mu {rule.mu:g}, eps {rule.eps:g}: mean weights "
            f"of {run.step:,} steps; the score is the mean alignment with the target",
            hint="use a larger --doge-mu or --doge-eps",
        )


def unequal_shares(target: Target | None) -> Mapping[str, float] | None:
    """Return the shares of the target's domains; None if there is no target, or they are equal."""
    if target is None or len(set(target.shares.values())) == 1:
        return None
    return target.shares


def mixed_domains(options: DogeOptions, corpus: Corpus, target: Target | None) -> list[str]:
    """Return the names of the domains in the held-out mix; none if it is not the target.

    These are all domains by default, and all of ``--target`` if it names a held-out domain or a
    text, which have no gradients on the training batch.

    Raises:
        UserError: for options that do not apply to held-out text.
    """
    if target is None:
        return corpus.names if options.uses_held_out else []
    held_out = [name for name in target.shares if name not in corpus.domains]
    if not held_out:
        return []
    subject = f"--target {options.target}: '{held_out[0]}' is not trained on"
    if options.algorithm == PAPER:
        raise UserError(f"{subject}; leave out --algorithm {PAPER}")
    if options.train_on_target and len(held_out) == len(target.shares):
        raise UserError(f"{subject}; leave out --train-on-target")
    return list(target.shares)


def held_out_data(plan: TrainingPlan, names: Sequence[str]) -> Domains | None:
    """Return the valid splits of the domains ``names``; None without names."""
    assert plan.valid is not None, "a corpus has all splits"
    chosen = [name for name in plan.valid.splits["valid"] if name in names]
    return dataclasses.replace(plan.valid, names=chosen) if chosen else None


def held_out_batch_size(global_batch_size: int, num_domains: int, num_mixed: int) -> int:
    """Samples of the held-out mix per step: equal parts of m domains, about B / k in total.

    In the authors' code, the mix is sampled as often as a domain. Here the number is rounded so
    that each domain of the mix has the same number of samples, at least one.

    Args:
        global_batch_size: B.
        num_domains: k, number of domains to train on.
        num_mixed: m, number of domains in the mix.
    """
    return num_mixed * max(1, round(global_batch_size / (num_domains * num_mixed)))


def check_held_out(mix: Domains, seq_length: int, texts: Container[str] = ()) -> None:
    """Check that each domain of the held-out mix, also each of ``texts``, has enough text.

    Raises:
        UserError: if it is shorter than one sample.
    """
    for domain in mix.domains:
        if domain.tokens >= seq_length + 1:
            continue
        if domain.name in texts:
            raise UserError(
                f"--target: the text of '{domain.name}' has {domain.tokens} tokens, fewer than one "
                f"sample of {seq_length + 1}; pass more text, or a smaller --seq-length"
            )
        raise UserError(
            f"{mix.where}: DoGE's target is held-out text, but the valid split of "
            f"'{domain.name}' has {domain.tokens} tokens, fewer than one sample of "
            f"{seq_length + 1}; preprocess it with a larger valid share (--split), or pass "
            "--algorithm paper"
        )


def held_out_mix(
    plan: TrainingPlan,
    mix: Domains,
    samples_per_step: int,
    shares: Mapping[str, float] | None = None,
) -> BlendedTokens:
    """Return the samples of the held-out mix for the whole run, in order.

    They are equal parts of each domain of ``mix``, also within each step. With ``shares``, they are
    in proportion to these, in each step only approximately. The order depends only on the seed.
    Text is repeated, in another order, once all of it has been read.
    """
    weights = [shares[name] if shares else 1.0 for name in mix.names]
    return BlendedTokens(
        data=mix,
        schedule=MixtureSchedule.fixed(weights),
        num_samples=plan.options.train_iters * samples_per_step,
        seq_length=plan.options.seq_length,
        seed=plan.options.seed,
        permutation="epoch",
        boundaries=plan.options.boundaries,
    )


def roles_of(
    options: DogeOptions, corpus: Corpus, target: Target | None, *, targets_mix: bool
) -> Roles:
    """Return the positions of the training domains and of the target domains.

    The held-out mix, which is the target with ``targets_mix``, has position k.

    Raises:
        UserError: if there are fewer than two training domains.
    """
    everything = tuple(range(len(corpus.names)))
    shares = target.shares if target else {}
    named = tuple(i for i in everything if corpus.names[i] in shares)
    others = tuple(i for i in everything if i not in named)
    trained = everything if options.train_on_target else others
    if targets_mix:
        roles = Roles(trained, (len(everything),))
    elif target is None:
        roles = Roles(everything, everything)
    else:
        factors: tuple[float, ...] = ()
        if unequal_shares(target):  # their mean is 1, as the factor of equal shares
            factors = tuple(len(named) * shares[corpus.names[i]] for i in named)
        roles = Roles(trained, named, factors)
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
