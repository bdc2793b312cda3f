from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.page import make_report, weight_series
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.report_samples import NAMES, write_corpus, write_run_folder, write_sweep

ROOT = Path(__file__).resolve().parents[3]
FILES = ["affinity.png", "loss.png", "tables.md", "weights.png"]


@pytest.fixture
def root(tmp_path):
    return write_run_folder(tmp_path / "run")


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def run_python(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_report_writes_and_prints_everything(root, capsys):
    report = make_report(root)
    assert report == root / "7-report"
    assert files_in(report) == FILES
    printed = capsys.readouterr().out
    for title in ("Held-out perplexity", "Weights for pretraining and fine-tuning", "Cost"):
        assert title in printed
    for name in FILES:
        assert str(report / name) in printed
    for name in FILES[:2] + FILES[3:]:
        image = imread(report / name)
        assert min(image.shape[:2]) > 200
        assert image[..., :3].std() > 0.05


def test_the_markdown_holds_the_printed_numbers(root, capsys):
    text = (make_report(root) / "tables.md").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert text.startswith("# run\n")
    assert "| a\\|b\\_\\<x\\> |" in text
    assert "![Training loss](loss.png)" in text
    (line,) = [line for line in printed.splitlines() if line.startswith("average")]
    for figure in line.split()[1:]:
        assert figure.strip("*") in text
    (row,) = [line for line in text.splitlines() if line.startswith("| average")]
    assert row.count("**") == 2


def test_without_evaluations_nothing_is_written(root):
    for path in (root / "6-evaluation").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="6-evaluation holds no evaluation"):
        make_report(root)
    assert not (root / "7-report").exists()


def test_a_report_is_replaced_and_a_picture_without_data_removed(root, capsys):
    make_report(root)
    before = (root / "7-report/tables.md").read_text(encoding="utf-8")
    for path in (root / "4-mixture").iterdir():
        path.unlink()
    make_report(root)
    assert files_in(root / "7-report") == ["loss.png", "tables.md"]
    after = (root / "7-report/tables.md").read_text(encoding="utf-8")
    assert "affinity.png" in before
    assert "affinity.png" not in after
    assert "not drawn: no mixture in 4-mixture" in capsys.readouterr().out


def test_a_sweep_is_shown_where_there_is_one(root, capsys):
    mixtures = [Mixture.uniform(NAMES), Mixture(dict(zip(NAMES, (0.5, 0.3, 0.2), strict=True)))]
    write_sweep(root, {"ridge": mixtures})
    report = make_report(root)
    assert files_in(report) == sorted([*FILES, "stability.png"])
    text = (report / "tables.md").read_text(encoding="utf-8")
    assert "## Weights over ridge" in text
    assert "| a\\|b\\_\\<x\\> | 0.3333 | 0.3000 | 0.0333 |" in text
    assert "![Stability of the weights](stability.png)" in text
    assert "Weights over ridge" in capsys.readouterr().out
    mixtures[1].save(root / "4-mixture/sweep/ridge-1.json")
    with pytest.raises(UserError, match=r"ridge-1\.json has changed since"):
        make_report(root)


def test_an_affinity_of_the_wrong_size_is_told(root):
    path = root / "4-mixture/chameleon-pretrain.json"
    dataclasses.replace(Mixture.load(path), affinity=[[1.0, 0.0], [0.0, 1.0]]).save(path)
    with pytest.raises(UserError, match="field affinity is not 3 x 3"):
        make_report(root)
    assert not (root / "7-report").exists()


def test_the_bar_chart_takes_pretraining_first_and_leaves_uniform_out(root):
    Mixture.uniform(NAMES).save(root / "4-mixture/uniform.json")
    assert list(weight_series(RunFolder.load(root))) == ["pretraining", "fine-tuning"]
    Mixture({"code": 1.0}, parameters={"mode": "pretrain"}).save(root / "4-mixture/other.json")
    series = list(weight_series(RunFolder.load(root)))
    assert series == ["chameleon-pretrain", "other", "fine-tuning"]


def test_pyplot_is_not_used(root):
    done = run_python(
        "-c",
        "import sys; from pathlib import Path; from megatron_chameleon.report.page import *; "
        f"make_report(Path({str(root)!r})); print('matplotlib.pyplot' in sys.modules)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_matplotlib_missing_is_told_with_the_extra(root):
    done = run_python(
        "-c",
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from megatron_chameleon.cli import run_tool\n"
        "from megatron_chameleon.options.report import ReportOptions\n"
        "from megatron_chameleon.report.page import make_report\n"
        f"run_tool(lambda o: make_report(o.run) and None, ReportOptions, [{str(root)!r}])",
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'megatron_chameleon[plots]'" in done.stderr
    assert not (root / "7-report").exists()


def test_the_tool_reports_a_run_folder(root):
    done = run_python("tools/make_report.py", root, "--baseline", "chameleon-pretrain-seed1")
    assert done.returncode == 0, done.stderr
    assert "domains better than Chameleon" in done.stdout
    assert files_in(root / "7-report") == FILES


def test_the_tool_refuses_in_one_line(tmp_path):
    write_corpus(tmp_path / "1-corpus", NAMES)
    done = run_python("tools/make_report.py", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
