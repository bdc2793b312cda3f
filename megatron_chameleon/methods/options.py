"""Options that several methods share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.errors import UserError
from megatron_chameleon.ranges import CheckedOptions, LargeCount, Positive
from megatron_chameleon.training.options import TrainingOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions(CheckedOptions):
    """Options of every method: the mixture file, and the target run."""

    output: Path
    """The mixture.json to write."""
    token_budget: LargeCount | None = None
    """Token budget of the target run. The resulting epochs of each domain are printed and stored.
    The budget does not affect proxies; --target-tokens does."""
    max_epochs: Positive | None = None
    """Maximum epochs of each domain's training tokens within --token-budget. The result is the
    nearest mixture within this limit (smallest Kullback-Leibler divergence)."""

    def __post_init__(self) -> None:
        """Raise UserError for an epoch limit without a token budget."""
        super().__post_init__()
        if self.max_epochs is not None and self.token_budget is None:
            raise UserError("--max-epochs requires --token-budget; add it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodOptions(OutputOptions):
    """Options of a method that reads a corpus."""

    corpus: Path
    """Folder written by preprocess_data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenDomainsOptions(MethodOptions):
    """Options of a method that can weigh a subset of the corpus's domains."""

    domains: str | None = None
    """Domains to weigh, such as a,b,c; all other domains get weight 0. Default: all domains."""


@dataclasses.dataclass(frozen=True)
class PriorOptions(CheckedOptions):
    """The mixture that is written unless another one is certain to be better."""

    prior: str = "uniform"
    """The mixture that is written, within the limits, unless a gain over it is certain: 'uniform',
    'natural' (the domains' sizes), or the path of a mixture.json."""
    accept_uncertain: bool = False
    """Compute the mixture and write it even if no gain over --prior is certain. Methods that train
    proxies then train them without predicting the gain first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedNoiseOptions(CheckedOptions):
    """Noise that a predicted gain is compared with."""

    seed_noise: str | None = None
    """Standard deviation, between seeds, of the difference of the target's loss between two paired
    runs, in nats per token, for the printed number of seeds: a number, or the JSON file that
    compare_methods wrote for earlier runs, also with --targets. Default: 0.05, or 0.03 for the
    average over the domains, as measured for models of 0.5 million parameters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProxyOptions(TrainingOptions):
    """Training of a proxy as in pretrain_gpt, from random weights on a uniform mixture."""

    model: str = "82m"
    """Name of the proxy's model, or folder of a Hugging Face config.json; the error for an unknown
    name lists all names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkFolderOptions(OutputOptions):
    """Options of a method that may train models."""

    work_dir: Path | None = None
    """Folder of the method's runs; default: --output without .json."""

    @property
    def runs_folder(self) -> Path:
        """Return ``--work-dir``, or its default.

        Raises:
            UserError: if ``--work-dir`` is not set and ``output`` does not end with .json.
        """
        if self.work_dir is not None:
            return self.work_dir
        if self.output.suffix != ".json":
            raise UserError(f"--output {self.output}: must end with .json")
        return self.output.with_suffix("")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingMethodOptions(WorkFolderOptions, MethodOptions, SeedNoiseOptions):
    """Options of a method that trains proxies.

    Before the first proxy starts, MixMin predicts what any mixture can gain for the target.
    """

    fallback: PriorOptions = dataclasses.field(default_factory=PriorOptions)

    def __post_init__(self) -> None:
        """Raise UserError for --seed-noise if no gain is predicted."""
        super().__post_init__()
        if self.fallback.accept_uncertain:
            self.reject_changed(["seed_noise"], "no gain is predicted with --accept-uncertain")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProxyMethodOptions(TrainingMethodOptions):
    """Options of a method whose mixture is computed by a proxy's training hook."""

    proxy: ProxyOptions = dataclasses.field(default_factory=ProxyOptions)
