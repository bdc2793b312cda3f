"""Benchmarks compare equal work."""

from __future__ import annotations

import torch

from benchmarks import doge
from benchmarks.doge import Case as DogeCase
from benchmarks.plain_gpt import PlainGPT
from benchmarks.train_contestants import Case, Contestant, Ours, Plain
from benchmarks.train_timing import timed_at_its_best, timed_in_turn

CASE = Case("nano", 32, False, tokens_per_step=128)


def test_plain_model_has_the_same_size():
    """But for rows that pad the vocabulary, to 50,304 in both."""
    plain = PlainGPT(CASE.shape)
    held = sum(parameter.numel() for parameter in plain.parameters())
    padding = (50_304 - CASE.shape.vocab_size) * CASE.shape.size.hidden_size
    assert held - padding == CASE.shape.num_parameters


def test_contestants_train_on_the_same_number_of_tokens(one_rank):
    contestants: dict[str, Contestant] = {
        "ours": Ours(CASE, one_rank),
        "plain": Plain(CASE, one_rank),
    }
    found = timed_in_turn(contestants, CASE, micro_batch_size=2, peak=None, repeats=1)
    assert found.keys() == contestants.keys()
    for entry in found.values():
        assert entry["tokens_per_step"] == 128
        assert len(entry["seconds"]) == 1


class OutOfMemoryFrom:
    """Trains nothing; has memory for micro-batches below a size."""

    def __init__(self, size):
        self.size = size

    def run(self, micro_batch_size, steps, each):
        if micro_batch_size >= self.size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for _ in range(steps):
            each()


def test_timing_uses_the_best_micro_batch_that_fits(one_rank):  # whose device can be waited for
    found = timed_at_its_best(lambda: OutOfMemoryFrom(4), CASE, (32, 64, 128, 256), None, 5)
    assert found["micro_batch_size"] in found["tokens_per_second_by_micro_batch"]
    assert set(map(int, found["tokens_per_second_by_micro_batch"])) <= {1, 2}
    assert len(found["seconds"]) == 5
    found = timed_at_its_best(lambda: OutOfMemoryFrom(1), CASE, (32, 64), None, 5)
    assert found == {"out_of_memory": True}


def test_doge_row_has_the_ratios_to_the_plain_step(one_rank, monkeypatch):
    monkeypatch.setattr(doge, "VOCAB_SIZE", 500)
    row = doge.measured(DogeCase("nano", 8, 32), one_rank, repeats=1)
    names = ["7 domains", "17 domains"]
    assert list(row["times_a_plain_step"]) == names
    for name in names:
        (seconds,), (plain,) = row["seconds"][name], row["seconds"]["plain"]
        assert row["times_a_plain_step"][name] == seconds / plain
        assert row["memory_gb"][name] > 0
