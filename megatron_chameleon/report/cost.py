"""Cost ledger: recorded costs of all stages, summed over the run and per mixture.

This module only adds recorded costs. Each stage counts FLOPs from the model's shapes;
device-seconds are wall-clock seconds times the number of devices held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Cost,
    EmbeddingStore,
    Mixture,
    TrainingRun,
)
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import BASE, EMBEDDINGS, MIXTURE, PROXY, RunFolder
from megatron_chameleon.report.tables import MISSING, UNKNOWN, Table, format_flops, format_hours

# Costs are also shown relative to one mixture, whose method is the first of these in the run.
REFERENCE_METHODS = ("chameleon-pretrain", "chameleon-finetune")
# What is missing in the cost of a mixture whose proxy is outside the run folder.
TRAINING_OF_MODEL = f"the training of its model, which is not in {PROXY}"


@dataclasses.dataclass(frozen=True)
class MixtureCost:
    """The cost to obtain one mixture.

    Attributes:
        mixture: the mixture, which records its method and its own cost.
        parts: ledger entry -> cost: the mixture's own cost first, then those of its inputs. An
            input that several mixtures share is included in the cost of each.
        missing: descriptions of parts that are missing or have no recorded cost.
    """

    mixture: Mixture
    parts: Mapping[str, Cost]
    missing: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether ``cost`` is complete."""
        return not self.missing or "total_cost" in self.mixture.parameters

    def amount(self, unit: str) -> float | None:
        """Return the field ``unit`` of ``cost``; None if the cost is incomplete."""
        return getattr(self.cost, unit) if self.is_known else None

    def ratio(self, other: MixtureCost, unit: str) -> float | None:
        """Ratio of the amounts of this mixture and ``other``; None if unknown or divided by 0."""
        ours, theirs = self.amount(unit), other.amount(unit)
        return None if ours is None or not theirs else ours / theirs

    @property
    def cost(self) -> Cost:
        """Sum of the parts.

        If a part is missing, the method's recorded totals are used where they are larger.
        """
        found = sum(self.parts.values(), start=Cost())
        recorded = self.mixture.parameters.get("total_cost")
        if not self.missing or not isinstance(recorded, dict):
            return found
        return dataclasses.replace(
            found,
            flops=max(found.flops, float(recorded.get("flops", 0.0))),
            device_seconds=max(found.device_seconds, float(recorded.get("device_seconds", 0.0))),
        )

    @property
    def paper_flops(self) -> float:
        """FLOPs by the paper's formula; 0 if the method does not record them.

        As in ``cost``, the training of the proxy counts if its run is among the parts.
        """
        parameters = self.mixture.parameters
        flops = float(parameters.get("paper_flops") or 0.0)
        if any(entry.startswith(f"{PROXY}/") for entry in self.parts):
            flops += float(parameters.get("paper_flops_of_proxy") or 0.0)
        return flops

    def cells(self) -> list[str]:
        """Format FLOPs and device-hours, or 'unknown' if the cost is incomplete."""
        if not self.is_known:
            return [UNKNOWN, UNKNOWN]
        return [format_flops(self.cost.flops), format_hours(self.cost.device_seconds)]


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The costs of a run folder.

    Attributes:
        entries: artifact -> its cost, in stage order, each artifact once.
        mixtures: name -> cost to obtain that mixture.
    """

    entries: Mapping[str, Cost]
    mixtures: Mapping[str, MixtureCost]

    @property
    def total(self) -> Cost:
        """The cost of all artifacts, each counted once."""
        return sum(self.entries.values(), start=Cost())


def ledger_of(folder: RunFolder) -> Ledger:
    """Sum the recorded costs of ``folder``.

    A mixture's ``parameters["made_from"]`` lists its inputs by paths relative to its folder: runs,
    swarms, embedding stores, folders of these, and other mixtures, whose inputs count as well.
    ``parameters["unknown_costs"]`` describes inputs without a known cost. Chameleon's mixtures have
    no such list: their proxy is the run in 2-proxy that saved the checkpoint in their provenance,
    and their store is the embedding store whose recipe the mixture records.

    Raises:
        UserError: if an artifact is damaged.
    """
    proxies = {}
    for run in folder.proxies.values():
        for checkpoint in run.checkpoints:
            # If the checkpoint is damaged, the mixture's proxy is listed as missing.
            with contextlib.suppress(UserError):
                proxies[CheckpointRecord.load(run.root / checkpoint).hash] = run
    mixtures, entries = {}, folder.costs()
    if folder.sweep is not None:
        paths = [(folder.sweep.root / point.mixture).resolve() for point in folder.sweep.points]
        entries |= {_entry(folder, p): Mixture.load(p).cost for p in paths if p.is_file()}
    for name, mixture in folder.mixtures.items():
        entry = f"{MIXTURE}/{name}"
        parts, missing = _made_from(folder, mixture, proxies, (folder.paths[entry].resolve(),))
        missing = list(dict.fromkeys(missing))
        mixtures[name] = MixtureCost(mixture, {entry: mixture.cost, **parts}, tuple(missing))
        entries |= mixtures[name].parts

    # Sort by stage; artifacts outside of the run folder come last.
    keys = sorted(entries, key=lambda key: (key.startswith("/"), key.partition("/")[0]))
    return Ledger({key: entries[key] for key in keys if key not in folder.uncounted}, mixtures)


def cost_tables(folder: RunFolder) -> list[Table]:
    """Tables of the cost to obtain each mixture, if any, and of the cost of every artifact."""
    ledger = ledger_of(folder)

    def cells(cost: Cost) -> list[str]:
        seconds = (cost.wall_seconds, cost.device_seconds)
        return [format_flops(cost.flops), *(f"{s:.1f}" if s else MISSING for s in seconds)]

    stages = Table.of(
        "Cost",
        ["stage", "FLOPs", "seconds", "device-seconds", "devices"],
        [[stage, *cells(c), str(c.num_devices)] for stage, c in ledger.entries.items()],
        [["total", *cells(ledger.total), ""]],
        [
            "FLOPs are counted from the model's shapes; device-seconds are seconds times the "
            "devices (GPUs or CPU ranks) held."
        ],
    )
    return [mixture_cost_table(ledger, folder), stages] if ledger.mixtures else [stages]


def mixture_cost_table(ledger: Ledger, folder: RunFolder) -> Table:
    """Table of FLOPs and device-hours per mixture, inputs included, and relative to Chameleon's."""
    by_method = {m.mixture.method: n for n, m in reversed(list(ledger.mixtures.items()))}
    reference = next((by_method[m] for m in REFERENCE_METHODS if m in by_method), None)
    by_paper = any("paper_flops" in m.mixture.parameters for m in ledger.mixtures.values())
    header = ["mixture", "FLOPs", "device-hours"]
    if reference is not None:
        header += [f"FLOPs / {reference}", f"device-hours / {reference}"]
    rows = []
    for name, mixture in ledger.mixtures.items():
        row = [name, *mixture.cells()]
        for unit in ("flops", "device_seconds") if reference is not None else ():
            ratio = mixture.ratio(ledger.mixtures[reference or name], unit) or 0.0
            text = f"{ratio:.2g}x" if ratio < 0.995 else f"{ratio:.1f}x"
            row.append(text if ratio else MISSING)
        rows.append([*row, format_flops(mixture.paper_flops)] if by_paper else row)
    notes = [
        "Costs include the proxies and embeddings that a mixture was made from. An input that "
        "several mixtures share is included in the cost of each, but only once in the run's total."
    ]
    if by_paper:
        header.append("FLOPs as the paper counts")
        notes[0] += (
            " The paper counts 6 FLOPs per parameter and token trained, 2 per token embedded, "
            "without attention scores and output layer."
        )
    if folder.base_runs:
        name, run = max(folder.base_runs.items(), key=lambda item: item[1].cost.flops)
        notes.append(
            f"Training {BASE}/{name} took {format_flops(run.cost.flops)} FLOPs and "
            f"{format_hours(run.cost.device_seconds)} device-hours."
        )
    for name, mixture in ledger.mixtures.items():
        if mixture.missing:
            is_recorded = "total_cost" in mixture.mixture.parameters
            rest = "; the table shows the total in the mixture file" if is_recorded else ""
            missing = ", ".join(mixture.missing)
            notes.append(f"Missing in the cost of {name}: {missing}{rest}.")
    return Table.of("Cost to obtain each mixture", header, rows, notes=notes)


def _made_from(
    folder: RunFolder, mixture: Mixture, proxies: Mapping[str, TrainingRun], path: tuple[Path, ...]
) -> tuple[dict[str, Cost], list[str]]:
    """Return the costs of a mixture's inputs, and descriptions of the inputs without a cost.

    Args:
        folder: run folder.
        mixture: the mixture whose inputs are looked up.
        proxies: checkpoint hash -> the run in 2-proxy that saved it.
        path: chain of mixture files that ends with the file of ``mixture``; each mixture is an
            input of the mixture before it.
    """
    parts: dict[str, Cost] = {}
    missing: list[str] = []
    named = mixture.parameters.get("made_from")
    if named is None:
        checkpoint = mixture.provenance.inputs.get("checkpoint") if mixture.provenance else None
        if checkpoint is None:
            return parts, missing
        recipe = mixture.parameters.get("embedding")
        stores = [s for s in folder.embeddings.values() if dataclasses.asdict(s.recipe) == recipe]
        inputs = [proxies.get(checkpoint), *stores[:1]]
        parts |= {_entry(folder, each.root.resolve()): each.cost for each in inputs if each}
        if checkpoint not in proxies:
            missing.append(TRAINING_OF_MODEL)
        if not stores:
            missing.append(f"its embeddings, which are not in {EMBEDDINGS}")
        return parts, missing
    missing += map(str, mixture.parameters.get("unknown_costs", ()))
    for place in ((path[-1].parent / str(name)).resolve() for name in named):
        if place.is_file() and place.suffix == ".json":
            part = Mixture.load(place, may_change=True)
            parts[_entry(folder, place)] = part.cost
            if place not in path:  # avoid cycles: an overwritten mixture can be its own input
                found, lacking = _made_from(folder, part, proxies, (*path, place))
                parts |= found
                missing += lacking
            continue
        found = {_entry(folder, inside): cost for inside, cost in _costs_at(place)}
        parts |= found
        missing += [] if found else [os.path.relpath(place, path[0].parent)]
    return parts, missing


def _costs_at(place: Path) -> Iterator[tuple[Path, Cost]]:
    """Paths and costs of the artifact at ``place``, or of all artifacts in that folder."""
    for kind in (SwarmRecord, TrainingRun, EmbeddingStore):
        if kind.exists(place):
            yield place, kind.load(place).cost
            return
    if place.is_dir():
        for inside in sorted(path for path in place.iterdir() if path.is_dir()):
            yield from _costs_at(inside)


def _entry(folder: RunFolder, place: Path) -> str:
    """Return the ledger key of the artifact at ``place``; links to it have the same key."""
    if place in folder.entries:
        return folder.entries[place]
    name = place.with_suffix("") if place.suffix == ".json" else place
    for path, ending in folder.roots.items():
        root = path.resolve()
        if name.is_relative_to(root):
            return name.relative_to(root).as_posix() + (f" ({ending})" if ending else "")
    return name.as_posix()
