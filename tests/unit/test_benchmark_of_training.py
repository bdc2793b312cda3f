"""The plain model that training is timed beside is the same model, and steps are what they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks import measure
from benchmarks.plain_gpt import PlainGPT
from benchmarks.train_contestants import Case, Contestant, Ours, Plain
from benchmarks.train_timing import (
    best_micro_batch,
    figures,
    timed_at_its_best,
    timed_in_turn,
)
from megatron_chameleon.model.flops import training_flops

CASE = Case("nano", 32, False, tokens_per_step=128)


def test_the_plain_model_has_as_many_parameters():
    """But for rows that pad the vocabulary, to 50,304 in both."""
    plain = PlainGPT(CASE.shape)
    held = sum(parameter.numel() for parameter in plain.parameters())
    padding = (50_304 - CASE.shape.vocab_size) * CASE.shape.size.hidden_size
    assert held - padding == CASE.shape.num_parameters


def test_both_are_timed_on_steps_of_the_same_tokens(one_rank):
    contestants: dict[str, Contestant] = {
        "ours": Ours(CASE, one_rank),
        "plain": Plain(CASE, one_rank),
    }
    found = timed_in_turn(contestants, CASE, micro_batch_size=2, peak=None, repeats=1)
    assert found.keys() == contestants.keys()
    for entry in found.values():
        assert entry["tokens_per_step"] == 128
        assert len(entry["seconds"]) == 1


def test_figures_are_counted_from_the_median():
    found = figures(CASE, 4, [2.0, 1.0, 8.0], peak=1e9)
    assert found["tokens_per_second"] == 64
    per_second = 64 * training_flops(CASE.shape, 1, 32)
    assert found["model_tflops"] == pytest.approx(per_second / 1e12)
    assert found["mfu"] == pytest.approx(per_second / 1e9)
    assert figures(CASE, 4, [1.0], peak=None)["mfu"] is None


class OutOfMemoryFrom:
    """Trains nothing; has memory for micro-batches below a size."""

    def __init__(self, size):
        self.size, self.tried = size, []

    def run(self, micro_batch_size, steps, each):
        self.tried.append(micro_batch_size)
        if micro_batch_size >= self.size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for _ in range(steps):
            each()


def test_the_search_ends_where_memory_does(one_rank):  # whose device can be waited for
    contestant = OutOfMemoryFrom(4)
    best, speeds = best_micro_batch(contestant, CASE, (32, 64, 128, 256))
    assert best in speeds
    assert set(speeds) <= {1, 2}
    with pytest.raises(torch.OutOfMemoryError):
        best_micro_batch(OutOfMemoryFrom(1), CASE, (32, 64))


def test_each_is_timed_at_its_best_micro_batch(one_rank):
    found = timed_at_its_best(lambda: OutOfMemoryFrom(4), CASE, (32, 64, 128), None, 5)
    assert found["micro_batch_size"] in found["tokens_per_second_by_micro_batch"]
    assert len(found["seconds"]) == 5
    found = timed_at_its_best(lambda: OutOfMemoryFrom(1), CASE, (32, 64), None, 5)
    assert found == {"out_of_memory": True}


def test_rows_that_are_measured_again_take_the_place_of_the_old_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    on = {"device": "Some Device", "packages": {"torch": "2"}}
    name = measure.device_file("train", "Some Device")
    for row in ({"what": "b", "speed": 1}, {"what": "a", "speed": 2}, {"what": "b", "speed": 3}):
        measure.put_row(name, on, row)
    rows = measure.read_rows("train-some-device")
    assert [(row["what"], row["speed"]) for row in rows] == [("a", 2), ("b", 3)]
    assert all(row["date"] and row["machine"] == on for row in rows)
