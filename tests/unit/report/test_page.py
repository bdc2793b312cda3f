"""The report's files and page: complete, reproducible, and safe with hostile names."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import (
    MixtureRunsWarning,
    matched,
    read_mixture_runs,
    write_mixture_runs,
)
from megatron_chameleon.report.page import (
    LIST_NAME,
    NOT_EVALUATED,
    evaluated_runs,
    html_page,
    load_report,
    make_report,
    markdown_page,
    write_report,
)
from megatron_chameleon.report.run_folder import STAGES, RunFolder
from tests.unit.report.samples import (
    CHAMELEON,
    HOSTILE_NAMES,
    NAMES,
    TASKS,
    UNIFORM,
    save,
    write_full_folder,
    write_run_folder,
)

PICTURES = ["affinity", "loss", "weights"]
PAGES = ["report.html", "report_files.json", "tables", "tables.md"]
FILES = sorted([*PAGES, *(f"{name}.{kind}" for name in PICTURES for kind in ("png", "pdf"))])


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a report that is made once, and the text that was printed."""
    root = write_run_folder(tmp_path_factory.mktemp("made") / "run")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        report = make_report(root)
    assert report == root / "7-report"
    return report, printed.getvalue()


def test_the_report_writes_and_prints_everything(made):
    report, printed = made
    assert sorted(path.name for path in report.iterdir()) == FILES
    for text in ("Held-out perplexity", "Cost", "tables.md", "affinity.png and .pdf"):
        assert text in printed
    assert str(report / "report.html") in printed.splitlines()[-1]
    for name in PICTURES:
        assert imread(report / f"{name}.png")[..., :3].std() > 0.05
        assert (report / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
    listed = json.loads((report / "report_files.json").read_text())["files"]
    assert sorted([*listed, "report_files.json"]) == files_in(report)


def test_files_do_not_depend_on_the_output_folder(made, tmp_path):
    there = tmp_path / "there"
    assert make_report(made[0].parent, output=there) == there
    assert files_in(there) == files_in(made[0])
    for name in files_in(there):
        assert (there / name).read_bytes() == (made[0] / name).read_bytes(), name


def test_mixtures_and_losses_of_the_base_runs_are_tables_of_runs(tmp_path):
    """Also of a task with the name of a domain."""
    names, tasks = [*NAMES, "arc_easy"], ["arc_easy (task)", *TASKS[1:]]
    root = write_full_folder(tmp_path / "run", names)
    answers = DownstreamResult.load(root / f"6-evaluation/{UNIFORM}-downstream.json")
    del answers.tasks["piqa"]
    save(root, f"{UNIFORM}-downstream", answers)
    folder = RunFolder.load(root)
    runs = evaluated_runs(folder)
    assert runs is not None
    tables = tmp_path / "ratios.csv", tmp_path / "metrics.csv"
    write_mixture_runs(runs, *tables)
    with pytest.warns(MixtureRunsWarning, match="lack a metric"):
        read = read_mixture_runs(*tables)
    assert (read.keys, read.domains, read.metrics) == ([CHAMELEON], names, [*names, *tasks])
    assert matched(read.metrics, names) == {name: name for name in names}
    run, result = folder.base_runs[CHAMELEON], folder.evaluations[CHAMELEON]
    tokens = [run.domain_tokens[name].actual for name in names]
    np.testing.assert_allclose(read.mixtures[0], np.array(tokens) / sum(tokens))
    scores = folder.downstream[f"{CHAMELEON}-downstream"].tasks
    bits = [2 - scores[task].by_shots[0].accuracy for task in TASKS]
    expected = [*(result.domains[name].loss for name in names), *bits]
    np.testing.assert_allclose(read.losses[0], expected)


def elements_of(page: str) -> list[ElementTree.Element]:
    """Read a page as XML, in which no element may be left open and no attribute may occur twice."""
    assert "<!--" not in page
    closed = set(re.findall(r"<([\w-]+)[^>]*/>", page))
    assert closed <= {"g", "image", "path", "rect", "use"}  # HTML allows it only within SVG
    page = re.sub(r"(<meta [^>]*)>", r"\1/>", page.replace("xlink:", ""))
    page = page.replace(" hidden>", ' hidden="">')
    page = re.sub(r"<(script|style)>(.*?)</\1>", r"<\1><![CDATA[\2]]></\1>", page, flags=re.DOTALL)
    return list(ElementTree.fromstring(page).iter())


def test_several_run_folders_are_merged_into_one_report(made, tmp_path):
    other = write_run_folder(tmp_path / "other", seed=3)
    text = markdown_page(load_report((made[0].parent, other)))
    for name in ("uniform-seed1 (run)", "uniform-seed1 (other)"):
        assert name in text


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """The elements of a page with names that would break it if they were not escaped."""
    root = write_full_folder(tmp_path_factory.mktemp("page") / "<b>run & co", HOSTILE_NAMES)
    text = html_page(load_report((root,)))
    assert text.startswith("<!DOCTYPE html>\n")
    return elements_of(text)


def test_ids_are_unique_and_references_resolve(nodes):
    ids = [node.attrib["id"] for node in nodes if "id" in node.attrib]
    assert len(ids) == len(set(ids))
    values = [value for node in nodes for value in node.attrib.values()]
    pointed = {v[1:] for v in values if re.fullmatch("#[a-z][^;]*", v)}
    pointed |= {found for value in values for found in re.findall(r"url\(#(.*?)\)", value)}
    for node in nodes:
        for key in ("aria-labelledby", "aria-describedby"):
            pointed |= set(node.get(key, "").split())
    assert len(pointed) > 30
    assert pointed <= set(ids)


def test_only_the_script_of_the_page_runs_and_nothing_is_fetched(nodes):
    for node in nodes:
        assert node.tag not in ("iframe", "object", "embed", "link", "base", "form", "img")
        assert not [key for key in node.attrib if key.lower().startswith("on")], node
        for key, value in node.attrib.items():
            if key in ("href", "src", "srcset", "action", "data", "poster"):
                assert value.startswith(("#", "data:image/png;base64,", "data:text/csv")), value
            assert not re.match(r"\s*(https?|javascript|file):", value), (node.tag, key, value)
            assert not re.search(r"url\((?!#)", value)
    script, style = ("".join(n.text for n in nodes if n.tag == t) for t in ("script", "style"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (node for node in nodes if "http-equiv" in node.attrib)
    assert policy.get("http-equiv") == "Content-Security-Policy"
    rules = policy.attrib["content"].split("; ")
    assert rules[0] == "default-src 'none'"
    assert f"script-src 'sha256-{digest}'" in rules
    assert "img-src data:" in rules
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize(
    ("stages", "there"),
    [
        (["1-corpus"], {"cost", "origins"}),
        (["4-mixture"], {"weights", "cost", "affinity", "origins"}),
        (["5-base"], {"cost", "curves", "origins"}),
    ],
)
def test_a_run_folder_with_few_stages_gets_a_report(tmp_path, stages, there):
    root = write_run_folder(tmp_path / "run")
    for stage in STAGES:
        if stage not in stages:
            shutil.rmtree(root / stage)
    report = load_report((root,))
    assert {section.name for section in report.sections} == there
    assert report.caveats == [NOT_EVALUATED]


def test_files_of_an_earlier_report_are_removed_and_others_kept(tmp_path):
    folder = tmp_path / "report"
    write_report(folder, {"a.png": b"1", "tables/x.csv": b"2", "tables/y.csv": b"3"})
    (folder / "mine.csv").write_text("kept")
    (folder / "tables/mine.csv").write_text("kept")
    write_report(folder, {"a.png": b"4", "tables/x.csv": b"5"})
    expected = ["a.png", "mine.csv", LIST_NAME, "tables/mine.csv", "tables/x.csv"]
    assert files_in(folder) == sorted(expected)
    assert (folder / "a.png").read_bytes() == b"4"

    # A list that was edited by hand cannot make write_report delete files outside the report.
    (kept := tmp_path / "kept").write_text("kept")
    (folder / LIST_NAME).write_text(json.dumps({"files": ["a.png", "../kept", str(kept)]}))
    write_report(folder, {"a.png": b"6"})
    assert kept.read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "content"), [(LIST_NAME, ""), (LIST_NAME, '{"files": 3}'), ("a.png", "mine")]
)
def test_a_damaged_list_or_a_file_of_the_user_is_rejected_and_kept(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        write_report(tmp_path, {"b.png": b"1", "a.png": b"2"})
    assert files_in(tmp_path) == [name]
    assert (tmp_path / name).read_text() == content
