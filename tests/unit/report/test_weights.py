"""Tables of weights and of sampled tokens, and the weights over a sweep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture, Repeats, SampledTokens
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.weights import (
    MOST_TABLES,
    repeats_table,
    swept_axes,
    token_tables,
    weight_tables,
)
from tests.unit.report.samples import (
    NAMES,
    UNIFORM,
    edit_run,
    random_mixture,
    rows_of,
    write_sweep,
    write_training_run,
)


def test_fine_tuning_weights_are_next_to_the_pretraining_weights(root):
    folder = RunFolder.load(root)
    (table,) = weight_tables(folder)
    found = table.cells.to_dict("list")
    pretrain, finetune = (folder.mixtures[f"chameleon-{m}"] for m in ("pretrain", "finetune"))
    assert finetune.scores is not None
    assert finetune.intervals is not None
    assert found["leverage score"] == [f"{finetune.scores[n]:.4f}" for n in NAMES]
    assert found["pretraining weight"] == [f"{pretrain.weights[n]:.4f}" for n in NAMES]
    assert found["fine-tuning weight"] == [f"{finetune.weights[n]:.4f}" for n in NAMES]
    low, high = finetune.intervals["prose"]
    assert found["fine-tuning 95% interval"][2] == f"{low:.4f} to {high:.4f}"


def token_counts(targets, actual, epochs):
    counts = zip(NAMES, targets, actual, epochs, strict=True)
    return {name: SampledTokens(1 / 3, *each) for name, *each in counts}


def test_token_tables_show_targets_actual_tokens_and_epochs(root):
    counts = token_counts([1000.4, 2000.0, 0.0], [1010, 1900, 0], [0.5, 12.34, 0.0])
    edit_run(root, UNIFORM, domain_tokens=counts)
    (table,) = token_tables(RunFolder.load(root))
    assert table.title == "Sampled tokens: Uniform"
    assert table.header == ("domain", "target tokens", "actual tokens", "difference", "epochs")
    found = rows_of(table)
    assert found["code"] == ["1,000", "1,010", "+0.96%", "0.5"]
    assert found["a|b_<x>"] == ["2,000", "1,900", "-5.00%", "12.3"]
    assert found["prose"] == ["0", "0", "-", "0"]
    assert found["total"] == ["3,000", "2,910", "-3.01%", ""]


def test_repeated_documents_are_shown_with_their_share_of_the_tokens(root):
    corpus = RunFolder.load(root).corpus
    assert corpus is not None
    none = Repeats(documents=10, tokens=1000, exact_documents=0, exact_tokens=0)
    some = replace(none, exact_documents=2, exact_tokens=125)
    near = replace(none, near_documents=3, near_tokens=500)
    for found, expected in (
        (none, None),
        (some, ["10", "2", "12.50%"]),
        (near, ["10", "0", "0.00%", "3", "50.00%"]),
    ):
        table = repeats_table(replace(corpus, repeats=dict.fromkeys(NAMES, found)))
        assert (table and rows_of(table)["code"]) == expected


def test_many_runs_share_one_table(root):
    count = MOST_TABLES + 1
    for i in range(count):
        tokens = token_counts([1000.0 + i] * 3, [1000 + i, 900, 1001 + i], [1.0, 0.5, 2.0 + i])
        path = root / f"5-base/run-{i}"
        status = "failed" if i == 0 else "finished"
        weights = Mixture.uniform(NAMES).weights
        write_training_run(path, weights, "manual", domain_tokens=tokens, status=status)
    (table,) = token_tables(RunFolder.load(root))
    assert len(table.rows) == count
    assert "run-0 (failed)" in table.notes[-1]
    assert rows_of(table)["run-0"] == ["3,000", "-10.00% (a|b_<x>)", "2 (prose)"]
    assert rows_of(table)["run-6"] == ["3,018", "-10.54% (a|b_<x>)", "8 (prose)"]


@pytest.fixture
def mixtures(rng):
    return [random_mixture(NAMES, rng) for _ in range(3)]


@pytest.fixture
def sweep(tmp_path, mixtures):
    """A sweep over three ridges, and over another hyperparameter that has no effect."""
    return write_sweep(tmp_path / "run", {"ridge": mixtures, "layer": mixtures[:1] * 2})


def test_changes_and_distances_are_relative_to_the_centre(sweep, mixtures):
    axis, still = swept_axes(sweep)
    centre, *others = (np.array(list(mixture.weights.values())) for mixture in mixtures)
    changes = [0 * centre, *(weights - centre for weights in others)]
    assert (axis.label, list(axis.weights), axis.centre) == ("ridge", ["1", "2", "3"], 0)
    np.testing.assert_allclose(axis.changes.T, changes)
    np.testing.assert_allclose(axis.distances, np.abs(changes).sum(axis=1) / 2)
    intervals = list((mixtures[1].intervals or {}).values())
    np.testing.assert_allclose(axis.intervals[1], intervals)
    assert (still.label, list(still.distances)) == ("layer", [0.0, 0.0])
