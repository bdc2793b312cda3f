"""What a mixture that is taken over has cost, so that it costs the same under its new name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Cost, Mixture


def cost_parameters(mixture: Mixture, path: Path, folder: Path) -> dict[str, Any]:
    """What the parameters of a mixture in ``folder`` say of where its cost is.

    ``made_from`` names the file itself, for its own cost and for what it was made from by hashes
    alone; what it names by paths is named again, so that this is found where the file is gone.

    Args:
        mixture: whose weights are taken over.
        path: its file.
        folder: the new mixture's; the paths are relative to it.
    """
    named = [path.parent / place for place in mixture.parameters.get("made_from", ())]
    places = [os.path.relpath(place.resolve(), folder.resolve()) for place in (path, *named)]
    unknown = mixture.parameters.get("unknown_costs")
    return {"made_from": places} | ({"unknown_costs": unknown} if unknown else {})


def full_cost(mixture: Mixture) -> Cost | None:
    """All that it took to obtain ``mixture``; None where its file does not say it all.

    A mixture of Chameleon holds the cost of its algebra: what its proxy and its embeddings took is
    in their own files.
    """
    parameters = mixture.parameters
    recorded: Any = parameters.get("total_cost")
    if isinstance(recorded, dict):
        return Cost(float(recorded["flops"]), float(recorded["device_seconds"]))
    by_hash = mixture.provenance is not None and "checkpoint" in mixture.provenance.inputs
    if by_hash or parameters.get("made_from") or parameters.get("unknown_costs"):
        return None
    return mixture.cost
