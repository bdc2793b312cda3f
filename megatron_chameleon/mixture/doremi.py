"""DoReMi: update domain weights from excess losses.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.exponentiated import WeightState, exponentiated_step


@dataclasses.dataclass(frozen=True)
class DoremiRule:
    """Parameters of the update rule, all finite; ``DoremiRuleOptions`` checks their ranges.

    Attributes:
        eta: step size of the exponentiated gradient ascent, above 0.
        eps: share of the uniform distribution mixed into the weights after each step, in [0, 1).
        floor: lower clipping bound of the excess loss, in nats.
        ceiling: upper clipping bound; None for no limit.
        clip_tokens: clip the excess loss of each token, not the mean of a domain.
        count_first: include the initial weights in the running mean.
        domain_means: the loss of a batch is the sum over domains of the weight times the domain's
            mean loss (:func:`domain_mean_weights`); otherwise a weighted mean over tokens that
            corrects for sampling (:func:`token_weights`).
        first_excess: excess loss of a domain before it is first sampled, in nats; None for ln V
            with V tokens in the vocabulary, the loss of a model that predicts all tokens with equal
            probability.

    Raises:
        ValueError: if the ceiling is not above the floor.
    """

    eta: float = 1.0
    eps: float = 1e-3
    floor: float = 0.0
    ceiling: float | None = None
    clip_tokens: bool = True
    count_first: bool = True
    domain_means: bool = False
    first_excess: float | None = None

    def __post_init__(self) -> None:
        if self.ceiling is not None and not self.floor < self.ceiling:
            raise ValueError(
                f"ceiling is {self.ceiling!r}: must be above the floor, {self.floor:g}"
            )


VARIANTS = {
    "original": DoremiRule(),
    "fork": DoremiRule(
        eta=0.1,
        eps=0.0,
        clip_tokens=False,
        count_first=False,
        domain_means=True,
        first_excess=0.0,
    ),
}
"""``original`` is the authors' code with the values of its launch script. ``fork`` is the DoReMi of
DoGE's repository, from which Chameleon's authors take their baselines."""


@dataclasses.dataclass(frozen=True)
class DoremiState(WeightState):
    """Weights and excess losses of k domains after a number of steps.

    Attributes:
        excess: lambda, [k] float64: excess loss per token in nats, from the last batch with tokens
            of the domain.
    """

    excess: Array

    @classmethod
    def first(cls, num_domains: int, vocab_size: int, rule: DoremiRule) -> DoremiState:
        """Return the initial state: uniform weights, and the rule's ``first_excess``."""
        uniform = np.full(num_domains, 1.0 / num_domains)
        first = math.log(vocab_size) if rule.first_excess is None else rule.first_excess
        excess = np.full(num_domains, first)
        return cls(np.log(uniform), uniform, int(rule.count_first), 0.0, excess)

    def after(self, excess_sums: Array, tokens: Array, rule: DoremiRule) -> DoremiState:
        """Return the state after a step.

        Args:
            excess_sums: [k] for each domain, the proxy's loss minus the reference's, summed over
                the domain's tokens in the global batch, in nats; if the rule clips tokens, each
                token's difference is clipped before the summation.
            tokens: [k] number of tokens in each sum; 0 for an absent domain.
            rule: hyperparameters of the update rule.

        Raises:
            ValueError: if a sum is not finite.
        """
        if not np.isfinite(excess_sums).all():
            bad = int(np.argmin(np.isfinite(excess_sums)))
            raise ValueError(f"excess loss of domain {bad} is {excess_sums[bad]}: must be finite")
        means = excess_sums / np.maximum(tokens, 1.0)
        if not rule.clip_tokens:
            means = np.clip(means, rule.floor, rule.ceiling)
        excess = np.where(tokens > 0, means, self.excess)
        log_weights = exponentiated_step(self.log_weights, excess, rule.eta, rule.eps)
        return self.with_weights(log_weights, excess=excess)


def token_weights(log_weights: Array, sampling: Array, tokens: Array) -> Array:
    """Compute the weight w of each domain's token losses l; the batch loss is sum(w l) / sum(w).

    w_i is proportional to alpha_i divided by the sampling rate of the domain. The weights are
    scaled to sum to the number of tokens, by which the trainer divides the loss.

    Args:
        log_weights: ln alpha, [k] float64.
        sampling: [k] sampling rates, > 0 for domains with tokens.
        tokens: [k] tokens of each domain in the global batch.

    Returns:
        [k] float64; 0 for domains without a token.
    """
    weights = np.zeros_like(log_weights)
    present = tokens > 0
    if present.any():
        logits = log_weights[present] - np.log(sampling[present])
        # Weights are divided by the largest weight in the batch, so that their ratios are right
        # even if all weights of the batch would underflow.
        weights[present] = np.exp(logits - logits.max())
        weights *= tokens.sum() / (weights @ tokens)
    return weights


def domain_mean_weights(weights: Array, tokens: Array) -> Array:
    """Compute the weight w of each domain's token losses l for the loss sum(alpha_i mean_i(l)).

    The batch loss is sum(w l) divided by the number of tokens. alpha is not rescaled if domains are
    absent, and not divided by the sampling rates.

    Args:
        weights: alpha, [k] float64.
        tokens: [k] tokens of each domain in the global batch.

    Returns:
        [k] float64; 0 for domains without a token.
    """
    present = tokens > 0
    return np.where(present, weights * tokens.sum() / np.where(present, tokens, 1.0), 0.0)
