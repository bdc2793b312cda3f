"""The prediction of a run equals what its ranks do: groups, communication and checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.training.options import PlanRunOptions, TrainingOptions
from tests.distributed import cases
from tests.distributed.cases import TRAIN_ITERS, UNINTERRUPTED
from tests.small_corpus import VOCAB_SIZE

PADDING = 0.02
"""Part of the gradient buffers of these small models that is padding; see megatron's
_ParamAndGradBuffer, which aligns each tensor to 64 elements."""
BYTES_PER_SHARD = 4096
"""Maximum size of the header that torch writes for each shard of a tensor."""


def plan_options(places, name):
    """Return the options of plan_run for a run."""
    case = UNINTERRUPTED[name]
    options = cases.training_options(places, name, case)
    shared = {f.name: getattr(options, f.name) for f in dataclasses.fields(TrainingOptions)}
    return PlanRunOptions(**shared, vocab_size=VOCAB_SIZE, world_size=case.ranks)


@pytest.mark.parametrize("name", [n for n, case in UNINTERRUPTED.items() if case.ranks > 1])
def test_the_planned_communication_is_that_of_every_rank(results, name):
    from megatron_chameleon.parallel.layout import rank_groups
    from megatron_chameleon.training.run_estimate import estimate_run

    results.require(name)
    options = plan_options(results.places, name)
    groups = rank_groups(options.parallel, options.world_size)
    stages = estimate_run(options).communication
    for rank in range(options.world_size):
        found = json.loads(results.places.communication(name, rank).read_text())
        calls: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        data = ",".join(map(str, group_of(rank, groups["data"])))
        for one in stages[group_of(rank, groups["pipeline"]).index(rank)]:
            ranks = group_of(rank, groups[one.group])
            assert len(ranks) == one.ranks
            key = one.operation
            if key != "send":
                key += " " + ",".join(map(str, ranks))
            calls[key] += one.calls
            sizes[key] += one.tensor_bytes
        received = {kind: found[kind].pop("recv", 0) for kind in ("calls", "bytes")}
        assert (received["calls"] > 0) == (calls["send"] > 0)
        assert found["calls"].keys() == calls.keys()
        for key, count in calls.items():
            if key.endswith(f" {data}"):
                assert sizes[key] <= found["bytes"][key] <= (1 + PADDING) * sizes[key]
            else:
                assert (found["calls"][key], found["bytes"][key]) == (count, sizes[key]), key


def group_of(rank, groups):
    """Return the only one of ``groups`` that contains ``rank``."""
    (group,) = (ranks for ranks in groups if rank in ranks)
    return group


@pytest.mark.parametrize("name", UNINTERRUPTED)
def test_the_planned_checkpoint_has_the_size_of_the_real_one(results, name):
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megatron_chameleon.training.run_estimate import estimate_run

    planned = estimate_run(plan_options(results.places, name)).checkpoint_bytes
    files = results.checkpoint(name).files
    written = sum(file.bytes for path, file in files.items() if path.endswith(".distcp"))
    folder = step_folder(results.places.run(name), TRAIN_ITERS)
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata.values()
    sizes: Counter[bool] = Counter()
    shards = 0
    for entry in stored:
        if isinstance(entry, TensorStorageMetadata):
            shards += len(entry.chunks)
            dtype = entry.properties.dtype
            # Random states of each rank are bytes, and are not planned.
            sizes[dtype.is_floating_point] += entry.size.numel() * dtype.itemsize
        else:
            shards += 1
    assert planned == sizes[True]
    assert planned < written - sizes[False] < planned + shards * BYTES_PER_SHARD
