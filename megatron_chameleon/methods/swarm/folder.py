"""What a swarm writes: what it is of, each member's result at once, and tables at the end.

swarm.json, members/  see artifacts/swarm.py
groups/*.safetensors  members in flight (see checkpoint.py)
ratios.csv            member, weights of its mixture; without members that diverged
metrics.csv           member, its held-out losses at the last step
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Cost, provenance
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns, write_mixture_runs
from megatron_chameleon.artifacts.output_path import require_new
from megatron_chameleon.artifacts.swarm import SwarmRecord, finished_members, member_path
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.swarm.plan import SwarmPlan
from megatron_chameleon.methods.swarm.result import SwarmResult
from megatron_chameleon.mixture.checks import Array

RATIOS_NAME, METRICS_NAME = "ratios.csv", "metrics.csv"


def checkpoint_folder(folder: Path) -> Path:
    """Where members in flight are."""
    return folder / "groups"


def begin(folder: Path, plan: SwarmPlan) -> None:
    """Write ``swarm.json``, or check that the one there is of the same swarm.

    Members may have been added to it: those there are stay as they are.

    Raises:
        UserError: naming the first difference.
    """
    wanted = SwarmRecord(
        root=folder,
        settings=plan.settings(),
        corpus_hash=plan.corpus.hash,
        domains=plan.corpus.names,
        mixtures=plan.mixtures.tolist(),
        provenance=provenance(plan.options, {"corpus": plan.corpus.hash}),
    )
    if SwarmRecord.exists(folder):
        found = SwarmRecord.load(folder)
        difference = _difference(found, wanted)
        if difference:
            raise UserError(
                f"{folder} holds another swarm: {difference}; give the same, or another --work-dir"
            )
        if found.mixtures == wanted.mixtures:
            return
    else:
        tables = (folder / RATIOS_NAME, folder / METRICS_NAME)
        require_new(tables, "give another --work-dir")
    wanted.save()


def collect(folder: Path, plan: SwarmPlan, steps: list[int]) -> SwarmResult:
    """The result of a swarm whose members all have one.

    Raises:
        UserError: for a member's file that is damaged.
    """
    members = finished_members(folder, len(plan.mixtures))
    losses = np.full((len(plan.mixtures), len(steps), len(plan.corpus.names)), np.nan)
    diverged = []
    for member, record in members.items():
        if record.diverged is not None:
            diverged.append(member)
            continue
        widths = [len(row) for row in record.losses]
        if record.steps != steps or widths != [losses.shape[2]] * len(steps):
            raise UserError(
                f"{member_path(folder, member)}: field losses: not those of {len(steps)} "
                f"measurements of {losses.shape[2]} domains; delete the file and run again"
            )
        losses[member] = np.array(record.losses, np.float64)
    cost = sum((record.cost for record in members.values()), start=Cost())
    return SwarmResult(plan.corpus.names, plan.mixtures, steps, losses, diverged, cost)


def write_tables(folder: Path, result: SwarmResult) -> None:
    """Write ratios.csv and metrics.csv: rows in the order of members, the same in both.

    Members that diverged, and domains without held-out text, are left out.
    """
    last = result.losses[:, -1]
    kept = [i for i in range(len(result.mixtures)) if i not in set(result.diverged)]
    measured = [i for i in range(len(result.domains)) if not np.isnan(last[kept, i]).all()]
    runs = MixtureRuns(
        keys=[str(member) for member in kept],
        domains=result.domains,
        mixtures=result.mixtures[kept],
        metrics=[result.domains[i] for i in measured],
        losses=last[np.ix_(kept, measured)],
    )
    write_mixture_runs(runs, folder / RATIOS_NAME, folder / METRICS_NAME)


def plain_losses(losses: Array) -> list[float | None]:
    """[k] losses as JSON takes them: None where there is none."""
    return [loss if math.isfinite(loss) else None for loss in losses.tolist()]


def _difference(found: SwarmRecord, wanted: SwarmRecord) -> str | None:
    """The first difference between two swarms that keeps one from going on as the other."""
    for name, value in wanted.settings.items():
        if found.settings.get(name) != value:
            flag = "--" + name.replace("_", "-")
            return f"it was begun with {flag} {found.settings.get(name)}, not {value}"
    if (found.domains, found.corpus_hash) != (wanted.domains, wanted.corpus_hash):
        return "it was begun on another corpus"
    if len(found.mixtures) > len(wanted.mixtures):
        return f"it has {len(found.mixtures)} members, more than the {len(wanted.mixtures)} asked"
    pairs = zip(found.mixtures, wanted.mixtures, strict=False)
    changed = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
    return None if changed is None else f"its member {changed} was begun with another mixture"
