"""The mixture of a method that watched a proxy: the mean of its weights, and what it cost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_chameleon.artifacts import Corpus, Mixture, Stopwatch, TrainingRun, provenance
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.finish import write_and_tell
from megatron_chameleon.methods.common.settled import WeightPath, steadiness, warn_of_unsettled
from megatron_chameleon.options.mixture import MethodOptions


@dataclasses.dataclass(frozen=True)
class FoundWeights:
    """What a watched proxy has come to.

    Attributes:
        method: what ``--method`` takes.
        settings: the method's own parameters.
        path: how the weights moved; their mean is the mixture.
        steps_averaged: how many weights are in the mean.
        scores: domain -> what speaks for it.
        runs: that were trained for it, the proxy last.
        inputs: name of each artifact read, the corpus apart -> its hash.
        paper_flops: FLOPs as Chameleon's tables count them.
        way_out: which knobs would steady the weights, to end a sentence.
        heading: the line above the table.
        closing: lines under it.
    """

    method: str
    settings: Mapping[str, Any]
    path: WeightPath
    steps_averaged: int
    scores: dict[str, float]
    runs: Sequence[TrainingRun]
    inputs: Mapping[str, str]
    paper_flops: float
    way_out: str
    heading: str
    closing: Sequence[str]


def write_found(
    found: FoundWeights, options: MethodOptions, corpus: Corpus, stopwatch: Stopwatch
) -> None:
    """Write the mean weights to ``--output`` and print them, on one rank.

    The mixture's cost is that since ``stopwatch`` began; those of the runs are theirs.
    """
    path, proxy = found.path, found.runs[-1]
    warn_of_unsettled(path, found.way_out)
    own = stopwatch.cost(num_devices=proxy.cost.num_devices)
    total = own
    for run in found.runs:
        total += run.cost
    mixture = Mixture(
        **limit_of(options, corpus, corpus.names).fields(np.array(list(path.mean.values()))),
        method=found.method,
        parameters={
            **found.settings,
            **steadiness(path, proxy),
            "steps_averaged": found.steps_averaged,
            "made_from": [os.path.relpath(run.root, options.output.parent) for run in found.runs],
            "total_cost": {"flops": total.flops, "device_seconds": total.device_seconds},
            "paper_flops": found.paper_flops,
        },
        scores=found.scores,
        provenance=provenance(options, {"corpus": corpus.hash, **found.inputs}),
        cost=own,
    )
    write_and_tell(mixture, options, found.heading, *found.closing)
