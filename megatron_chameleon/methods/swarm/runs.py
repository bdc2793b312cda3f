"""The runs of a fit: members of swarms, or rows of the user's tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.evaluation.perplexity import token_counts, unigram_loss
from megatron_chameleon.interchange.mixture_runs import (
    MixtureRuns,
    is_training_loss,
    matched,
    read_mixture_runs,
)
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.methods.swarm.folder import SwarmResult
from megatron_chameleon.methods.swarm.sampling import warn_rare_domains
from megatron_chameleon.mixture.checks import Array

# Tokens that are counted, of a domain's training text and of its held-out text, for the loss of a
# unigram model.
UNIGRAM_TOKENS = 1 << 24
COLLECT = "write it with megatron-chameleon swarm collect --swarm-dir"


@dataclasses.dataclass(frozen=True, eq=False)
class FitRuns:
    """Runs on mixtures of the corpus's domains, and the source of the runs.

    Attributes:
        table: mixtures and losses, without runs that diverged; its domains are the corpus's.
        origin: printed description of the source of the runs.
        parameters: description of the source of the runs, for the mixture file.
        inputs: name of each file read -> its hash.
        cost: cost of the runs; None if unknown.
        made_from: folders of the swarms.
    """

    table: MixtureRuns
    origin: str
    parameters: dict[str, object]
    inputs: dict[str, str]
    cost: Cost | None
    made_from: Sequence[Path] = ()


def existing_runs(ratios: Path, metrics: Path, corpus: Corpus) -> FitRuns:
    """Read runs from the user's tables, and map their columns to the domains of ``corpus``.

    A metric that matches a domain, also a held-out one, gets the domain's name; other metrics, such
    as tasks, keep their names. Renamed columns are reported.

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
    mixtures[:, [corpus.names.index(names[name]) for name in read.domains]] = read.mixtures
    warn_rare_domains(corpus.names, mixtures, str(ratios))
    matches = matched(read.metrics, list(corpus.all_domains))
    for column, metric in zip(read.metric_columns, read.metrics, strict=True):
        # Other columns, such as lambada_train, are tasks, which are used by their names only.
        if metric in matches and is_training_loss(column) and column not in corpus.all_domains:
            raise UserError(
                f"{metrics}: '{column}' is a training loss; pass held-out losses, and remove the "
                "column"
            )
    table = dataclasses.replace(
        read,
        domains=list(corpus.names),
        mixtures=mixtures,
        metrics=[matches.get(metric, metric) for metric in read.metrics],
    )
    pairs = {
        "ratios": zip(read.domain_columns, map(names.__getitem__, read.domains), strict=True),
        "metrics": zip(read.metric_columns, table.metrics, strict=True),
    }
    renamed = {key: {old: new for old, new in each if old != new} for key, each in pairs.items()}
    origin = f"{len(read.keys)} runs of {ratios} and {metrics}"
    changes = [f"{old} -> {new}" for each in renamed.values() for old, new in each.items()]
    if changes:
        origin = f"{origin}\ncolumns: {format_names(changes)}"
    return FitRuns(
        table,
        origin,
        parameters={
            "runs": len(read.keys),
            "ratios": str(ratios),
            "metrics": str(metrics),
            "renamed_columns": renamed,
            "unknown_costs": [f"the runs of {ratios}"],
        },
        inputs={"ratios": sha256_of_files(ratios), "metrics": sha256_of_files(metrics)},
        cost=None,
    )


def with_cost(runs: FitRuns, swarm: SwarmRecord) -> FitRuns:
    """Add the cost of ``swarm`` to ``runs`` if their losses are those of its members.

    The tables in the folder of a swarm may also hold losses of another trainer's runs.

    Raises:
        UserError: for a damaged result of a member.
    """
    measured = {
        str(number): {*member.losses[-1], *member.bits_per_byte.values()}
        for number, member in swarm.finished.items()
        if member.losses
    }
    rows = zip(runs.table.keys, runs.table.losses.tolist(), strict=True)
    if not all({*losses} <= measured.get(key, set()) for key, losses in rows):
        return runs
    parameters = {key: value for key, value in runs.parameters.items() if key != "unknown_costs"}
    return dataclasses.replace(
        runs,
        origin=f"{len(runs.table.keys)} members of {swarm.root}",
        parameters=parameters,
        cost=swarm.cost,
        made_from=[swarm.root],
    )


def check_collected(runs: FitRuns, swarm: SwarmRecord) -> None:
    """Check that ``runs`` has all members of ``swarm`` that are finished and did not diverge.

    Raises:
        UserError: with the number of members that it lacks.
    """
    measured = {str(number) for number, member in swarm.finished.items() if not member.diverged}
    if lacking := measured - set(runs.table.keys):
        raise UserError(
            f"--swarm-dir {swarm.root}: its metrics.csv lacks {len(lacking)} finished members; "
            f"{COLLECT} {swarm.root}"
        )


def swarm_runs(swarms: Sequence[SwarmResult], losses: Array) -> FitRuns:
    """Return the members that did not diverge in any swarm.

    Args:
        swarms: swarms that were trained on the same mixtures.
        losses: [n, m] losses to fit: measured after a step, or extrapolated.

    Raises:
        UserError: if all members diverged, or no domain has held-out text.
    """
    diverged = sorted({number for swarm in swarms for number in swarm.diverged})
    table = measured_runs(swarms, losses)
    folders, count = [swarm.folder for swarm in swarms], len(losses)
    origin = f"{len(table.keys)} proxies of {' and '.join(map(str, folders))}"
    if not table.metrics:
        raise UserError(
            f"{origin}: no loss is finite, since all {count} proxies diverged or no domain has "
            "held-out text; lower --lr or raise --lr-warmup-iters, and choose another --work-dir"
        )
    if diverged:
        warn(
            f"{len(diverged)} of {count} proxies diverged and are left out of the fit: "
            f"{format_names(list(map(str, diverged)))}"
        )
    warn_rare_domains(table.domains, table.mixtures, origin)
    parameters = {
        "runs": len(table.keys),
        "swarm": list(map(str, folders)),
        "diverged": diverged,
    }
    cost = sum((swarm.cost for swarm in swarms), Cost())
    return FitRuns(table, origin, parameters, {}, cost, folders)


def measured_runs(swarms: Sequence[SwarmResult], losses: Array) -> MixtureRuns:
    """Return a table of the members that did not diverge in any swarm, with ``losses`` [n, m]."""
    diverged = sorted({number for swarm in swarms for number in swarm.diverged})
    return dataclasses.replace(swarms[0], diverged=diverged).runs(losses)


def warn_untrained(target_shares: Array, corpus: Corpus, table: MixtureRuns) -> None:
    """Warn if at least half of the runs predict the target's domains worse than token frequencies.

    Such runs have learned little more than which tokens are frequent, and the best mixture for this
    can be a bad one for longer runs. Held-out domains are not compared, since they have no training
    text to take token frequencies from.
    """
    shares = by_name(table.metrics, target_shares)
    domains = [name for name in corpus.names if shares.get(name)]
    if not domains:
        return
    unigram, opened = [], open_domains(corpus)
    for name in domains:
        held_out = opened.open(name, "valid").tokens
        seen = token_counts(held_out, corpus.tokenizer.vocab_size, UNIGRAM_TOKENS)
        unigram.append(unigram_loss(opened, name, seen, UNIGRAM_TOKENS))
    losses = table.losses[:, [table.metrics.index(name) for name in domains]]
    weights = np.array([shares[name] for name in domains])
    average = float(np.median(losses @ weights / weights.sum()))
    frequencies = float(unigram @ weights / weights.sum())
    if average >= frequencies:
        warn(
            "the proxies are hardly trained: half of them have a target loss of "
            f"{average:.2f} or more, and token frequencies alone have {frequencies:.2f}; the best "
            "mixture of longer runs is probably another one: raise --train-iters"
        )
