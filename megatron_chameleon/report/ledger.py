"""The ledger: what every stage recorded, added up once over the run and once for each mixture.

Nothing is estimated here. FLOPs were counted from shapes by the stage that spent them, and device
seconds are its seconds on the clock times the devices it held.
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
from megatron_chameleon.report.run_folder import EMBEDDINGS, MIXTURE, PROXY, STAGES, RunFolder

# The costs of other mixtures are divided by that of the first of these methods that is there.
REFERENCE_METHODS = ("chameleon-pretrain", "chameleon-finetune")


@dataclasses.dataclass(frozen=True)
class MixtureCost:
    """What it took to obtain one mixture.

    Attributes:
        mixture: with its method and its own cost.
        parts: artifact -> its cost: the mixture's own first, then what it was made from. One that
            several mixtures were made from is among the parts of each.
        missing: what it was made from and is not there, or took nobody knows how much; a phrase
            for each.
    """

    mixture: Mixture
    parts: Mapping[str, Cost]
    missing: tuple[str, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether ``cost`` is all that it took, and not some part of it."""
        return not self.missing or "total_cost" in self.mixture.parameters

    @property
    def cost(self) -> Cost:
        """The sum; where a part is missing, what the method wrote down as its sum, if it did."""
        found = sum(self.parts.values(), start=Cost())
        recorded = self.mixture.parameters.get("total_cost")
        if not self.missing or not isinstance(recorded, dict):
            return found
        return dataclasses.replace(
            found,
            flops=max(found.flops, float(recorded.get("flops", 0.0))),
            device_seconds=max(found.device_seconds, float(recorded.get("device_seconds", 0.0))),
        )


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The costs of a run folder.

    Attributes:
        entries: artifact -> its cost, in the order of the stages; no artifact is in it twice.
        mixtures: name -> what that mixture took.
    """

    entries: Mapping[str, Cost]
    mixtures: Mapping[str, MixtureCost]

    @property
    def total(self) -> Cost:
        """Of everything, each artifact counted once."""
        return sum(self.entries.values(), start=Cost())

    @property
    def reference(self) -> str | None:
        """The mixture that the others' costs are divided by: Chameleon's, where there is one."""
        for method in REFERENCE_METHODS:
            for name, mixture in self.mixtures.items():
                if mixture.mixture.method == method:
                    return name
        return None


def ledger_of(folder: RunFolder) -> Ledger:
    """Add up what the artifacts of ``folder`` say.

    A mixture is made from what ``parameters["made_from"]`` names, by paths from its own folder:
    runs, swarms and embedding stores, folders of them, and mixtures, which bring what they were
    made from themselves; ``parameters["unknown_costs"]`` says in words what else it was made from,
    the cost of which nobody knows. Chameleon's names none: its proxy is the run in 2-proxy that
    wrote the checkpoint whose hash is in its provenance, and its store the one with the recipe of
    its embeddings.

    Raises:
        UserError: if an artifact is damaged.
    """
    proxies = _proxies_by_hash(folder)
    mixtures = {
        name: _mixture_cost(folder, name, mixture, proxies)
        for name, mixture in folder.mixtures.items()
    }
    entries = folder.costs() | _swept(folder)
    for cost in mixtures.values():
        entries |= cost.parts
    counted = (entry for entry in entries.items() if entry[0] not in folder.uncounted)
    return Ledger(dict(sorted(counted, key=_place_of_stage)), mixtures)


def _place_of_stage(entry: tuple[str, Cost]) -> int:
    """Sorts entries by stage and leaves their order within it; what lies elsewhere comes last."""
    stage = entry[0].partition("/")[0]
    return STAGES.index(stage) if stage in STAGES else len(STAGES)


def _swept(folder: RunFolder) -> dict[str, Cost]:
    """The mixtures of a sweep, whose proxies and embeddings lie where all others do."""
    if folder.sweep is None:
        return {}
    paths = [(folder.sweep.root / point.mixture).resolve() for point in folder.sweep.points]
    return {_entry(folder, path): Mixture.load(path).cost for path in paths if path.is_file()}


def _mixture_cost(
    folder: RunFolder, name: str, mixture: Mixture, proxies: Mapping[str, str]
) -> MixtureCost:
    place = folder.mixture_file(name).resolve()
    parts, missing = _made_from(folder, mixture, proxies, (place,))
    own = {f"{MIXTURE}/{name}": mixture.cost}
    return MixtureCost(mixture, own | parts, tuple(dict.fromkeys(missing)))


def _made_from(
    folder: RunFolder, mixture: Mixture, proxies: Mapping[str, str], path: tuple[Path, ...]
) -> tuple[dict[str, Cost], list[str]]:
    """The costs of what a mixture was made from, and what of it is not there.

    Args:
        folder: of the run.
        mixture: whose parts are sought.
        proxies: hash of weights -> the run that saved them.
        path: the mixture's file last, before it those that it is a part of.
    """
    named = mixture.parameters.get("made_from")
    if named is None:
        return _found_by_hash(folder, mixture, proxies)
    parts: dict[str, Cost] = {}
    missing = [str(part) for part in mixture.parameters.get("unknown_costs", ())]
    for place in ((path[-1].parent / str(name)).resolve() for name in named):
        found, lacking = _parts_at(folder, place, proxies, path)
        if not found:
            lacking = [os.path.relpath(place, path[0].parent)]
        parts |= found
        missing += lacking
    return parts, missing


def _parts_at(
    folder: RunFolder, place: Path, proxies: Mapping[str, str], path: tuple[Path, ...]
) -> tuple[dict[str, Cost], list[str]]:
    """Costs of what lies at ``place``, of a mixture with all it was made from, and what lacks."""
    if not (place.is_file() and place.suffix == ".json"):
        return {_entry(folder, found): cost for found, cost in _costs_at(place)}, []
    mixture = Mixture.load(place)
    own = {_entry(folder, place): mixture.cost}
    if place in path:  # two that were written over each other in turn
        return own, []
    parts, missing = _made_from(folder, mixture, proxies, (*path, place))
    return own | parts, missing


def _costs_at(place: Path) -> Iterator[tuple[Path, Cost]]:
    """The artifact at ``place``, or, where it is a folder of others, those in it."""
    if SwarmRecord.exists(place):
        yield place, SwarmRecord.load(place).cost
    elif TrainingRun.exists(place):
        yield place, TrainingRun.load(place).cost
    elif EmbeddingStore.exists(place):
        yield place, EmbeddingStore.load(place).cost
    elif place.is_dir():
        for inside in sorted(path for path in place.iterdir() if path.is_dir()):
            yield from _costs_at(inside)


def _entry(folder: RunFolder, place: Path) -> str:
    """What the ledger calls an artifact, the same wherever it is named from."""
    known = folder.entries_by_place.get(place)
    if known is not None:
        return known
    name = place.with_suffix("") if place.suffix == ".json" else place
    roots = folder.merged.roots if folder.merged else {folder.root: ""}
    for path, appended in roots.items():
        root = path.resolve()
        if name.is_relative_to(root):
            return name.relative_to(root).as_posix() + (f" ({appended})" if appended else "")
    return name.as_posix()


def _found_by_hash(
    folder: RunFolder, mixture: Mixture, proxies: Mapping[str, str]
) -> tuple[dict[str, Cost], list[str]]:
    """The proxy and the embeddings of a mixture that names them by hashes alone."""
    checkpoint = mixture.provenance.inputs.get("checkpoint") if mixture.provenance else None
    if checkpoint is None:
        return {}, []
    parts: dict[str, Cost] = {}
    missing = []
    if checkpoint in proxies:
        run = folder.proxies[proxies[checkpoint]]
        parts[_entry(folder, run.root.resolve())] = run.cost
    else:
        missing.append(f"the training of its model, which is not in {PROXY}")
    recipe = mixture.parameters.get("embedding")
    stores = [s for s in folder.embeddings.values() if dataclasses.asdict(s.recipe) == recipe]
    if not stores:
        missing.append(f"its embeddings, which are not in {EMBEDDINGS}")
    return parts | {_entry(folder, s.root.resolve()): s.cost for s in stores[:1]}, missing


def _proxies_by_hash(folder: RunFolder) -> dict[str, str]:
    """Hash of weights -> the run in 2-proxy that saved them; of checkpoints that are whole."""
    found = {}
    for name, run in folder.proxies.items():
        for checkpoint in run.checkpoints:
            # What cannot be read is no reason to show nothing: the mixture then lacks its proxy,
            # and the table says so.
            with contextlib.suppress(UserError):
                found[CheckpointRecord.load(run.root / checkpoint).hash] = name
    return found
