"""Test that benchmarks compare equal numbers of tokens."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import train
from benchmarks.train import Case, Contestant, Ours, Plain

CASE = Case("nano", 32, False, tokens_per_step=128)
ARGUMENTS = argparse.Namespace(peak=None, repeats=5)


def test_contestants_train_on_the_same_number_of_tokens(one_rank):
    contestants: dict[str, Contestant] = {
        "ours": Ours(CASE, one_rank),
        "plain": Plain(CASE, one_rank),
    }
    found = train.time_interleaved(contestants, CASE, ARGUMENTS)
    assert found.keys() == contestants.keys()
    for entry in found.values():
        assert (entry["tokens_per_step"], len(entry["seconds"])) == (128, 5)


class OutOfMemoryFrom:
    """An implementation that runs out of memory at micro-batches of ``size`` or more samples."""

    def __init__(self, size):
        self.size = size

    def run(self, micro_batch_size, steps, each):
        if micro_batch_size >= self.size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for _ in range(steps):
            each()


@pytest.mark.usefixtures("one_rank")  # timing requires a rank and its device
def test_timing_uses_the_best_micro_batch_that_fits(monkeypatch):
    monkeypatch.setattr(train, "MICRO_BATCH_TOKENS", (32, 64, 128, 256))
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    found = train.time_at_best(lambda: OutOfMemoryFrom(4), CASE, ARGUMENTS)
    assert found["micro_batch_size"] in found["tokens_per_second_by_micro_batch"]
    assert set(found["tokens_per_second_by_micro_batch"]) <= {1, 2}
    assert len(found["seconds"]) == 5
    found = train.time_at_best(lambda: OutOfMemoryFrom(1), CASE, ARGUMENTS)
    assert found == {"out_of_memory": True}
