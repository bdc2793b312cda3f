import math

import numpy as np
import pandas as pd
import pytest

from benchmarks import public_runs
from benchmarks.public_runs import (
    MEAN,
    choices_at,
    fit_all,
    paper_mixtures,
    predicted_changes,
    read_runs,
)
from megatron_chameleon.report.paper import paper_settings
from tests.unit.mixture.public_results import public_results

DOMAINS = ("arxiv", "book", "c4", "github", "commoncrawl", "stackexchange", "wikipedia")
TEXTS = (*DOMAINS, "openhermes")
# Each domain helps itself most; OpenHermes is helped by C4 and StackExchange.
TRANSFER = np.vstack([0.9 * np.eye(7) + 0.1, [0.1, 0.1, 0.9, 0.2, 0.3, 0.8, 0.1]])
RUNS, LARGER_RUNS = 32, 20


def true_losses(weights, parameters):
    """Compute losses [n, 8] of mixtures [n, 7] that decay exponentially with useful weight."""
    return 1.5 + (1e8 / parameters) ** 0.1 * np.exp(-2 * weights @ TRANSFER.T)


def table_of(weights, parameters, tokens):
    """Build a table in the published form; losses fall with the number of tokens."""
    frames = []
    for count in tokens:
        frame = pd.DataFrame(weights, columns=[f"weight_{name}" for name in DOMAINS])
        losses = true_losses(weights, parameters) + 1e9 / count
        frames.append(frame.assign(n_tokens=count, **dict(zip(LOSSES, losses.T, strict=True))))
    return pd.concat(frames)


LOSSES = [f"{text}_loss" for text in TEXTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write runs of 122M, and of 2.7B without a column of sizes; RegMix's tables are missing."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "slimpajama").mkdir()
    weights = np.random.default_rng(0).dirichlet(np.full(7, 3.0), RUNS)
    small = table_of(weights, 122e6, (1e9, 20e9, 21e9)).assign(model_size=122e6)
    # Few runs reach the last count, so it is not common to them.
    small.iloc[2 * RUNS + 4 :, small.columns.get_loc("wikipedia_loss")] = math.nan
    small.to_csv(folder / "slimpajama/runs_122m.csv", index=False)
    large = table_of(weights[:LARGER_RUNS], 2.7e9, (104e9,))
    large.iloc[3, large.columns.get_loc("c4_loss")] = math.nan
    large.to_csv(folder / "slimpajama/runs_2.7B.csv", index=False)
    (folder / "slimpajama/runs_other.csv").write_text("weight_a,a_loss\n1,2\n")
    return folder


@pytest.fixture(scope="module")
def fits(folder):
    return fit_all(read_runs(folder))


def test_sizes_are_read_from_all_tables_and_what_is_missing_is_named(folder, capsys):
    runs = read_runs(folder)
    assert [(each.size, each.tokens, len(each.losses), each.total) for each in runs] == [
        (122e6, 20e9, RUNS, RUNS),
        (2.7e9, 104e9, LARGER_RUNS - 1, LARGER_RUNS),
    ]
    losses = true_losses(runs[0].mixtures.to_numpy(), 122e6) + 1e9 / 20e9
    np.testing.assert_allclose(runs[0].losses, losses, atol=1e-4)
    lines = capsys.readouterr().out.splitlines()
    assert any("runs_other.csv" in line for line in lines)
    assert any("regmix/" in line for line in lines)


def test_predictions_for_the_papers_mixtures_are_near_the_known_losses(fits):
    runs, surrogate = fits[0]
    mixtures = paper_mixtures(paper_settings()["slimpajama-684m"], runs)
    # The runs have no weights as small as some of DoReMi's and RegMix's.
    mixtures = mixtures.loc[["uniform", "chameleon", "doge"]]
    changes, half = predicted_changes(runs, surrogate, mixtures)
    losses = true_losses(mixtures.to_numpy(), runs.size)
    expected = losses - losses[0]
    np.testing.assert_allclose(changes[list(runs.losses)], expected, atol=0.01)
    np.testing.assert_allclose(changes[MEAN], expected[:, :7].mean(axis=1), atol=0.005)
    assert (half.iloc[1:] > 0).all(axis=None)
    assert (half.iloc[0] == 0).all()


def test_the_choice_from_smaller_runs_is_priced_by_measured_losses(fits):
    (source, surrogate), (runs, own) = fits
    rows = {row["target"]: row for row in choices_at(source, surrogate, runs, own)}
    assert list(rows) == [MEAN, "openhermes", *runs.domains]
    distances = np.abs(runs.mixtures - 1 / 7).sum(axis=1)
    near = runs.losses["openhermes"][distances.argmin()]
    row = rows["openhermes"]
    # The order of the mixtures is the same at both sizes, and there is no noise.
    assert row["regret"] == 0
    assert row["gain"] == pytest.approx(near - runs.losses["openhermes"].min())
    assert row["trained at both sizes"] == LARGER_RUNS - 1
    assert row["rank correlation"][0] > 0.98
    assert row["cross-validated"][0] > 0.9
    assert row["cross-validated"][1] < row["cross-validated"][0] < row["cross-validated"][2]


def test_published_runs_predict_the_paper_and_a_target_at_a_larger_size():
    all_runs = read_runs(public_results("slimpajama").parent)
    of_slimpajama = [runs for runs in all_runs if runs.corpus == "SlimPajama"]
    small, large = fit_all([of_slimpajama[0], of_slimpajama[-1]])
    row = public_runs.agreement(paper_settings()["slimpajama-684m"], *large)
    assert row["rank correlation"][0] > 0.95
    assert row["rank correlation"][0] > row["rank correlation of -log(weight)"]
    rows = {row["target"]: row for row in choices_at(*small, *large)}
    assert rows["openhermes"]["gain"] > 0.01
    assert rows["openhermes"]["regret"] < 0.01
    assert abs(rows[MEAN]["gain"]) < 0.01
    mixtures = paper_mixtures(paper_settings()["slimpajama-684m"], large[0])
    changes, half = predicted_changes(*large, mixtures)
    assert changes.loc["chameleon", "openhermes"] < -half.loc["chameleon", "openhermes"]
    assert abs(changes.loc["chameleon", MEAN]) < 0.01
