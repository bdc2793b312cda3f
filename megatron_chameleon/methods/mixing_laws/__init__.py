"""Data Mixing Laws: find the best mixture by exponential laws of a few proxies' losses.

Ye et al.: Data Mixing Laws, ICLR 2025.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.errors import STOPPED_STATUS, UserError
from megatron_chameleon.methods.method import Method
from megatron_chameleon.methods.swarm import FitOptions
from megatron_chameleon.model.options import ArchitectureOptions, resolve_model
from megatron_chameleon.ranges import (
    CheckedOptions,
    Count,
    Fits,
    NonNegative,
    Positive,
    Repetitions,
    Seed,
    Share,
)

MIN_POINTS = 3
"""Minimum number of points to fit a power law; two points do not determine the exponent."""


@dataclasses.dataclass(frozen=True)
class LawOptions(CheckedOptions):
    """Options for fitting the laws, and for the search for their optimum."""

    huber_delta: Positive = 0.05
    """Threshold of the Huber loss, in nats. The loss is linear above it (the study's
    notebook for five domains: 0.05)."""
    law_ridge: NonNegative = 1e-3
    """Ridge penalty on the exponents, added to the mean Huber loss divided by delta^2."""
    num_starts: Fits = 16
    """Number of starting points of the optimizer for each law."""
    fit_seed: Seed = 0
    """Seed of the starting points."""
    max_extrapolation: Share | None = None
    """Maximum distance of a domain's weight from the range of its weights in the runs; default:
    unlimited, but 0 upwards for a domain with less than 1% in all runs."""
    target_steps: Count | None = None
    """Before the laws are fitted, extrapolate the losses to this many steps, by a power law over
    the measurements taken every --eval-interval steps."""
    fit_steps_from: int | None = None
    """First step whose measurement is used to fit the power law of --target-steps; default: a third
    of --train-iters (the study: 10,000 of 30,000)."""
    models: tuple[str, ...] = ()
    """Train the proxies at each of these sizes, three or more, instead of --model."""
    target_model: str | None = None
    """Before the laws are fitted, extrapolate the losses to a model of this size, by a power law
    over --models."""

    def __post_init__(self) -> None:
        """Raise UserError for values out of range, or that exclude each other."""
        super().__post_init__()
        if self.fit_steps_from is not None and self.target_steps is None:
            raise UserError("--fit-steps-from needs --target-steps; pass both")
        if (self.target_model is None) != (not self.models):
            raise UserError(
                "--models and --target-model must be used together; pass both or neither"
            )
        if self.target_model is None:
            return
        names = set(self.models)
        if len(set(map(layer_parameters, names))) < max(MIN_POINTS, len(names)):
            raise UserError(
                f"--models {' '.join(self.models)}: a power law needs {MIN_POINTS} or "
                "more sizes, all with different numbers of parameters; choose other sizes"
            )
        largest = max(self.models, key=layer_parameters)
        if layer_parameters(self.target_model) <= layer_parameters(largest):
            raise UserError(
                f"--target-model {self.target_model} must be larger than {largest}, the largest of "
                "--models"
            )


def layer_parameters(name: str) -> float:
    """Count the parameters of the model that --model selects, without embeddings.

    Raises:
        UserError: for an unknown name, or an unsupported config.json.
    """
    config = resolve_model(name, ArchitectureOptions(), vocab_size=1, max_sequence_length=1)
    return float(config.num_layers * config.layer_parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixingLawsOptions(FitOptions):
    """Train proxies on a few mixtures, fit a law to each domain's loss, and take the best mixture.

    With --swarm-dir, or --ratios and --metrics, fit existing runs instead.
    """

    num_proxies: Repetitions = 20
    """Proxies to train, each on its own mixture (Chameleon's paper: 20)."""
    laws: LawOptions = dataclasses.field(default_factory=LawOptions)

    def __post_init__(self) -> None:
        """Raise UserError for invalid combinations of options."""
        super().__post_init__()
        laws, target = self.laws, self.laws.target_steps
        if self.tables is not None and (target or laws.models):
            raise UserError(
                "--target-steps, --models and --target-model need proxies that this command "
                "trains; omit these options, or pass no runs"
            )
        if self.swarm.downstream.tasks and (target or laws.models):
            raise UserError(
                "--target-steps and --target-model extrapolate held-out losses only; omit these "
                "options, or --tasks"
            )
        if target is None:
            return
        if self.swarm.target_tokens is not None:
            raise UserError(
                f"--target-steps {target}: the power law over steps cannot predict the effect of "
                "text that is repeated only in later steps; omit it, or --target-tokens"
            )
        if target <= self.swarm.train_iters:
            raise UserError(
                f"--target-steps {target} must be larger than --train-iters "
                f"{self.swarm.train_iters}"
            )
        used = [step for step in self.swarm.measured_steps if step >= self.first_step]
        if len(used) < MIN_POINTS:
            raise UserError(
                f"--target-steps needs {MIN_POINTS} measurements from step {self.first_step} on, "
                f"but there are {len(used)}; lower --eval-interval or --fit-steps-from"
            )

    @property
    def first_step(self) -> int:
        """First step whose measurement is used to fit the power law over steps."""
        first = self.laws.fit_steps_from
        return -(-self.swarm.train_iters // 3) if first is None else first


def compute(options: MixingLawsOptions) -> int | None:
    """Train the proxies, fit the laws and write the mixture."""
    from megatron_chameleon.methods.mixing_laws.compute import MixingLawsFit

    return None if MixingLawsFit(options).compute() else STOPPED_STATUS


METHOD = Method(
    name="mixing-laws",
    options=MixingLawsOptions,
    compute=compute,
    summary="the mixture with the lowest target loss, predicted by laws of the losses over the "
    "weights",
    needs="nothing besides the corpus; or results of runs on many mixtures (--ratios, --metrics)",
    cost="tens of proxies (--num-proxies) for each of --models",
    good_for="few domains; predictions for larger models and longer runs from small proxies",
    source="Ye et al.: Data Mixing Laws, ICLR 2025",
)
