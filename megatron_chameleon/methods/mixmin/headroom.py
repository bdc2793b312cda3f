"""Headroom: what a mixture can gain for a target, compared with the differences between seeds."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import nct
from scipy.stats import t as student

from megatron_chameleon.artifacts.files import read_json
from megatron_chameleon.corpus.target import Target
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.mixmin import DomainsAndTarget, HeadroomOptions
from megatron_chameleon.methods.mixmin.compute import (
    BYTES_PER_TOKEN,
    Estimate,
    Plan,
    describe_estimate,
    estimate_weights,
    make_plan,
    predict,
    read_target,
    reason_for_prior,
    shown_gains,
    target_text,
    unit_of,
)
from megatron_chameleon.methods.mixmin.text import ByteCoder
from megatron_chameleon.methods.output import by_name
from megatron_chameleon.parallel.options import is_rank_0

# Standard deviations, in nats per token, of paired differences in the records of
# examples/compare_methods.sh (benchmarks/results) without fine-tuning: of the mean loss of the
# training domains, 0.019 to 0.029 but for one; of a held-out target's loss, 0.039 to 0.076.
NOISE_OF_AVERAGE, NOISE_OF_TARGET = 0.03, 0.05
AVERAGE = "the mean loss of the training domains"
# Runs are counted for this power of a two-sided test at this level.
POWER, LEVEL = 0.8, 0.05
MOST_SEEDS = 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Headroom:
    """Predicted gains for a target, compared with the differences between seeds.

    Attributes:
        plan: the domains, the target and the prior.
        estimate: MixMin's weights and their gains.
        noise: standard deviation of a paired difference between seeds, in nats per token or byte.
        lines: description of the gains, the noise and the seeds needed.
    """

    plan: Plan
    estimate: Estimate
    noise: float
    lines: Sequence[str]

    @property
    def reason_for_prior(self) -> str | None:
        """Why no mixture is certain to be better than the prior; None if one is."""
        return reason_for_prior(self.plan, self.estimate)

    @property
    def parameters(self) -> dict[str, Any]:
        """The figures, for a mixture file."""
        estimate, target = self.estimate, self.plan.target
        return {
            "target": dataclasses.asdict(target.record),
            "prior": by_name(self.plan.domains.names, self.plan.limits.prior),
            "predicted_gain": {
                name: {
                    **dataclasses.asdict(gain),
                    "seeds_needed": number_of_seeds(gain.gain, self.noise),
                }
                for name, gain in estimate.gains.items()
            },
            "seed_noise": self.noise,
            "unexplained": estimate.unexplained,
            "resembles": estimate.resembles,
            "reason": self.reason_for_prior,
        }


def measure_headroom(options: DomainsAndTarget, seed_noise: str | None) -> Headroom:
    """Predict what a mixture gains for the target.

    Args:
        options: domains, target and prior.
        seed_noise: value of ``--seed-noise``.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """
    plan = make_plan(options)
    noise, source = parse_noise(seed_noise, plan.target)
    blocks = read_target(plan)
    text = target_text(plan, blocks, predict(plan, blocks))
    estimate = estimate_weights(plan, blocks, text)
    lines = describe_estimate(plan, text, estimate)
    if isinstance(plan.coder, ByteCoder):
        noise /= BYTES_PER_TOKEN
    lines.append(
        f"standard deviation of a paired difference between seeds: {noise:.3g} nats per "
        f"{unit_of(plan)} ({source})"
    )
    for name, gain in shown_gains(plan, estimate).items():
        lines.append(f"seeds needed to see the gain over {name}: {seeds_needed(gain.gain, noise)}")
    return Headroom(plan, estimate, noise, lines)


def print_headroom(options: HeadroomOptions) -> None:
    """Print predicted gains, the differences between seeds, and the runs needed to see the gains.

    Raises:
        UserError: for a mistake in the options or in the files that they name.
    """
    if not is_rank_0():
        return
    headroom = measure_headroom(options, options.seed_noise)
    reason, prior = headroom.reason_for_prior, options.estimate.prior
    if reason is None:
        closing = f"a mixture for this target is worth computing: it gains over '{prior}'"
    else:
        closing = f"train with '{prior}': {reason}"
    print("\n".join([*headroom.lines, closing]))


def seeds_needed(gain: float, noise: float) -> str:
    """Return the number of paired seeds with which a t-test finds ``gain`` with a power of 80%."""
    if gain <= 0:
        return "none, since no gain is predicted"
    number = number_of_seeds(gain, noise)
    return f"more than {MOST_SEEDS:,}" if number is None else f"{number:,}"


def number_of_seeds(gain: float, noise: float) -> int | None:
    """Return the number that :func:`seeds_needed` describes; None if there is none up to 1000."""
    for count in range(2, MOST_SEEDS + 1) if gain > 0 else ():
        limit = student.ppf(1 - LEVEL / 2, count - 1)
        if nct.sf(limit, count - 1, gain / noise * math.sqrt(count)) >= POWER:
            return count
    return None


def parse_noise(value: str | None, target: Target | None) -> tuple[float, str]:
    """Return the noise that ``--seed-noise`` gives, and what it is the noise of.

    Args:
        value: value of the option.
        target: the target; None stands for the average over the domains.

    Returns:
        Standard deviation between seeds of a paired difference, in nats per token; its description.

    Raises:
        UserError: if the value is neither a number above 0 nor a record of compare_methods.
    """
    shares = {} if target is None or target.value is None else target.shares
    if value is None:
        if shares:
            return NOISE_OF_TARGET, "assumed, for the loss of a target"
        return NOISE_OF_AVERAGE, f"assumed, for {AVERAGE}"
    source = f"--seed-noise {value}"
    try:
        noise = float(value)
    except ValueError:
        noise, quantity = _recorded_noise(Path(value), shares)
        source += f": {quantity}"
    if not 0 < noise < math.inf:
        raise UserError(
            f"--seed-noise {value}: must be a number above 0, or the record of a comparison whose "
            "mixtures differ"
        )
    return noise, source


def _recorded_noise(path: Path, shares: Mapping[str, float]) -> tuple[float, str]:
    """Return the noise in a record of compare_methods, and a description of the loss.

    A comparison over targets records the standard error of a gain averaged over seeds. In other
    records, the noise is the root mean square over the mixtures.

    Args:
        path: compare_methods.json, or the record of ``--targets``.
        shares: share of each domain in the target; empty for the average over the domains.
    """
    record = read_json(path, "pass a number, or the compare_methods.json of a comparison")
    try:
        if "pooled_standard_error" in record:
            noise = record["pooled_standard_error"] * math.sqrt(len(record["seeds"]))
            return noise, f"the losses of {len(record['targets'])} targets"
        # Mixture -> seed -> domain, also held-out ones, -> perplexity.
        perplexities = {
            name: {
                seed: values | mixture.get("held_out_perplexity", {}).get(seed, {})
                for seed, values in mixture["perplexity"].items()
            }
            for name, mixture in record["mixtures"].items()
        }
        baseline, quantity = perplexities[record["baseline"]], "the loss of the target"
        measured = set.intersection(*map(set, baseline.values()))
        if not shares or not shares.keys() <= measured:
            quantity, count = AVERAGE, len(record["domains"])
            shares = dict.fromkeys(record["domains"], 1 / count)
        variances = []
        for seeds in perplexities.values():
            differences = [
                sum(
                    share * math.log(seeds[seed][name] / values[name])
                    for name, share in shares.items()
                )
                for seed, values in baseline.items()
            ]
            if any(differences):
                variances.append(statistics.variance(differences))
        return math.sqrt(statistics.fmean(variances)), quantity
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        raise UserError(
            f"--seed-noise {path}: not the compare_methods.json of a comparison with several "
            "seeds; pass such a file, or a number"
        ) from error
