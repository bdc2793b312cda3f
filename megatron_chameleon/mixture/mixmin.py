"""MixMin: the weights under which the mixture of the domains' models predicts a target best.

Let p_i(x_t | context) be the probability that a model of domain i gives to token t of the target.
The model that is trained on a mixture of domains predicts about as well as the mixture of the
domains' models (MixMin; Thudi et al., arXiv 2502.10510), so the weights w of the domains maximize

    sum_t s_t log sum_i w_i p_i(x_t | context),

with token weights s_t that sum to 1. The problem is concave, and EM solves it, as in the
interpolation of n-gram models on held-out text (Jelinek and Mercer, 1980). Here the objective has a
penalty,

    f(w) = sum_t s_t log sum_i w_i p_i(x_t | context) - tau KL(prior || w),

the logarithm of a Dirichlet prior whose mode is ``prior``: w is the MAP estimate. For tau = 0 it is
MixMin's estimate, and for tau -> infinity it is the prior. :func:`choose_strength` chooses the
strength tau by cross-validation over the target's documents.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import rel_entr
from scipy.stats import t as student

from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.gain import CONFIDENCE, PredictedGain
from megatron_chameleon.mixture.optimum import Limits, nearest_by_divergence

STRENGTHS = (math.inf, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.0)
NUM_FOLDS = 5
# EM stops if f(w) is within this many nats of its maximum: a hundredth of a printed digit.
TOLERANCE = 1e-6
# The search with curvature ends if a step gains less: near the maximum, f is flat.
SEARCH_TOLERANCE = 1e-14
MAX_ITERATIONS = 1000
# EM is slow where models are nearly alike. Its slow directions are then searched with curvature, in
# a time that is cubic in the number of domains.
SEARCH_INTERVAL, MOST_SEARCHED = 50, 500
# Overrelaxed EM multiplies its exponent by this factor after each step that increases f.
ACCELERATION = 1.3
# EM cannot leave a weight of 0, so its weights are at least this multiple of the largest weights.
SMALLEST = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class TargetText:
    """Probabilities of a target's tokens under the models of k domains.

    Attributes:
        probabilities: p, [n, k], above 0.
        shares: s, [n], >= 0, summing to 1.
        documents: [n] number of the document of each token, ascending from 0 without gaps.
        parts: [documents] number of the part of the target of each document. The shares of the
            parts are fixed, so folds and resamples are drawn within parts.
    """

    probabilities: Array
    shares: Array
    documents: npt.NDArray[np.int64]
    parts: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.parts)

    def log_likelihood(self, weights: Array) -> float:
        """Return sum_t s_t log sum_i w_i p_i(x_t), in nats per token."""
        return float(self.shares @ np.log(self.probabilities @ weights))

    def document_sums(self, values: Array) -> Array:
        """Sum ``values`` [n] over the tokens of each document."""
        return np.bincount(self.documents, values, self.num_documents).astype(np.float64)

    def weighted(self, counts: Array) -> TargetText:
        """Weigh each document by ``counts`` [documents]; leave out those whose count is 0.

        Every part of which a document is left keeps its share, relative to the other parts.

        Raises:
            ValueError: if no share is left.
        """
        shares, part = self.shares * counts[self.documents], self.parts[self.documents]
        before, after = np.bincount(part, self.shares), np.bincount(part, shares)
        shares *= np.divide(before, after, out=np.zeros_like(after), where=after > 0)[part]
        kept = shares > 0
        if not kept.any():
            raise ValueError("no document is left")
        return TargetText(
            self.probabilities[kept],
            shares[kept] / shares[kept].sum(),
            self.documents[kept],
            self.parts,
        )


def mixmin_weights(
    text: TargetText, limits: Limits, strength: float = 0.0, start: Array | None = None
) -> Array:
    """Maximize f(w) over the mixtures within the bounds, by EM with overrelaxation.

    The M step of EM maximizes sum_i c_i log w_i within the bounds, where c_i is the expected share
    of the tokens of domain i, plus tau times its prior: it scales c by one number and clips it. EM
    increases f with every step. Overrelaxation raises the steps' ratios to a power that grows while
    f increases (Salakhutdinov and Roweis, ICML 2003). After every ``SEARCH_INTERVAL`` steps,
    sequential quadratic programming continues, with up to ``MOST_SEARCHED`` domains. The search
    ends when a bound on the distance from the maximum, max_v grad f(w) (v - w), is below
    ``TOLERANCE``.

    Args:
        text: probabilities of the target.
        limits: prior and bounds.
        strength: tau, >= 0; infinity gives the prior within the bounds.
        start: [k] weights to start from, such as those of a similar problem.

    Returns:
        [k] float64, summing to 1.
    """
    if math.isinf(strength):
        return limits.placed_prior
    low, high = limits.low, limits.high
    # A domain that cannot have weight is not a part of the penalty.
    prior = np.where(high > 0, limits.prior, 0.0)
    pseudo = strength * prior
    if strength > 0 and np.where(prior > 0, high, low).sum() >= 1.0:
        high = np.where(prior > 0, high, low)
    if len(low) == 1 or low.sum() >= 1.0:
        return np.asarray(low / low.sum()) if low.sum() > 0 else np.ones(1)

    def value_and_gradient(weights: Array) -> tuple[float, Array]:
        mixed = text.probabilities @ weights
        value = float(text.shares @ np.log(mixed))
        gradient = text.probabilities.T @ (text.shares / mixed)
        if strength > 0:
            value -= strength * float(rel_entr(prior, weights).sum())
            gradient += np.divide(pseudo, weights, out=np.zeros_like(pseudo), where=weights > 0)
        return value, gradient

    weights = plain = _placed(limits.placed_prior if start is None else start, low, high)
    exponent, before, next_search = 1.0, -math.inf, SEARCH_INTERVAL
    for iteration in range(MAX_ITERATIONS):
        value, gradient = value_and_gradient(weights)
        if exponent > 1.0 and not value >= before:  # lower, or NaN
            weights, exponent = plain, 1.0
            continue
        best, before = weights, value
        gap = float(gradient @ (_best_vertex(gradient, low, high) - weights))
        if gap < TOLERANCE:
            return best
        plain = _placed(weights * gradient, low, high)
        step = exponent * np.log(gradient)
        weights = _placed(weights * np.exp(step - step.max()), low, high)
        exponent *= ACCELERATION
        if iteration >= next_search and len(low) <= MOST_SEARCHED:
            next_search = iteration + SEARCH_INTERVAL
            weights, exponent = _searched(value_and_gradient, best, low, high), ACCELERATION
    warnings.warn(
        f"the weights have not converged after {MAX_ITERATIONS:,} steps: the log-likelihood is "
        f"up to {gap:.1e} nats below its maximum",
        stacklevel=2,
    )
    return best


def _searched(
    objective: Callable[[Array], tuple[float, Array]], start: Array, low: Array, high: Array
) -> Array:
    """Maximize ``objective``, which returns value and gradient, by quadratic programming."""

    def negated(weights: Array) -> tuple[float, Array]:
        value, gradient = objective(np.maximum(weights, SMALLEST * high))
        return -value, -gradient

    found = minimize(
        negated,
        start,
        jac=True,
        method="SLSQP",
        bounds=np.stack([low, high], axis=1),
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1.0},
        options={"ftol": SEARCH_TOLERANCE, "maxiter": SEARCH_INTERVAL},
    )
    return _placed(found.x, low, high)


def _placed(weights: Array, low: Array, high: Array) -> Array:
    """Scale the weights [k] by one number and clip them, above 0 where the bounds permit."""
    return nearest_by_divergence(np.maximum(weights, SMALLEST * high), low, high)


def _best_vertex(gradient: Array, low: Array, high: Array) -> Array:
    """Return the mixture v within the bounds with the largest gradient @ v."""
    found, left = low.copy(), 1.0 - low.sum()
    for domain in np.argsort(-gradient, kind="stable"):
        added = min(left, high[domain] - low[domain])
        found[domain] += added
        left -= added
        if left <= 0:
            break
    return found


def document_folds(
    text: TargetText, num_folds: int = NUM_FOLDS, seed: int = 0
) -> npt.NDArray[np.int64]:
    """Assign each document to one of ``num_folds`` folds with about the same share of each part.

    The documents of a part are taken in random order, and each goes to the fold with the smallest
    share of the part so far.
    """
    sizes = text.document_sums(text.shares)
    folds, totals = np.zeros(len(sizes), np.int64), np.zeros(min(num_folds, len(sizes)))
    rng = np.random.default_rng(seed)
    for part in np.unique(text.parts):
        totals /= 1e3 * max(totals.max(), 1.0)  # ties are decided by the earlier parts
        for document in rng.permutation(np.flatnonzero(text.parts == part)):
            folds[document] = totals.argmin()
            totals[folds[document]] += sizes[document]
    return np.unique(folds, return_inverse=True)[1]


@dataclasses.dataclass(frozen=True, eq=False)
class CrossFit:
    """Weights for each fold of the target's documents, fitted to the other folds.

    Attributes:
        strength: the chosen tau.
        likelihoods: strength -> held-out log-likelihood, in nats per token.
        fold_weights: [folds, k] weights fitted without each fold, with the strength that is best on
            the other folds.
        folds: [documents] fold of each document.
    """

    strength: float
    likelihoods: dict[float, float]
    fold_weights: Array
    folds: npt.NDArray[np.int64]


def choose_strength(
    text: TargetText,
    limits: Limits,
    strengths: Sequence[float] = STRENGTHS,
    num_folds: int = NUM_FOLDS,
    seed: int = 0,
    on_fit: Callable[[], object] = lambda: None,
) -> CrossFit:
    """Choose the strength with the largest likelihood of documents that were left out of the fit.

    Args:
        text: probabilities of the target; at least two documents.
        limits: prior and bounds.
        strengths: values of tau to choose from, in descending order.
        num_folds: number of folds.
        seed: seed of the folds.
        on_fit: called after each fit.
    """
    assert text.num_documents > 1, "cross-validation needs two documents"
    folds = document_folds(text, num_folds, seed)
    weights = np.empty((len(strengths), int(folds.max()) + 1, len(limits.low)))
    likelihoods = np.zeros((len(strengths), weights.shape[1]))
    for fold in range(weights.shape[1]):
        is_held_out = folds == fold
        fitted, held_out = (text.weighted(chosen * 1.0) for chosen in (~is_held_out, is_held_out))
        share = float(text.document_sums(text.shares)[is_held_out].sum())
        for number, strength in enumerate(strengths):
            start = weights[number - 1, fold] if number else None
            weights[number, fold] = mixmin_weights(fitted, limits, strength, start)
            likelihoods[number, fold] = share * held_out.log_likelihood(weights[number, fold])
            on_fit()
    # The first of equal likelihoods is the one with the strongest prior.
    total = likelihoods.sum(axis=1)
    # The strength of a fold's weights must not be chosen on that fold.
    of_fold = (total[:, None] - likelihoods).argmax(axis=0)
    by_strength = dict(zip(strengths, total.tolist(), strict=True))
    chosen = weights[of_fold, np.arange(len(of_fold))]
    return CrossFit(strengths[int(total.argmax())], by_strength, chosen, folds)


def predicted_gain(
    text: TargetText, fit: CrossFit, baseline: Array, confidence: float = CONFIDENCE
) -> PredictedGain:
    """Predict by how much the weights lower the target's loss compared with ``baseline`` [k].

    The gain of a document is that of the weights fitted without its fold. The interval treats
    documents as independent, and is that of a ratio of two sums over the documents of each part,
    gain and share of the tokens, by Student's t.

    Args:
        text: probabilities of the target.
        fit: weights by fold.
        baseline: weights of another mixture.
        confidence: coverage of the interval.
    """
    mixed = np.empty(len(text.shares))
    token_folds = fit.folds[text.documents]
    for fold, weights in enumerate(fit.fold_weights):
        chosen = token_folds == fold
        mixed[chosen] = text.probabilities[chosen] @ weights
    differences = np.log(mixed) - np.log(text.probabilities @ baseline)
    gain = float(text.shares @ differences)
    part = text.parts[text.documents]
    means = np.bincount(part, text.shares * differences) / np.bincount(part, text.shares)
    residuals = text.document_sums(text.shares * (differences - means[part]))
    counts = np.bincount(text.parts)
    spread = np.bincount(text.parts, residuals**2)
    variance = float((spread * counts / np.maximum(counts - 1, 1)).sum())
    freedom = max(text.num_documents - len(counts), 1)
    width = float(student.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(variance)
    return PredictedGain(gain, gain - width, gain + width, confidence)


def bootstrap_mixmin(
    text: TargetText,
    limits: Limits,
    strength: float,
    weights: Array,
    num_resamples: int,
    seed: int = 0,
    on_resample: Callable[[], object] = lambda: None,
) -> Array:
    """Return the weights [num_resamples, k] for resamples of the target's documents.

    Args:
        text: probabilities of the target.
        limits: prior and bounds.
        strength: tau.
        weights: [k] weights for all documents, from which each fit starts.
        num_resamples: number of resamples.
        seed: random seed.
        on_resample: called after each fit.
    """
    rng, count = np.random.default_rng(seed), text.num_documents
    members = [np.flatnonzero(text.parts == part) for part in np.unique(text.parts)]
    found = np.empty((num_resamples, len(weights)))
    for number in range(num_resamples):
        sampled = np.concatenate([rng.choice(part, len(part)) for part in members])
        times = np.bincount(sampled, minlength=count)
        resample = text.weighted(times.astype(np.float64))
        found[number] = mixmin_weights(resample, limits, strength, weights)
        on_resample()
    return found


def explained_shares(text: TargetText, weights: Array) -> Array:
    """Return the share [k] of the target's tokens that each domain explains.

    It is the mean posterior probability that a token comes from the domain's model.
    """
    joint = text.probabilities * weights
    shares: Array = text.shares @ (joint / joint.sum(axis=1, keepdims=True))
    return shares
