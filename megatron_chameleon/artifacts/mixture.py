"""The mixture: sampling weights per domain, and the results of the method that computed them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from megatron_chameleon.artifacts.corpus import Split
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import Amount, Count, FileRecord, Positive, Share
from megatron_chameleon.errors import UserError, quoted

# Weights whose sum differs from 1 only by rounding are left as they are: the mixture is identified
# by a hash of their bits.
SUM_TOLERANCE = 1e-6
# ``name.json`` has its Megatron Bridge blend, which is no artifact, in ``name.bridge.json``.
BRIDGE_SUFFIX = ".bridge.json"
# Affinity matrices of more domains are not stored; 256 x 256 numbers take about 1.3 MB of text.
MAX_AFFINITY_DOMAINS = 256


class MixtureWarning(UserWarning):
    """The weights were changed before use, or do not cover all domains."""


@dataclasses.dataclass(frozen=True)
class MixtureStage:
    """Weights (domain -> share of the training tokens) from training step ``step`` on."""

    step: Positive
    weights: dict[str, float]


@dataclasses.dataclass(frozen=True)
class DomainSource:
    """The text of a domain, as other trainers name it.

    Attributes:
        files: split -> token files; paths, URLs, or patterns of paths.
        tokens: split -> number of tokens.
        split: Megatron's ``--split`` that divides the files; None if each split has its own files.
    """

    files: dict[Split, list[str]] = dataclasses.field(default_factory=dict)
    tokens: dict[Split, Count] = dataclasses.field(default_factory=dict)
    split: str | None = None


@dataclasses.dataclass(frozen=True)
class Mixture(FileRecord):
    """Sampling weights per domain. Weights are per token and sum to 1.

    Attributes:
        weights: domain -> share of the training tokens.
        method: method that computed the weights ("chameleon", "uniform", "manual", ...).
        parameters: the method's settings.
        scores: domain -> score, for methods that compute scores (Chameleon: leverage).
        intervals: domain -> (low, high) bootstrap confidence interval of its weight.
        confidence: coverage of the intervals, between 0 and 1.
        outweighs: (a, b, probability that a has the larger weight), for domains a and b that are
            neighbours when sorted by weight.
        affinity: [k, k] domain affinity matrix, in the order of ``weights``; None for more than
            ``MAX_AFFINITY_DOMAINS`` domains.
        token_budget: training tokens that ``epochs`` refers to.
        epochs: domain -> passes over its training tokens within the token budget.
        max_epochs: upper limit of the epochs.
        unconstrained: domain -> weight without this limit.
        capped: domains whose epochs are at the limit.
        max_repetition: domain -> most passes over its training tokens that a run may make; a domain
            that is not listed has no limit.
        stages: later changes of the weights, in order.
        sources: domain -> its text, for conversions to the formats of other trainers.
    """

    KIND = "mixture"
    MADE_BY = "megatron-chameleon compute_mixture writes it"
    EDITABLE = True
    # Reject misspelt fields.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    weights: dict[str, float]
    method: str = "manual"
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    scores: dict[str, float] | None = None
    intervals: dict[str, tuple[float, float]] | None = None
    confidence: Share | None = None
    outweighs: list[tuple[str, str, float]] | None = None
    affinity: list[list[float]] | None = None
    token_budget: Count | None = None
    epochs: dict[str, Amount] | None = None
    max_epochs: Amount | None = None
    unconstrained: dict[str, Amount] | None = None
    capped: list[str] | None = None
    max_repetition: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = None
    stages: list[MixtureStage] | None = None
    sources: dict[str, DomainSource] | None = None
    provenance: Provenance | None = None
    cost: Cost = dataclasses.field(default_factory=Cost)

    def __post_init__(self) -> None:
        domains = set(self.weights)
        for name in ("epochs", "unconstrained"):
            if domains.symmetric_difference(getattr(self, name) or domains):
                raise ValueError(f"{name} and weights have different domains")
        named = {name for a, b, _ in self.outweighs or () for name in (a, b)}
        named |= {*(self.capped or ()), *(self.scores or ()), *(self.intervals or ())}
        named |= {*(self.max_repetition or ()), *(self.sources or ())}
        if named - domains:
            raise ValueError(f"domain {min(named - domains)!r} has no weight")
        k = len(domains)
        if self.affinity is not None and [len(row) for row in self.affinity] != [k] * k:
            raise ValueError(f"affinity is not a {k} x {k} matrix")
        for stage in self.stages or ():
            if domains.symmetric_difference(stage.weights):
                raise ValueError(f"stage {stage.step} and weights have different domains")
        if any(after.step <= before.step for before, after in pairwise(self.stages or ())):
            raise ValueError("the steps of stages must increase")

    @classmethod
    def load(cls, path: Path, *, may_change: bool = False) -> Mixture:
        """Read a mixture file; ``{"weights": {...}}`` suffices for a user-supplied mixture.

        Weights whose sum differs from 1 by more than ``SUM_TOLERANCE`` are renormalised with a
        :class:`MixtureWarning`.

        Args:
            path: the file.
            may_change: whether the caller supports ``stages``.

        Raises:
            UserError: naming the file, the field and the fix; also for unsupported stages.
        """
        mixture = super().load(path)
        if mixture.stages and not may_change:
            raise UserError(
                f"{path}: its weights change at step {mixture.stages[0].step}, which only "
                "pretrain_gpt supports; select the weights of one step with "
                f"convert_mixture --mixture {path} --format json --at-step STEP"
            )
        return mixture.normalized(str(path))

    def normalized(self, where: str) -> Mixture:
        """Apply :func:`normalized` to the weights of every stage."""
        stages = [
            MixtureStage(stage.step, normalized(stage.weights, f"{where}: step {stage.step}"))
            for stage in self.stages or ()
        ]
        weights = normalized(self.weights, where)
        return dataclasses.replace(self, weights=weights, stages=stages or None)

    def at_step(self, step: int) -> Mixture:
        """Return the weights in force at training step ``step`` as a mixture without stages."""
        begun = [stage.weights for stage in self.stages or () if stage.step <= step]
        return dataclasses.replace(self, weights=[self.weights, *begun][-1], stages=None)

    @classmethod
    def uniform(cls, names: list[str]) -> Mixture:
        """Return a mixture with the same weight for every domain."""
        return cls(weights={name: 1.0 / len(names) for name in names}, method="uniform")

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the weights, and of the stages if there are any."""
        stages = [[stage.step, stage.weights] for stage in self.stages or ()]
        return sha256_of_json([self.weights, stages] if stages else self.weights)

    def weights_for(
        self, names: Sequence[str], where: str, held_out: Collection[str] = ()
    ) -> list[float]:
        """Return the weights in the order of ``names``; a missing weight is 0, with a warning.

        A domain with a weight of 0 need not be among ``names``.

        Args:
            names: the domains of a corpus.
            where: the corpus, for messages.
            held_out: the held-out domains of the corpus, for messages.

        Raises:
            UserError: for a weight on a held-out or an unknown domain.
        """
        known = set(names)
        positive = [name for name, weight in self.weights.items() if weight > 0]
        if never := [name for name in positive if name in held_out]:
            raise UserError(
                f"the mixture has a weight for {quoted(never)}, held out from training in "
                f"{where}; remove it from the weights"
            )
        unknown = [name for name in positive if name not in known]
        if unknown:
            problem = "is not a domain" if len(unknown) == 1 else "are not domains"
            raise UserError(
                f"the mixture has a weight for {quoted(unknown)}, which {problem} of {where}; its "
                f"domains are {quoted(names)}"
            )
        missing = [name for name in names if name not in self.weights]
        if missing:
            warnings.warn(
                f"the mixture has no weight for {', '.join(missing)}; a missing weight is 0",
                MixtureWarning,
                stacklevel=2,
            )
        return [self.weights.get(name, 0.0) for name in names]


@dataclasses.dataclass(frozen=True)
class MixturePhase:
    """Sampling weights of a run (domain -> weight) from sample ``first_sample`` on.

    They are reached linearly, from the weights before, within ``ramp_samples`` samples.
    """

    first_sample: Count
    weights: dict[str, Amount]
    ramp_samples: Count = 0


def normalized(weights: dict[str, float], where: str) -> dict[str, float]:
    """Scale ``weights`` to sum to 1, unless their sum is within ``SUM_TOLERANCE`` of it.

    Raises:
        UserError: if a weight is negative or not finite, or if all weights are zero.
    """
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise UserError(
                f"{where}: weight of '{name}' is {weight}; weights must be finite and >= 0"
            )
    if not 0 < sum(weights.values()) < math.inf:
        raise UserError(f"{where}: the weights are all zero, or too large to add up")
    total = math.fsum(weights.values())
    if abs(total - 1.0) <= SUM_TOLERANCE:
        return weights
    warnings.warn(
        f"{where}: the weights sum to {total:.10g}, not 1; they are rescaled",
        MixtureWarning,
        stacklevel=3,
    )
    return {name: weight / total for name, weight in weights.items()}


def implied_epochs(
    tokens: Mapping[str, int], weights: Mapping[str, float], token_budget: float
) -> dict[str, float]:
    """Domain -> passes over its training tokens when ``token_budget`` tokens are sampled.

    Args:
        tokens: domain -> training tokens.
        weights: domain -> share of the sampled tokens; default 0.
        token_budget: total number of sampled tokens.
    """
    return {
        name: weights.get(name, 0.0) * token_budget / max(size, 1) for name, size in tokens.items()
    }
