"""Tables of runs on many mixtures: the forms of RegMix and Olmix, and invalid tables."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import (
    MixtureRuns,
    MixtureRunsWarning,
    matched,
    read_losses,
    read_mixture_runs,
    write_mixture_runs,
)

REGMIX_RATIOS = """index,train_the_pile_arxiv,train_the_pile_pile_cc
1,0.25,0.75
2,0.5,0.5
3,1,0
"""
REGMIX_METRICS = """index,metric/the_pile_arxiv_val_loss,metric/the_pile_pile_cc_val_loss
3,3.5,5.5
1,4.5,5.0
2,4.0,5.25
"""
OLMIX_RATIOS = """run,name,index,dclm:science,dclm:sports
a1,first,0,0.4,0.6
b2,second,1,0.7,0.3
"""
OLMIX_METRICS = """run,name,index,arc_bpb,mmlu_bpb
b2,second,0,1.1,1.4
a1,first,1,1.0,1.5
"""


@pytest.fixture
def read(tmp_path):
    """Return ``read(ratios, metrics)``, which reads two tables from their text."""

    def make(ratios=REGMIX_RATIOS, metrics=REGMIX_METRICS):
        (tmp_path / "ratios.csv").write_text(ratios)
        (tmp_path / "metrics.csv").write_text(metrics)
        return read_mixture_runs(tmp_path / "ratios.csv", tmp_path / "metrics.csv")

    return make


pytestmark = pytest.mark.filterwarnings("error")


def test_tables_are_matched_by_run_name(read):
    runs = read()
    assert (runs.keys, runs.domains) == (["1", "2", "3"], ["arxiv", "pile_cc"])
    assert runs.metrics == runs.domains
    np.testing.assert_array_equal(runs.mixtures, [[0.25, 0.75], [0.5, 0.5], [1, 0]])
    np.testing.assert_array_equal(runs.losses, [[4.5, 5.0], [4.0, 5.25], [3.5, 5.5]])
    runs = read(OLMIX_RATIOS, OLMIX_METRICS)
    assert (runs.keys, runs.metrics) == (["a1", "b2"], ["arc_bpb", "mmlu_bpb"])
    assert runs.domains == ["dclm:science", "dclm:sports"]
    np.testing.assert_array_equal(runs.losses, [[1.0, 1.5], [1.1, 1.4]])


def test_written_tables_are_read_without_change(tmp_path):
    rng = np.random.default_rng(0)
    runs = MixtureRuns(
        keys=["0", "1", "4"],
        domains=["news", "c++", "my code, old"],
        mixtures=rng.dirichlet(np.ones(3), 3),
        metrics=["news", "c++"],
        losses=rng.uniform(2, 4, (3, 2)),
    )
    ratios, metrics = tmp_path / "ratios.csv", tmp_path / "metrics.csv"
    write_mixture_runs(runs, ratios, metrics)
    assert ratios.read_text().startswith('index,train_news,train_c++,"train_my code, old"\n0,')
    assert metrics.read_text().startswith("index,valid_news,valid_c++\n0,")
    found = read_mixture_runs(ratios, metrics)
    assert found.domain_columns == ["train_news", "train_c++", "train_my code, old"]
    assert found.metric_columns == ["valid_news", "valid_c++"]
    assert (found.keys, found.domains, found.metrics) == (runs.keys, runs.domains, runs.metrics)
    np.testing.assert_allclose(found.mixtures, runs.mixtures, rtol=1e-15)
    np.testing.assert_array_equal(found.losses, runs.losses)


def test_an_affix_of_some_columns_belongs_to_their_names(read):
    header = "index,train_x,train_test_x,train_notes_train\n"
    runs = read(header + "1,0.5,0.3,0.2\n", "index,x_loss,test_x_loss\n1,4.0,5.0\n")
    assert runs.domains == ["x", "test_x", "notes_train"]
    assert runs.metrics == ["x", "test_x"]
    assert matched(runs.domains, ["notes_train", "test_x", "x"]) == {n: n for n in runs.domains}


def test_incomplete_runs_and_metrics_are_left_out(read):
    with pytest.warns(MixtureRunsWarning, match=r"ratios.csv: .*: leaving out 1: 4$"):
        assert read(REGMIX_RATIOS + "4,0.5,0.5\n").keys == ["1", "2", "3"]
    for value in ("NaN", "", "inf"):
        with pytest.warns(MixtureRunsWarning, match="runs lack a metric: leaving out 1: 2$"):
            runs = read(metrics=REGMIX_METRICS.replace("5.25", value))
        assert runs.keys == ["1", "3"]
        assert np.isfinite(runs.losses).all()
    header, *lines = REGMIX_METRICS.splitlines()
    table = "\n".join([header + ",extra", *(line + "," for line in lines)])
    with pytest.warns(MixtureRunsWarning, match="no number in columns: leaving out 1: extra$"):
        assert read(metrics=table).losses.shape == (3, 2)
    with pytest.warns(MixtureRunsWarning, match=r"1 runs sum to 1 only within 0.004"):
        runs = read(REGMIX_RATIOS.replace("0.25,", "0.254,"))
    np.testing.assert_allclose(runs.mixtures[0], np.array([0.254, 0.75]) / 1.004, rtol=1e-15)


@pytest.mark.parametrize(
    ("ratios", "metrics", "problem"),
    [
        (REGMIX_RATIOS.replace("0.25", "0.35"), None, r"run '1': the shares sum to 1.1, not 1"),
        (None, REGMIX_METRICS.replace("5.25", "good"), r"metric/the_pile.*'good'"),
        (REGMIX_RATIOS + "2,0.5,0.5\n", None, r"ratios.csv: run '2' is repeated"),
        (
            REGMIX_RATIOS + "4,0.5,0.25,0.25\n",
            None,
            r"starts with '4' has 4 values",
        ),
        (REGMIX_RATIOS.replace("index", "number"), None, r"share no column"),
        (OLMIX_RATIOS.replace("a1", "x").replace("b2", "y"), OLMIX_METRICS, r"no run in common"),
        (None, "index,a,b\n1,2.0,\n2,,2.0\n3,,2.0\n", "has a number for all metrics"),
        (None, "index,a,b\n1,2.0,1e308\n2,2.0,2.0\n", r"run '1': 1e\+308 of b is too large"),
        ("index,a,b\n1,0,0\n2,0.5,0.5\n", None, r"run '1': the shares sum to 0, not 1"),
        ("index,a,a\n1,0.5,0.5\n2,0.5,0.5\n", None, r"column 'a' is repeated"),
    ],
)
def test_invalid_tables_are_rejected_in_one_line(read, ratios, metrics, problem):
    warnings.simplefilter("ignore", MixtureRunsWarning)
    with pytest.raises(UserError, match=problem) as rejected:
        read(REGMIX_RATIOS if ratios is None else ratios, metrics or REGMIX_METRICS)
    assert "\n" not in str(rejected.value)


@pytest.mark.parametrize("name", ["ratios.csv", "metrics.csv"])
def test_tables_are_replaced_together_or_not_at_all(read, tmp_path, name):
    runs, written = read(), {"ratios.csv": tmp_path / "r.csv", "metrics.csv": tmp_path / "m.csv"}
    for path in written.values():
        path.write_text("before")
    written[name].unlink()
    written[name].mkdir()
    with pytest.raises(UserError, match="is a folder"):
        write_mixture_runs(runs, *written.values())
    assert [path.read_text() for path in written.values() if path.is_file()] == ["before"]


def test_names_are_matched_to_domains():
    found = matched(["ArXiv", "pile-cc"], ["arxiv", "pile_cc"])
    assert found == {"ArXiv": "arxiv", "pile-cc": "pile_cc"}
    assert matched(["a", "b"], ["pile_a", "pile_b", "pile_c"]) == {"a": "pile_a", "b": "pile_b"}
    assert matched(["news", "mmlu"], ["news", "code"]) == {"news": "news"}


@pytest.mark.parametrize("column", ["train/ai/loss", "training_ai"])
def test_a_training_loss_of_a_domain_whose_name_is_part_of_train_is_rejected(tmp_path, column):
    table = tmp_path / "runs.csv"
    table.write_text(f"Name,{column},eval/b/loss\nr-00000,1,2\n")
    with pytest.raises(UserError, match="is a training loss"):
        read_losses(table, ["ai", "b"], {})
