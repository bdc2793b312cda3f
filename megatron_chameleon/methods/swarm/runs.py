"""Runs that a fit is based on: a swarm's members, or tables of existing runs."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, MixtureWarning
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, matched, read_mixture_runs
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.domains import format_names, parse_share
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.methods.swarm.options import MixtureSamplingOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.sampling import SamplingRule, sample_mixtures

# Fewer runs with text of a domain say little about it.
MIN_RUNS_PER_DOMAIN = 5
# Losses of one model on several domains differ by less than this factor.
MAX_METRIC_RATIO = 5.0
# Held-out tokens of a domain: one to predict, and one before it.
MIN_HELD_OUT_TOKENS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class FitRuns:
    """Runs over the domains of the corpus, and their origin.

    Attributes:
        runs: without those that diverged; their domains are the corpus's.
        origin: one line for the user.
        parameters: of the origin, for the mixture's file.
        inputs: name of each file read -> its hash.
        cost: of the runs; zero if unknown.
        made_from: folders of their swarms.
        unknown_costs: description of each part without a known cost.
        paper_flops: FLOPs as Chameleon's tables count them; None for existing runs.
    """

    runs: MixtureRuns
    origin: str
    parameters: dict[str, object]
    inputs: dict[str, str]
    cost: Cost
    made_from: tuple[Path, ...] = ()
    unknown_costs: tuple[str, ...] = ()
    paper_flops: float | None = None


def token_shares(corpus: Corpus) -> Array:
    """[k] share of each domain in the training tokens.

    Raises:
        UserError: if there are none.
    """
    tokens = np.array(list(corpus.train_tokens.values()), np.float64)
    if tokens.sum() <= 0:
        raise UserError(f"{corpus.root} has no training tokens; preprocess text into it")
    shares: Array = tokens / tokens.sum()
    return shares


def sampled_mixtures(options: MixtureSamplingOptions, count: int, corpus: Corpus) -> Array:
    """``count`` mixtures [count, k] over the corpus's domains.

    Raises:
        UserError: if the options do not allow as many.
    """
    rule = SamplingRule(
        prior_exponent=options.prior_exponent,
        min_strength=options.min_strength,
        max_strength=options.max_strength,
        max_upweighting=options.max_upweighting,
        smallest_weight=options.smallest_weight,
    )
    try:
        return sample_mixtures(token_shares(corpus), count, options.mixture_seed, rule)
    except ValueError as error:
        raise UserError(f"--num-proxies {count} and the mixture sampling flags: {error}") from error


def existing_runs(ratios: Path, metrics: Path, corpus: Corpus) -> FitRuns:
    """Runs from the user's tables, mapped to the domains of ``corpus``.

    Metrics that match a domain get its name; others, such as tasks, keep theirs. Renamed columns
    are reported.

    Raises:
        UserError: for tables that cannot be read, or a domain that the corpus does not have.
    """
    read = read_mixture_runs(ratios, metrics)
    names = matched(read.domains, corpus.names)
    unknown = [name for name in read.domains if name not in names]
    if unknown:
        raise UserError(
            f"{ratios}: unknown domain '{unknown[0]}'; {corpus.root} has "
            f"{format_names(corpus.names)}: rename the column"
        )
    mixtures = np.zeros((len(read.keys), len(corpus.names)))
    for name, column in zip(read.domains, read.mixtures.T, strict=True):
        mixtures[:, corpus.names.index(names[name])] = column
    warn_rare_domains(corpus.names, mixtures, str(ratios))
    matches = matched(read.metrics, corpus.names)
    runs = dataclasses.replace(
        read,
        domains=list(corpus.names),
        mixtures=mixtures,
        metrics=[matches.get(metric, metric) for metric in read.metrics],
    )
    renamed = {
        "ratios": _renamed(read.domain_columns, [names[name] for name in read.domains]),
        "metrics": _renamed(read.metric_columns, runs.metrics),
    }
    origin = [f"{len(read.keys)} runs of {ratios} and {metrics}"]
    for table, columns in ((ratios, renamed["ratios"]), (metrics, renamed["metrics"])):
        if columns:
            pairs = [f"{column} -> {name}" for column, name in columns.items()]
            origin.append(f"columns of {table}: {format_names(pairs)}")
    return FitRuns(
        runs,
        "\n".join(origin),
        parameters={
            "runs": len(read.keys),
            "ratios": str(ratios),
            "metrics": str(metrics),
            "renamed_columns": renamed,
        },
        inputs={"ratios": sha256_of_files(ratios), "metrics": sha256_of_files(metrics)},
        cost=Cost(),
        unknown_costs=(f"the runs of {ratios}",),
    )


def _renamed(columns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    return {old: new for old, new in zip(columns, names, strict=True) if old != new}


def swarm_runs(
    result: SwarmResult, losses: Array, folders: Sequence[Path], paper_flops: float
) -> FitRuns:
    """The members of a swarm that did not diverge.

    Domains without held-out text have no loss and are no metric.

    Args:
        result: of the swarm.
        losses: [n, k] to fit: measured after some step, or extrapolated.
        folders: of the swarm, or of several on the same mixtures, whose results it joins.
        paper_flops: their FLOPs as Chameleon's tables count them.

    Raises:
        UserError: if all members diverged, or no domain has held-out text.
    """
    count = len(result.mixtures)
    kept = np.setdiff1d(np.arange(count), result.diverged)
    if not len(kept):
        raise UserError(
            f"all {count} proxies diverged; lower --lr or raise --lr-warmup-iters, and choose "
            "another --work-dir"
        )
    if result.diverged:
        warnings.warn(
            f"{len(result.diverged)} of {count} proxies diverged and are left out of the fit: "
            f"{format_names([str(number) for number in result.diverged])}",
            MixtureWarning,
            stacklevel=2,
        )
    origin = f"{len(kept)} proxies of {' and '.join(map(str, folders))}"
    warn_rare_domains(result.domains, result.mixtures[kept], origin)
    measured = np.any(np.isfinite(losses[kept]), axis=0)
    if not measured.any():
        raise UserError(
            f"no domain has held-out losses in {folders[0]}; preprocess it with --split"
        )
    runs = MixtureRuns(
        keys=[str(number) for number in kept],
        domains=list(result.domains),
        mixtures=result.mixtures[kept],
        metrics=[name for name, has in zip(result.domains, measured, strict=True) if has],
        losses=losses[kept][:, measured],
    )
    parameters: dict[str, object] = {
        "runs": len(kept),
        "swarm": [str(folder) for folder in folders],
        "diverged": [int(number) for number in result.diverged],
    }
    return FitRuns(
        runs,
        origin,
        parameters,
        inputs={},
        cost=result.cost,
        made_from=tuple(folders),
        paper_flops=paper_flops,
    )


def warn_rare_domains(
    domains: Sequence[str], mixtures: Array, where: str, remedy: str | None = None
) -> None:
    """Warn of domains with text in none or few of the runs.

    Args:
        domains: k names.
        mixtures: [n, k] of the runs.
        where: origin of the runs.
        remedy: how to get more of them.
    """
    counts = (mixtures > 0).sum(axis=0).tolist()
    few = min(MIN_RUNS_PER_DOMAIN, len(mixtures))
    without = [name for name, count in zip(domains, counts, strict=True) if not count]
    scarce = [name for name, count in zip(domains, counts, strict=True) if 0 < count < few]
    problems = []
    if without:
        problems.append(f"no run has text of {format_names(without)}, which get weight 0")
    if scarce:
        problems.append(f"fewer than {few} runs have text of {format_names(scarce)}")
    if problems:
        ending = f"; {remedy}" if remedy else ""
        warnings.warn(f"{where}: {'; '.join(problems)}{ending}", MixtureWarning, stacklevel=3)


def target_shares(target: str | None, metrics: Sequence[str]) -> Array:
    """Share [m] of each metric in the target, summing to 1; uniform without ``--target``.

    Raises:
        UserError: for an unknown or repeated name, or a share that is not finite and > 0.
    """
    if target is None:
        return np.full(len(metrics), 1.0 / len(metrics))
    shares = np.zeros(len(metrics))
    for item in filter(None, map(str.strip, target.split(","))):
        wanted, share = parse_share(item, target, metrics)
        name = matched([wanted], metrics).get(wanted)
        if name is None:
            raise UserError(
                f"--target {target}: unknown loss '{wanted}'; there are "
                f"{format_names(list(metrics))}"
            )
        if shares[metrics.index(name)]:
            raise UserError(f"--target {target}: '{name}' is repeated; name it once")
        shares[metrics.index(name)] = share
    if not shares.any():
        raise UserError(f"--target {target}: empty; choose from {format_names(list(metrics))}")
    return shares / shares.sum()


def check_target(target: str | None, corpus: Corpus) -> None:
    """Raise UserError for a target that is unknown or has no held-out text in ``corpus``."""
    measured = [
        name
        for name, domain in corpus.domains.items()
        if domain.valid.tokens >= MIN_HELD_OUT_TOKENS
    ]
    if not measured:
        raise UserError(
            f"{corpus.root} has no valid split to measure proxies on; preprocess it again with "
            "--split"
        )
    shares = target_shares(target, corpus.names)
    unmeasured = [
        name
        for name, share in zip(corpus.names, shares, strict=True)
        if share and name not in measured
    ]
    if target is not None and unmeasured:
        raise UserError(
            f"--target {target}: '{unmeasured[0]}' of {corpus.root} has no held-out text; choose "
            f"from {format_names(measured)}, or preprocess it again with --split"
        )


def warn_mixed_scales(target: str | None, runs: MixtureRuns, where: str) -> None:
    """Warn of a target that averages metrics of very different scales, such as accuracies.

    Explicit shares are taken as intended.
    """
    if target is not None and "=" in target:
        return
    used = np.flatnonzero(target_shares(target, runs.metrics))
    scales = np.median(np.abs(runs.losses[:, used]), axis=0)
    small, large = int(scales.argmin()), int(scales.argmax())
    if scales[large] < MAX_METRIC_RATIO * scales[small] or not scales[large]:
        return
    low, high = (f"{runs.metrics[used[at]]} (about {scales[at]:.3g})" for at in (small, large))
    warnings.warn(
        f"{where}: the target averages metrics of very different scales, from {low} to {high}, so "
        "the large ones dominate, and all are minimized, accuracies too; pass --target, as a,b or "
        "weighted a=2,b=1",
        MixtureWarning,
        stacklevel=3,
    )
