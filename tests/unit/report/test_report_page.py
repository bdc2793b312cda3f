from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.figures import weight_series
from megatron_chameleon.report.page import load_report, make_report
from megatron_chameleon.report.run_folder import RunFolder
from tests.unit.report.report_samples import NAMES, write_corpus, write_run_folder, write_sweep

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ["affinity", "loss", "weights"]
PAGES = ["report.html", "report_files.json", "tables", "tables.md"]
FILES = sorted([*PAGES, *(f"{name}.{kind}" for name in PICTURES for kind in ("png", "pdf"))])


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
        timeout=280,
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a report that was made once, and what was printed."""
    root = write_run_folder(tmp_path_factory.mktemp("made") / "run")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report = make_report(root)
    assert report == root / "7-report"
    return report, printed.getvalue()


def test_the_report_writes_and_prints_everything(made):
    report, printed = made
    assert files_in(report) == FILES
    for title in ("Held-out perplexity", "Weights for pretraining and fine-tuning", "Cost"):
        assert title in printed
    for name in ("tables.md", "tables", *(f"{name}.png and .pdf" for name in PICTURES)):
        assert str(report / name) in printed
    assert str(report / "report.html") in printed.splitlines()[-1]
    for name in PICTURES:
        image = imread(report / f"{name}.png")
        assert min(image.shape[:2]) > 200
        assert image[..., :3].std() > 0.05
        assert (report / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
    listed = json.loads((report / "report_files.json").read_text())["files"]
    there = [p.relative_to(report).as_posix() for p in report.rglob("*") if p.is_file()]
    assert sorted([*listed, "report_files.json"]) == sorted(there)


def test_every_table_is_a_csv_file(made):
    folder, printed = made[0] / "tables", made[1]
    names = ["held-out-perplexity", "held-out-loss", "cost", "evaluated-runs"]
    names += ["weights-for-pretraining-and-fine-tuning", "cost-to-obtain-each-mixture"]
    assert files_in(folder) == sorted(f"{name}.csv" for name in names)
    with (folder / "held-out-perplexity.csv").open(encoding="utf-8", newline="") as stream:
        lines = list(csv.reader(stream))
    (row,) = [line for line in printed.splitlines() if line.startswith("average")]
    (average,) = [line for line in lines if line[0] == "average"]
    assert [cell for cell in average[1:] if cell] == row.replace("*", "").split()[1:]
    assert [line[0] for line in lines[1:4]] == NAMES


def test_in_another_folder_the_files_are_equal_to_the_byte(made, tmp_path):
    there = tmp_path / "there"
    assert make_report(made[0].parent, output=there) == there
    assert files_in(there) == FILES
    for path in there.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (made[0] / path.relative_to(there)).read_bytes(), path


def test_several_run_folders_are_one_report(made, tmp_path):
    other = write_run_folder(tmp_path / "other", seed=3)
    there = make_report(made[0].parent, other, output=tmp_path / "both")
    text = (there / "tables.md").read_text(encoding="utf-8")
    assert text.startswith("# run + other\n")
    assert f"- run folders: {made[0].parent}, {other}\n" in text.replace("\\", "")
    for name in ("uniform-seed1 (run)", "uniform-seed1 (other)"):
        assert name in text
    assert not (other / "7-report").exists()


def test_signs_that_pictures_lack_are_told_once(tmp_path, capsys, recwarn):
    root = write_run_folder(tmp_path / "run", ["日本語", "plain"])
    make_report(root)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no font" in line]
    assert "日 本 語" in line
    assert not [w for w in recwarn if "missing from font" in str(w.message)]


def test_the_markdown_holds_the_printed_numbers(made):
    text, printed = (made[0] / "tables.md").read_text(encoding="utf-8"), made[1]
    assert text.startswith("# run\n")
    assert "| a\\|b\\_\\<x\\> |" in text
    assert "\n## Held-out perplexity\n\n" in text
    assert "![Training loss](loss.png)" in text
    (line,) = [line for line in printed.splitlines() if line.startswith("average")]
    for figure in line.split()[1:]:
        assert figure.strip("*") in text
    (row,) = [line for line in text.splitlines() if line.startswith("| average")]
    assert row.count("**") == 2


def test_a_folder_that_is_given_twice_counts_once(made, tmp_path):
    run = made[0].parent
    (tmp_path / "link").symlink_to(run)
    there = make_report(run, tmp_path / "link", run / ".." / "run", output=tmp_path / "there")
    for name in ("report.html", "tables.md"):
        assert (there / name).read_bytes() == (made[0] / name).read_bytes()


def test_folders_of_one_name_are_told_apart_in_the_title(made, tmp_path):
    roots = [write_run_folder(tmp_path / parent / "run", seed=3) for parent in ("x", "y")]
    report = load_report((*roots, roots[0]))
    assert report.title == "x/run + y/run"
    assert dict(report.sections[-1].facts)["run folders"] == f"{roots[0]}, {roots[1]}"


def test_a_report_is_replaced_and_a_picture_without_data_removed(root, capsys):
    make_report(root)
    before = (root / "7-report/tables.md").read_text(encoding="utf-8")
    for path in (root / "4-mixture").iterdir():
        path.unlink()
    make_report(root)
    assert files_in(root / "7-report") == sorted([*PAGES, "loss.pdf", "loss.png"])
    assert "weights-for-pretraining-and-fine-tuning.csv" not in files_in(root / "7-report/tables")
    after = (root / "7-report/tables.md").read_text(encoding="utf-8")
    assert "affinity.png" in before
    assert "affinity.png" not in after
    assert "left out: no mixture in 4-mixture" in capsys.readouterr().out


def test_pictures_of_the_users_own_are_left_alone(tmp_path):
    root, own = write_run_folder(tmp_path / "run"), tmp_path / "mypics"
    for path in (root / "5-base", root / "2-proxy"):
        shutil.rmtree(path)
    own.mkdir()
    (own / "loss.png").write_bytes(b"mine")
    make_report(root, output=own)
    assert (own / "report.html").is_file()
    assert (own / "loss.png").read_bytes() == b"mine"


def test_a_sweep_is_shown_where_there_is_one(root, capsys):
    mixtures = [Mixture.uniform(NAMES), Mixture(dict(zip(NAMES, (0.5, 0.3, 0.2), strict=True)))]
    write_sweep(root, {"ridge": mixtures})
    report = make_report(root)
    assert files_in(report) == sorted([*FILES, "stability.pdf", "stability.png"])
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
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "affinity": [[1.0, 0.0], [0.0, 1.0]]}))
    with pytest.raises(UserError, match="affinity"):
        make_report(root)
    assert not (root / "7-report").exists()


def test_the_bar_chart_takes_pretraining_first_and_leaves_uniform_out(root):
    Mixture.uniform(NAMES).save(root / "4-mixture/uniform.json")
    assert list(weight_series(RunFolder.load(root))) == ["pretraining", "fine-tuning"]
    Mixture({"code": 1.0}, parameters={"mode": "pretrain"}).save(root / "4-mixture/other.json")
    series = list(weight_series(RunFolder.load(root)))
    assert series == ["chameleon-pretrain", "other", "fine-tuning"]


def test_the_tool_reports_a_run_folder(root):
    done = run_python("tools/make_report.py", root, "--baseline", "chameleon-pretrain-seed1")
    assert done.returncode == 0, done.stderr
    assert "domains better than Chameleon" in done.stdout
    assert files_in(root / "7-report") == FILES


def test_the_tool_refuses_in_one_line(tmp_path):
    write_corpus(tmp_path / "1-corpus", NAMES)
    done = run_python("tools/make_report.py", tmp_path, "--baseline", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
