"""A swarm on disk: its record, one run folder per member, results, and tables at the end.

swarm.json              settings, corpus and mixtures, see artifacts/swarm.py
members/00012/          member 12's run (run.json, metrics.jsonl, mixture.json, log.txt)
members/00012.json      member 12's held-out losses and cost, or why it diverged
ratios.csv              member, weights of its mixture; without members that diverged
metrics.csv             member, its held-out losses after the last step
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Cost, provenance
from megatron_chameleon.artifacts.files import require_new
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.artifacts.swarm import SwarmRecord, finished_members, member_path
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.swarm.options import SwarmOptions
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.training.options import (
    CheckpointingOptions,
    GuardOptions,
    LoggingOptions,
    PretrainOptions,
    ValidationOptions,
)

RATIOS_NAME, METRICS_NAME = "ratios.csv", "metrics.csv"
SUM_TOLERANCE = 1e-6
# Earlier releases trained members in stacks, with other numbers, and recorded no such setting.
MEMBERS = "runs"
# Options that change speed and rounding, but not which result is computed.
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
    """Held-out losses of every member, over the k domains of the corpus.

    Attributes:
        domains: names, in the corpus's order.
        mixtures: [n, k] float64, what each member was trained on.
        steps: after which held-out losses were measured; the last is the last step of training.
        losses: [n, len(steps), k] float64, mean loss per held-out token in nats; NaN for members
            that diverged, and for domains without held-out text.
        diverged: numbers of the members that diverged, ascending.
        cost: training and held-out passes of all members, over all sessions.
    """

    domains: list[str]
    mixtures: Array
    steps: list[int]
    losses: Array
    diverged: list[int]
    cost: Cost


@dataclasses.dataclass(frozen=True)
class Swarm:
    """A swarm to train: options, corpus, mixtures [n, k] float64, and its folder."""

    options: SwarmOptions
    corpus: Corpus
    mixtures: Array
    folder: Path

    def run_folder(self, member: int) -> Path:
        """Folder of a member's run."""
        return member_path(self.folder, member).with_suffix("")

    def member_run(self, member: int, micro_batch_size: int) -> PretrainOptions:
        """Options of a member's run, as of tools/pretrain_gpt.py."""
        options, folder = self.options, self.run_folder(member)
        interval = options.eval_interval or options.train_iters
        return PretrainOptions(
            run_dir=folder,
            corpus=self.corpus.root,
            mixture=str(folder / "mixture.json"),
            model_size=options.model_size,
            train_iters=options.train_iters,
            seq_length=options.seq_length,
            global_batch_size=options.global_batch_size,
            micro_batch_size=micro_batch_size,
            seed=member_seed(options.seed, member),
            bf16=options.bf16,
            deterministic=options.deterministic,
            dry_first_step="off",
            log_interval=options.log_interval,
            save_interval=options.save_interval or options.train_iters,
            data=DataOptions(permutation=options.permutation),
            optimizer=options.optimizer,
            checkpointing=CheckpointingOptions(keep_last_checkpoints=1),
            guards=GuardOptions(max_consecutive_skipped_steps=1),
            validation=ValidationOptions(
                eval_interval=min(interval, options.train_iters),
                eval_tokens=options.eval_tokens,
                eval_last_step=True,
            ),
            logging=LoggingOptions(tensorboard=False),
        )

    def unfinished(self) -> list[int]:
        """Members without a result, ascending."""
        finished = finished_members(self.folder, len(self.mixtures))
        return [member for member in range(len(self.mixtures)) if member not in finished]


def member_seed(seed: int, member: int) -> int:
    """Seed, from 0 to 2**32 - 1, of one member of the swarm with ``seed``."""
    digest = hashlib.sha256(f"{seed}/member/{member}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def checked_mixtures(mixtures: Array, corpus: Corpus) -> Array:
    """``mixtures`` in float64.

    Raises:
        UserError: unless every row has a weight per domain, none negative, that sum to 1.
    """
    found = np.asarray(mixtures, np.float64)
    domains = len(corpus.names)
    if found.ndim != 2 or not len(found) or found.shape[1] != domains:
        raise UserError(
            f"mixtures of shape {list(found.shape)} for the {domains} domains of {corpus.root}: "
            f"pass a row of {domains} weights per member"
        )
    valid = (found >= 0).all(1) & (np.abs(found.sum(1) - 1) <= SUM_TOLERANCE)
    if not valid.all():
        bad = int(np.flatnonzero(~valid)[0])
        raise UserError(
            f"mixture {bad} is {found[bad].tolist()}; weights must be >= 0 and sum to 1"
        )
    return found


def open_folder(swarm: Swarm) -> None:
    """Write ``swarm.json``, or check that the one on disk describes the same swarm.

    Members may be added; finished ones are kept.

    Raises:
        UserError: naming the first difference.
    """
    folder, corpus = swarm.folder, swarm.corpus
    wanted = SwarmRecord(
        root=folder,
        settings=_settings(swarm.options),
        corpus_hash=corpus.hash,
        domains=corpus.names,
        mixtures=swarm.mixtures.tolist(),
        provenance=provenance(swarm.options, {"corpus": corpus.hash}),
    )
    if SwarmRecord.exists(folder):
        found = SwarmRecord.load(folder)
        if found.settings.get("members") != MEMBERS:
            raise UserError(
                f"{folder} holds a swarm of an earlier release; fit its tables with --ratios "
                f"{folder / RATIOS_NAME} --metrics {folder / METRICS_NAME}, or choose another "
                "--work-dir"
            )
        difference = _difference(found, wanted)
        if difference:
            raise UserError(
                f"{folder} holds another swarm: {difference}; restore that, or choose another "
                "--work-dir"
            )
        if found.mixtures == wanted.mixtures:
            return
    else:
        tables = (folder / RATIOS_NAME, folder / METRICS_NAME)
        require_new(tables, "choose another --work-dir")
    wanted.save()


def collect(swarm: Swarm) -> SwarmResult:
    """Read the results of a swarm whose members have all finished, and write its tables.

    Raises:
        UserError: for a damaged member file.
    """
    steps, domains = swarm.options.measured_steps, swarm.corpus.names
    members = finished_members(swarm.folder, len(swarm.mixtures))
    losses = np.full((len(swarm.mixtures), len(steps), len(domains)), np.nan)
    diverged = []
    for member, record in members.items():
        if record.diverged is not None:
            diverged.append(member)
            continue
        widths = [len(row) for row in record.losses]
        if record.steps != steps or widths != [len(domains)] * len(steps):
            raise UserError(
                f"{member_path(swarm.folder, member)}: field losses: expected {len(steps)} "
                f"measurements of {len(domains)} domains; delete the file and run again"
            )
        losses[member] = np.array(record.losses, np.float64)
    cost = sum((record.cost for record in members.values()), start=Cost())
    result = SwarmResult(domains, swarm.mixtures, steps, losses, diverged, cost)
    _write_tables(swarm.folder, result)
    return result


def _write_tables(folder: Path, result: SwarmResult) -> None:
    """Write ratios.csv and metrics.csv, a row per member that did not diverge.

    Domains without held-out text are left out of metrics.csv.
    """
    last = result.losses[:, -1]
    kept = np.setdiff1d(np.arange(len(result.mixtures)), result.diverged)
    measured = np.flatnonzero(~np.isnan(last[kept]).all(axis=0))
    runs = MixtureRuns(
        keys=[str(member) for member in kept],
        domains=result.domains,
        mixtures=result.mixtures[kept],
        metrics=[result.domains[i] for i in measured],
        losses=last[np.ix_(kept, measured)],
    )
    write_mixture_runs(runs, folder / RATIOS_NAME, folder / METRICS_NAME)


def _settings(options: SwarmOptions) -> dict[str, Any]:
    """Options that determine the results, and how members are trained."""
    plain = {"members": MEMBERS, **json_values(options)}
    return {name: value for name, value in plain.items() if name not in FREE_SETTINGS}


def _difference(found: SwarmRecord, wanted: SwarmRecord) -> str | None:
    """First difference that keeps a swarm from being resumed as ``wanted``."""
    for name, value in wanted.settings.items():
        if found.settings.get(name) != value:
            flag = "--" + name.replace("_", "-")
            return f"it has {flag} {found.settings.get(name)}, not {value}"
    if (found.domains, found.corpus_hash) != (wanted.domains, wanted.corpus_hash):
        return "it was trained on another corpus"
    if len(found.mixtures) > len(wanted.mixtures):
        return f"it has {len(found.mixtures)} members, more than {len(wanted.mixtures)}"
    pairs = zip(found.mixtures, wanted.mixtures, strict=False)
    changed = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
    return None if changed is None else f"its member {changed} has another mixture"
