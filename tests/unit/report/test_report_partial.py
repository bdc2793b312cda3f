"""Reports of run folders in which no perplexity was evaluated: what there is, and what is not."""

from __future__ import annotations

import shutil

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.report.page import NOT_EVALUATED, Report, make_report, report_of
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.downstream_samples import downstream, save
from tests.unit.report.report_samples import NAMES, write_run_folder

UNIFORM, CHAMELEON = "uniform-seed1", "chameleon-pretrain-seed1"
STAGES = ("1-corpus", "2-proxy", "3-embeddings", "4-mixture", "5-base", "6-evaluation")
# In the order of the paper's columns.
RED_PAJAMA = ["Arxiv", "Book", "C4", "CC", "GitHub", "StackExchange", "Wikipedia"]
EVALUATED = {"Held-out perplexity", "Held-out loss", "Bits per byte", "Evaluated runs"}


def make_folder(root, *kept, names=NAMES):
    """A run folder of these stages alone."""
    write_run_folder(root, names)
    for stage in set(STAGES) - set(kept):
        shutil.rmtree(root / stage)
    return root


def read(root, baseline=None) -> Report:
    return report_of(RunFolder.load(root), [root], "title", baseline)


def titles(report: Report) -> list[str]:
    return [table.title for table in report.tables]


@pytest.mark.parametrize(
    ("stages", "there"),
    [
        (["1-corpus"], {"cost", "origins"}),
        (["4-mixture"], {"weights", "cost", "affinity", "origins"}),
        (["5-base"], {"cost", "curves", "origins"}),
        (["1-corpus", "2-proxy", "4-mixture", "5-base"], {"weights", "curves", "affinity"}),
    ],
)
def test_a_folder_gets_a_report_of_what_it_has(tmp_path, stages, there):
    report = read(make_folder(tmp_path, *stages))
    assert there <= {section.name for section in report.sections}
    assert not {"result", "loss", "bits-per-byte"} & {section.name for section in report.sections}
    assert not EVALUATED & set(titles(report))
    assert not report.findings
    assert report.caveats == [NOT_EVALUATED]


def test_the_files_are_written_and_what_is_missing_is_printed(tmp_path, capsys):
    root = make_folder(tmp_path / "run", "4-mixture")
    there = make_report(root)
    assert "tools/evaluate.py perplexity" in (there / "report.html").read_text(encoding="utf-8")
    printed = " ".join(capsys.readouterr().out.split())
    assert NOT_EVALUATED in printed
    assert "Weights for pretraining and fine-tuning" in printed
    assert (there / "weights.png").is_file()


def test_runs_without_evaluations_are_listed_where_they_come_from(tmp_path):
    report = read(make_folder(tmp_path, "5-base"))
    (table,) = [table for table in report.tables if table.title == "Base runs"]
    assert [list(row) for row in table.rows] == [
        [CHAMELEON, "Chameleon", "chameleon-pretrain", "1,000,000", "102,400", "200", "finished"],
        [UNIFORM, "Uniform", "uniform", "1,000,000", "102,400", "200", "finished"],
    ]


def test_downstream_results_alone_are_compared_with_the_baseline_asked(tmp_path):
    root = make_folder(tmp_path)
    (root / "6-evaluation").mkdir()
    for name, accuracy in ((UNIFORM, 0.5), (CHAMELEON, 0.6)):
        save(root, name, downstream({"sciq": {0: accuracy, 1: accuracy}}))
    for baseline in (UNIFORM, CHAMELEON):
        report = read(root, baseline)
        (section,) = [section for section in report.sections if section.name == "downstream"]
        assert section.tables[0].header[1] == baseline
    with pytest.raises(UserError, match=rf"--baseline x: .* choose from {CHAMELEON}, {UNIFORM}"):
        read(root, "x")


def test_a_baseline_is_refused_where_nothing_has_a_result(tmp_path):
    root = make_folder(tmp_path / "run", "4-mixture", "5-base")
    with pytest.raises(UserError, match=f"--baseline {UNIFORM}: .* has no result of it"):
        make_report(root, baseline=UNIFORM)
    assert not (root / "7-report").exists()


def test_the_papers_weights_and_cost_stand_beside_mixtures_alone(tmp_path):
    report = read(make_folder(tmp_path, "1-corpus", "4-mixture", names=RED_PAJAMA))
    (section,) = [section for section in report.sections if section.name == "paper"]
    weights, cost = section.tables
    assert {"chameleon-pretrain", "chameleon-finetune"} <= set(weights.header)
    assert "cost to obtain each mixture" in cost.title
    assert not any("perplexity" in title for title in titles(report))


def test_runs_of_another_model_than_the_papers_are_told_to_be(tmp_path):
    root = make_folder(tmp_path, "1-corpus", "5-base", names=RED_PAJAMA)
    (section,) = [section for section in read(root).sections if section.name == "paper"]
    (table,) = section.tables
    assert "different setting" in table.title
    assert [row[0] for row in table.rows] == ["model", "training tokens"]
