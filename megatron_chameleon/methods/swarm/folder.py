"""The folder of a swarm.

swarm.json              settings, corpus and mixtures, see artifacts/swarm.py
members/00012/          member 12's run (run.json, metrics.jsonl, mixture.json, log.txt)
members/00012.json      member 12's losses and cost, or why it diverged
ratios.csv              weights of each member's mixture, without members that diverged
metrics.csv             losses of the same members after the last step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, Mixture, provenance
from megatron_chameleon.artifacts.files import require_new
from megatron_chameleon.artifacts.record import check_values, json_values
from megatron_chameleon.artifacts.swarm import (
    METRICS_NAME,
    RATIOS_NAME,
    SwarmRecord,
    finished_members,
    member_path,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.methods.swarm import SwarmOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.options import resolve_model
from megatron_chameleon.ranges import flag_of

# Options that may change when a swarm resumes, since they affect only speed and rounding.
FREE_SETTINGS = (
    "micro_batch_size",
    "members_at_once",
    "deterministic",
    "save_interval",
    "log_interval",
    "distributed_timeout_minutes",
    "stopping",
)


@dataclasses.dataclass(frozen=True)
class SwarmResult:
    """Losses of every member: held-out losses of domains, and bits per byte on tasks.

    Attributes:
        folder: folder of the swarm.
        domains: names of the k domains to train on, in the corpus's order.
        mixtures: [n, k] float64, the mixture of each member.
        steps: steps after which held-out losses were measured, the last step of training included.
        losses: [n, len(steps), m] float64, for each domain, and then for each held-out domain, the
            mean loss per held-out token in nats, then for each task the bits per byte of its gold
            answers; NaN for members that diverged, domains without held-out text, and tasks before
            the last step.
        diverged: numbers of the members that diverged, ascending.
        cost: training, held-out passes and evaluations of all members, over all sessions.
        tasks: names of the tasks.
        held_out: names of the held-out domains.
    """

    folder: Path
    domains: list[str]
    mixtures: Array
    steps: list[int]
    losses: Array
    diverged: list[int]
    cost: Cost
    tasks: Sequence[str] = ()
    held_out: Sequence[str] = ()

    def runs(self, losses: Array, members: Sequence[int] | None = None) -> MixtureRuns:
        """Return a table of ``members``, with their ``losses`` [n, m].

        The default is all members that did not diverge. Domains without a finite loss, such as
        those without held-out text, are left out.
        """
        names = [*self.domains, *self.held_out, *self.tasks]
        kept = np.setdiff1d(np.arange(len(self.mixtures)), self.diverged)
        if members is not None:
            kept = np.array(members, int)
        measured = np.flatnonzero(np.isfinite(losses[kept]).any(axis=0))
        return MixtureRuns(
            keys=[str(member) for member in kept],
            domains=self.domains,
            mixtures=self.mixtures[kept],
            metrics=[names[position] for position in measured],
            losses=losses[kept][:, measured],
        )


def open_folder(
    options: SwarmOptions,
    corpus: Corpus,
    mixtures: Array,
    folder: Path,
    frozen_mixture: str | None = None,
) -> list[int]:
    """Write ``swarm.json``; an existing file must describe the same swarm.

    Members may be added; finished members are kept.

    Returns:
        Members to train.

    Raises:
        UserError: if the file describes another swarm; the message names the first difference.
    """
    plain = json_values(options)
    plain |= plain.pop("architecture") | plain.pop("downstream")
    settings = {name: value for name, value in plain.items() if name not in FREE_SETTINGS}
    rows = mixtures.tolist()
    ratios, metrics = folder / RATIOS_NAME, folder / METRICS_NAME
    if not SwarmRecord.exists(folder):
        require_new((ratios, metrics), "choose another folder for the swarm")
    else:
        found = SwarmRecord.load(folder)
        differences = [
            f"it has {flag_of(name)} {found.settings.get(name)}, not {value}"
            for name, value in settings.items()
            if found.settings.get(name) != value
        ]
        if (found.domains, found.corpus_hash) != (corpus.names, corpus.hash):
            differences.append("it was trained on another corpus")
        if found.frozen_mixture != frozen_mixture:
            differences.append("it was generated with another --freeze")
        if len(found.mixtures) > len(rows):
            differences.append(f"it has {len(found.mixtures)} members, more than {len(rows)}")
        differences += [
            f"its member {member} has another mixture"
            for member, (old, new) in enumerate(zip(found.mixtures, rows, strict=False))
            if old != new
        ]
        if differences:
            fit = f", or fit the folder's tables with --swarm-dir {folder}"
            raise UserError(
                f"{folder} holds another swarm: {differences[0]}; restore the earlier settings, or "
                f"choose another folder{fit if ratios.exists() else ''}"
            )
    made_by = provenance(options, {"corpus": corpus.hash})
    held_out = list(corpus.held_out)
    record = SwarmRecord(
        folder, settings, corpus.hash, corpus.names, rows, made_by, held_out, frozen_mixture
    )
    record.save()
    return sorted(set(range(len(rows))) - record.finished.keys())


def options_of_swarm(record: SwarmRecord) -> SwarmOptions:
    """Return the options recorded in ``swarm.json``.

    Raises:
        UserError: if they are damaged.
    """
    where = f"{record.root / record.FILE_NAME}: provenance.options"
    hint = "generate the swarm again, in another folder"
    return check_values(where, SwarmOptions, record.provenance.options, hint)


def model_config(options: SwarmOptions, corpus: Corpus) -> ModelConfig:
    """Return the config of the members' model. Raises UserError for an unknown model."""
    sizes = corpus.tokenizer.vocab_size, options.seq_length
    return resolve_model(options.model, options.architecture, *sizes)


def unfinished(folder: Path, count: int) -> list[int]:
    """Return the members without a result, ascending. Raises UserError for a damaged result."""
    return sorted(set(range(count)) - finished_members(folder, count).keys())


def write_member_mixture(
    folder: Path, member: int, names: Sequence[str], weights: Sequence[float]
) -> dict[str, float]:
    """Write a member's ``mixture.json``; return its weights by name."""
    path = member_path(folder, member).with_suffix("") / "mixture.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    mixture = dict(zip(names, weights, strict=True))
    Mixture(mixture, method="swarm").save(path)
    return mixture


def collect(swarm: SwarmRecord, options: SwarmOptions) -> SwarmResult:
    """Read the results of the finished members, and write tables of those that did not diverge.

    Raises:
        UserError: for a damaged member file.
    """
    folder, mixtures = swarm.root, np.array(swarm.mixtures)
    tasks, steps, count = options.downstream.tasks, options.measured_steps, len(mixtures)
    members, num_domains = swarm.finished, len(swarm.domains) + len(swarm.held_out)
    losses = np.full((count, len(steps), num_domains + len(tasks)), np.nan)
    diverged = [member for member, record in members.items() if record.diverged is not None]
    for member in members.keys() - diverged:
        record = members[member]
        if record.steps != list(steps) or {*map(len, record.losses)} != {num_domains}:
            raise UserError(
                f"{member_path(folder, member)}: field losses: expected {len(steps)} measurements "
                f"of {num_domains} domains; delete the file and run the same command again"
            )
        losses[member, :, :num_domains] = np.array(record.losses, np.float64)
        losses[member, -1, num_domains:] = [record.bits_per_byte[task] for task in tasks]
    cost = sum((record.cost for record in members.values()), start=Cost())
    result = SwarmResult(
        folder, swarm.domains, mixtures, steps, losses, diverged, cost, tasks, swarm.held_out
    )
    measured = sorted(members.keys() - diverged)
    write_tables(folder, result.runs(losses[:, -1], measured))
    left_out = f", {len(diverged)} diverged members left out" if diverged else ""
    if len(members) < count:
        left_out += f", {count - len(members)} members not finished"
    print(
        f"swarm: {len(measured)} members measured{left_out}; written to {folder} "
        f"({RATIOS_NAME}, {METRICS_NAME})"
    )
    return result


def write_tables(folder: Path, runs: MixtureRuns) -> None:
    """Write the mixtures and losses of members as two tables in the folder of their swarm."""
    write_mixture_runs(runs, folder / RATIOS_NAME, folder / METRICS_NAME)
