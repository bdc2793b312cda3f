"""The runs that a fit is made of: those of a swarm that is trained, or a person's tables."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, MixtureWarning
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, read_mixture_runs
from megatron_chameleon.artifacts.run_columns import matched
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.changed_flags import changed_flags
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.methods.fits.coverage import tell_of_the_rare
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.mixture_draws import DrawRule, draw_mixtures
from megatron_chameleon.model.paper_flops import PaperSettings, paper_flops
from megatron_chameleon.options.fits import DrawOptions, FitOptions
from megatron_chameleon.options.ranges import check_ranges
from megatron_chameleon.options.swarm import SwarmOptions

# Options that are of no use where nothing is trained.
OF_TRAINING = ("num_proxies", "work_dir", "draws", "swarm")


@dataclasses.dataclass(frozen=True, eq=False)
class FittedRuns:
    """Runs over the domains of the corpus, and where they are from.

    Attributes:
        runs: the runs, without those that diverged; their domains are the corpus's.
        told: where they are from, in a line.
        parameters: the same for the mixture's file.
        inputs: name of each file that was read -> its hash.
        cost: of the runs; nothing where it is not known.
        made_from: the folders of their swarms.
        unknown_costs: what took nobody knows how much, a phrase for each.
        paper_flops: FLOPs of the runs as Chameleon's tables count them; None for others' runs.
    """

    runs: MixtureRuns
    told: str
    parameters: dict[str, object]
    inputs: dict[str, str]
    cost: Cost
    made_from: tuple[Path, ...] = ()
    unknown_costs: tuple[str, ...] = ()
    paper_flops: float | None = None


def is_first_process() -> bool:
    """Whether this is the process that talks and writes, before and without process groups."""
    return int(os.environ.get("RANK", "0")) == 0


def check_options(options: FitOptions) -> None:
    """Raises UserError for tables of which one is missing, or a number of proxies below 1."""
    if (options.ratios is None) != (options.metrics is None):
        given, missing = ("--ratios", "--metrics")
        if options.ratios is None:
            given, missing = missing, given
        raise UserError(f"{given} is one of two tables: give {missing} of the same runs too")
    check_ranges(options)


def refuse_idle(options: FitOptions) -> None:
    """Raises UserError for an option of the training that does not take place beside --ratios."""
    # Every method gives the number of proxies a default.
    default = type(options)(corpus=options.corpus, output=options.output)  # type: ignore[call-arg]
    of_training = {name: getattr(options, name) for name in OF_TRAINING}
    for flag, value in changed_flags(dataclasses.replace(default, **of_training), default):
        raise UserError(
            f"{flag} {value}: the runs of --ratios {options.ratios} are there, and nothing is "
            "trained; leave it out"
        )


def paper_flops_of(method: str, options: SwarmOptions, num_proxies: int) -> float:
    """FLOPs of a swarm as Chameleon's tables count them for ``method``."""
    tokens = options.train_iters * options.global_batch_size * options.seq_length
    settings = PaperSettings(
        model_size=options.model_size, trained_tokens=tokens, num_proxies=num_proxies
    )
    return paper_flops(method, settings)


def prior_of(corpus: Corpus) -> Array:
    """[k] the domains' shares of the training tokens.

    Raises:
        UserError: if there are none.
    """
    tokens = np.array(list(corpus.train_tokens.values()), np.float64)
    if tokens.sum() <= 0:
        raise UserError(f"{corpus.root} has no training tokens; preprocess text into it")
    shares: Array = tokens / tokens.sum()
    return shares


def drawn_mixtures(options: DrawOptions, count: int, corpus: Corpus) -> Array:
    """``count`` mixtures [count, k] over the corpus's domains.

    Raises:
        UserError: for settings by which there are not so many.
    """
    rule = DrawRule(
        prior_exponent=options.prior_exponent,
        min_strength=options.min_strength,
        max_strength=options.max_strength,
        max_upweighting=options.max_upweighting,
        smallest_weight=options.smallest_weight,
    )
    try:
        mixtures = draw_mixtures(prior_of(corpus), count, options.mixture_seed, rule)
    except ValueError as error:
        raise UserError(f"--num-proxies {count} and the flags of their draw: {error}") from error
    if is_first_process():
        there = np.flatnonzero(prior_of(corpus))
        tell_of_the_rare(
            [corpus.names[place] for place in there],
            mixtures[:, there],
            f"the mixtures that are drawn for {count} proxies",
            "give a smaller --smallest-weight, a larger --max-upweighting or more --num-proxies",
        )
    return mixtures


def given_runs(ratios: Path, metrics: Path, corpus: Corpus) -> FittedRuns:
    """The runs of a person's tables, brought to the domains of ``corpus``.

    Metrics that mean a domain get its name; others, such as tasks, keep theirs. What each column
    is called here is told where that is not what the table calls it.

    Raises:
        UserError: for tables that cannot be read, or a domain that the corpus does not have.
    """
    read = read_mixture_runs(ratios, metrics)
    names = matched(read.domains, corpus.names)
    unknown = [name for name in read.domains if name not in names]
    if unknown:
        raise UserError(
            f"{ratios}: '{unknown[0]}' is no domain of {corpus.root}, whose domains are "
            f"{listed(corpus.names)}; rename the column"
        )
    mixtures = np.zeros((len(read.keys), len(corpus.names)))
    for name, column in zip(read.domains, read.mixtures.T, strict=True):
        mixtures[:, corpus.names.index(names[name])] = column
    tell_of_the_rare(corpus.names, mixtures, str(ratios))
    means = matched(read.metrics, corpus.names)
    found = dataclasses.replace(
        read,
        domains=list(corpus.names),
        mixtures=mixtures,
        metrics=[means.get(metric, metric) for metric in read.metrics],
    )
    renamed = {
        "ratios": _renamed(read.domain_columns, [names[name] for name in read.domains]),
        "metrics": _renamed(read.metric_columns, found.metrics),
    }
    told = [f"{len(read.keys)} runs of {ratios} and {metrics}"]
    for table, columns in ((ratios, renamed["ratios"]), (metrics, renamed["metrics"])):
        if columns:
            pairs = [f"{column} is {name}" for column, name in columns.items()]
            told.append(f"columns of {table}: {listed(pairs)}")
    parameters: dict[str, object] = {
        "runs": len(read.keys),
        "ratios": str(ratios),
        "metrics": str(metrics),
        "renamed_columns": renamed,
    }
    inputs = {"ratios": sha256_of_files(ratios), "metrics": sha256_of_files(metrics)}
    nobodys = (f"the runs of {ratios}",)
    return FittedRuns(found, "\n".join(told), parameters, inputs, Cost(), unknown_costs=nobodys)


def _renamed(columns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Column -> what it is called here, where that is another name."""
    pairs = zip(columns, names, strict=True)
    return {column: name for column, name in pairs if column != name}


def trained_runs(
    result: SwarmResult,
    losses: Array,
    folders: Sequence[Path],
    by_paper: float | None = None,
) -> FittedRuns:
    """The members of a swarm that came to their end.

    Domains without held-out text have no loss and are no metric.

    Args:
        result: of the swarm.
        losses: [n, k] what is fitted: its losses at some step, or extrapolated ones.
        folders: of the swarm, or of several on the same mixtures, whose results it joins.
        by_paper: FLOPs of them as Chameleon's tables count them.

    Raises:
        UserError: if all members diverged, or no domain has held-out text.
    """
    count = len(result.mixtures)
    kept = np.setdiff1d(np.arange(count), result.diverged)
    tell_of_the_diverged(result.diverged, count)
    told = f"{len(kept)} proxies of {' and '.join(map(str, folders))}"
    tell_of_the_rare(result.domains, result.mixtures[kept], told)
    measured = np.any(np.isfinite(losses[kept]), axis=0)
    if not measured.any():
        raise UserError(
            f"no domain has held-out losses in {folders[0]}; preprocess with text in the valid "
            "split"
        )
    metrics = [name for name, there in zip(result.domains, measured, strict=True) if there]
    runs = MixtureRuns(
        keys=[str(number) for number in kept],
        domains=list(result.domains),
        mixtures=result.mixtures[kept],
        metrics=metrics,
        losses=losses[kept][:, measured],
    )
    parameters: dict[str, object] = {
        "runs": len(kept),
        "swarm": [str(folder) for folder in folders],
        "diverged": [int(number) for number in result.diverged],
    }
    return FittedRuns(
        runs,
        told,
        parameters,
        {},
        result.cost,
        made_from=tuple(folders),
        paper_flops=by_paper,
    )


def tell_of_the_diverged(diverged: Sequence[int], count: int) -> None:
    """Warn of members that are left out.

    Raises:
        UserError: if none is left.
    """
    if not diverged:
        return
    if len(diverged) == count:
        raise UserError(
            f"all {count} proxies diverged; give a smaller --lr or more --lr-warmup-iters, and "
            "another --work-dir"
        )
    warnings.warn(
        f"{len(diverged)} of {count} proxies diverged and are left out of the fit: "
        f"{listed([str(number) for number in diverged])}",
        MixtureWarning,
        stacklevel=3,
    )
