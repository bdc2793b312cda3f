"""What DoGE's step is timed beside is the same step without it."""

from __future__ import annotations

from benchmarks import doge
from benchmarks.doge import Case, measured, random_batches


def test_every_domain_is_in_the_batch_that_is_timed():
    batches = random_batches(Case("nano", 8, 16), num_domains=17)
    drawn = [int(domain) for batch in batches for domain in batch["domain"]]
    assert len(drawn) == 128
    counts = [drawn.count(domain) for domain in range(17)]
    assert (min(counts), max(counts)) == (7, 8)
    assert all(batch["tokens"].shape == (16, 8) for batch in batches)


def test_a_row_has_the_ratios_to_the_plain_step(one_rank, monkeypatch):
    monkeypatch.setattr(doge, "VOCAB_SIZE", 500)
    row = measured(Case("nano", 8, 32), one_rank, repeats=1)
    names = ["7 domains", "17 domains"]
    assert list(row["times_a_plain_step"]) == names
    for name in names:
        (seconds,), (plain,) = row["seconds"][name], row["seconds"]["plain"]
        assert row["times_a_plain_step"][name] == seconds / plain
        assert row["memory_gb"][name] > 0
