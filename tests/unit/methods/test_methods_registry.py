"""What tools/compute_mixture.py knows of the methods, and how one more gets there."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon import methods
from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.published.columns import published_columns
from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.common.registry import find_methods, methods_listed

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/compute_mixture.py"
NAMES = list(find_methods())


@pytest.fixture
def tool(monkeypatch, capsys):
    """``tool(*argv)``: exit status, output and errors of tools/compute_mixture.py, run as it is."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, argv)])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(TOOL), run_name="__main__")
        said = capsys.readouterr()
        return left.value.code, said.out, said.err

    return run


@pytest.fixture
def add_method(tmp_path, monkeypatch):
    """``add_method(source, file_name)`` puts one more file where methods are looked for."""
    folder = tmp_path / "more methods"
    folder.mkdir()
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])

    def add(source, file_name):
        (folder / file_name).write_text(source)
        module = file_name.removesuffix(".py")
        monkeypatch.setitem(sys.modules, f"{methods.__name__}.{module}", None)
        monkeypatch.delitem(sys.modules, f"{methods.__name__}.{module}")

    return add


def example_of_contributing() -> tuple[str, str]:
    """The name and the text of the file that CONTRIBUTING.md adds."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## A new method\n")[2]
    section = section.partition("\n## ")[0]
    name = re.search(r"`(\w+\.py)`", section)
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert name is not None
    assert block is not None
    return name[1], block[1]


def test_chameleon_is_first_and_the_others_follow_by_name():
    assert NAMES[0] == "chameleon"
    assert NAMES[1:] == sorted(NAMES[1:])
    assert {"uniform", "natural", "unimax", "manual"} <= set(NAMES)


def test_chameleon_stays_first_whatever_the_others_are_called(add_method):
    source = example_of_contributing()[1].replace('name="longest-name"', 'name="a-name"')
    add_method(source, "a_name.py")
    assert list(find_methods())[:2] == ["chameleon", "a-name"]


def test_every_method_says_what_it_needs_costs_and_is_good_for(tool):
    status, said, errors = tool("--list-methods")
    assert (status, errors) == (0, "")
    entries = dict(re.findall(r"^([\w-]+): (.*?)(?=\n\n)", said, re.MULTILINE | re.DOTALL))
    assert list(entries) == NAMES
    for entry in entries.values():
        headings = re.findall(r"^  (\w+(?: \w+)?)  +\S", entry, re.MULTILINE)
        assert headings in (["needs", "cost", "good for", "source"], ["needs", "cost", "good for"])
    assert max(map(len, said.splitlines())) <= 100
    assert said.rstrip().endswith("--method NAME --help shows the flags of one of them.")


def test_long_texts_are_broken_under_their_beginning():
    lines = methods_listed(width=40).splitlines()
    below = [line for line in lines if line.startswith(" " * 12)]
    assert below
    texts = [line for line in lines if line.startswith("  ")]
    assert max(map(len, texts)) <= 40


@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_flags_of_its_own_and_those_of_all(tool, name):
    status, said, _ = tool("--method", name, "--help")
    assert status == 0
    for flag in ("--corpus", "--output", "--token-budget", "--max-epochs"):
        assert re.search(rf"{flag}\b", said), flag
    assert f"compute_mixture.py --method {name}" in said


def test_flags_of_one_method_are_unknown_to_another(tool, corpus, tmp_path):
    common = ("--corpus", corpus.root, "--output", tmp_path / "o.json")
    status, _, errors = tool("--method", "uniform", *common, "--temperature", "2")
    assert status == 2
    assert "--temperature" in errors
    assert tool("--method", "natural", *common, "--temperature", "2")[0] == 0


def test_an_unknown_method_lists_those_there_are(tool):
    status, _, errors = tool("--method", "magic")
    assert status == 2
    assert errors.startswith("error: --method magic: there is none of that name")
    assert all(name in errors for name in NAMES)
    assert len(errors.splitlines()) == 1


def test_a_method_is_added_by_one_file(tool, add_method, corpus, tmp_path):
    """The very text that CONTRIBUTING.md shows."""
    file_name, source = example_of_contributing()
    assert len(list(filter(None, source.splitlines()))) <= 20
    add_method(source, file_name)
    assert "longest-name: long names first" in tool("--list-methods")[1]
    output = tmp_path / "mixture.json"
    argv = ("--method", "longest-name", "--corpus", corpus.root, "--output", output)
    status, said, errors = tool(*argv, "--power", "2", "--token-budget", "1000")
    assert (status, errors) == (0, "")
    assert f"written to {output}; next: " in said
    mixture = Mixture.load(output)
    assert mixture.method == "longest-name"
    assert mixture.weights == pytest.approx({"news": 16 / 57, "code": 16 / 57, "poems": 25 / 57})
    assert mixture.epochs is not None
    assert set(mixture.epochs) == {"news", "code", "poems"}
    assert "Weights are proportional to length^power" in tool(*argv[:2], "--help")[1]


def test_a_file_whose_name_is_taken_is_no_silent_replacement(tool, add_method):
    source = example_of_contributing()[1].replace('name="longest-name"', 'name="uniform"')
    add_method(source, "zz_second.py")
    status, _, errors = tool("--method", "uniform", "--corpus", "c", "--output", "o.json")
    assert status == 2
    assert len(errors.splitlines()) == 1
    told = "uniform.py and zz_second.py are both called 'uniform': give each a name of its own"
    assert told in errors
    assert told in " ".join(tool("--list-methods")[1].split())
    assert tool("--method", "natural", "--help")[0] == 0


BROKEN = {
    "import": ("import lost_library\n", "ModuleNotFoundError: No module named 'lost_library'"),
    "syntax": ("METHOD = (\n", "SyntaxError: '(' was never closed"),
    "name": ("x = 1\nMETHOD = Method()\n", "NameError: name 'Method' is not defined (line 2)"),
    "without": ('"""Notes."""\n', "it has no METHOD = Method(...)"),
    "other": ("METHOD = 'mine'\n", "it has no METHOD = Method(...)"),
}


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_method_is_named_and_disables_no_other(
    tool, add_method, corpus, tmp_path, source, problem
):
    add_method(source, "mine.py")
    status, said, errors = tool("--list-methods")
    assert (status, errors) == (0, "")
    assert "not usable: mine.py" in said
    assert problem in " ".join(said.split())
    assert all(f"\n{name}: " in f"\n{said}" for name in NAMES)
    argv = ("--corpus", corpus.root, "--output", tmp_path / "o.json")
    assert tool("--method", "uniform", *argv)[::2] == (0, "")
    status, _, errors = tool("--method", "mine", *argv)
    assert status == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("error: --method mine: there is none of that name")
    assert "; mine.py " in errors
    assert problem in errors


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--method", "uniform", "--method", "natural"), "is given 2 times (uniform, natural)"),
        (("--method=uniform", "--corpus", "c", "--method=uniform"), "is given 2 times"),
        (("--corpus", "c", "--method"), "--method has no value: give it one of chameleon, doge"),
        (("--method", "--corpus", "c"), "--method has no value"),
        (("--method=", "--corpus", "c"), "--method has no value"),
        (("--method", "uniform", "--method"), "--method has no value"),
    ],
)
def test_one_method_is_chosen(tool, argv, problem):
    status, said, errors = tool(*argv)
    assert (status, said) == (2, "")
    assert problem in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("started_by", ["python", "torchrun"])
def test_a_method_that_was_asked_to_stop_says_so_by_its_status(
    tool, add_method, monkeypatch, corpus, tmp_path, started_by
):
    """But for torchrun, which would call it a failure, with a traceback and a status of its own."""
    source = example_of_contributing()[1]
    stopped = "    return 75\n    from megatron_chameleon.methods.common.model_free"
    source = source.replace("    from megatron_chameleon.methods.common.model_free", stopped)
    add_method(source, "longest_name.py")
    if started_by == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    output = tmp_path / "o.json"
    argv = ("--method", "longest-name", "--corpus", corpus.root, "--output", output)
    assert tool(*argv)[0] == (STOPPED_STATUS if started_by == "python" else 0)
    assert not output.exists()


def test_what_needs_nothing_says_so_in_the_same_words():
    """What a listing says of each is read one beside the other."""
    for method in find_methods().values():
        assert not method.needs.startswith("nothing") or method.needs.startswith(
            "nothing beside the corpus"
        ), method.name


def test_no_method_imports_torch_before_it_runs():
    """So that --help and --list-methods answer at once."""
    command = "import sys; from megatron_chameleon.methods.common.registry import find_methods as f"
    command += "; f(); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", command], check=True, env=environment, cwd=ROOT)


def test_the_overview_has_a_row_for_every_method_and_its_links_lead_somewhere():
    page = ROOT / "docs/methods/index.md"
    text = page.read_text()
    rows = re.findall(r"^\| (?:\[)?`([\w-]+)`", text, re.MULTILINE)
    assert sorted(set(rows) - {"--method"}) == sorted(NAMES)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert len(links) > 5
    assert [link for link in links if not (page.parent / link).is_file()] == []


def test_every_column_that_the_overview_names_is_there():
    text = (ROOT / "docs/methods/index.md").read_text()
    names = re.findall(r"\b(?:slimpajama|pile|wiki40b|stack)/[a-z][\w-]*", text)
    assert names
    assert set(names) <= set(published_columns())
