"""Discovery of methods, and the choice of one by tools/compute_mixture.py."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon import methods
from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.methods.options import ChosenDomainsOptions

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/compute_mixture.py"
NAMES = list(find_methods())


@pytest.fixture
def tool(monkeypatch, capsys):
    """``tool(*argv)``: exit status, stdout and stderr of tools/compute_mixture.py."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)

    def run(*argv):
        monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, argv)])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(TOOL), run_name="__main__")
        printed = capsys.readouterr()
        return left.value.code, printed.out, printed.err

    return run


@pytest.fixture
def add_method(tmp_path, monkeypatch):
    """``add_method(source, file_name)`` adds a file to the package of methods."""
    folder = tmp_path / "more methods"
    folder.mkdir()
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])

    def add(source, file_name):
        (folder / file_name).write_text(source)
        module = file_name.removesuffix(".py")
        monkeypatch.setitem(sys.modules, f"{methods.__name__}.{module}", None)
        monkeypatch.delitem(sys.modules, f"{methods.__name__}.{module}")

    return add


def contributing_example() -> tuple[str, str]:
    """File name and source of the example in CONTRIBUTING.md."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## A new method\n")[2]
    section = section.partition("\n## ")[0]
    name = re.search(r"`(\w+\.py)`", section)
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert name is not None
    assert block is not None
    return name[1], block[1]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--method magic", ", ".join(NAMES)),
        ("--method uniform --corpus c --output o.json --temperature 2", "--temperature"),
    ],
)
def test_a_mistake_is_one_line(tool, argv, named):
    status, printed, errors = tool(*argv.split())
    assert (status, printed, len(errors.splitlines())) == (2, "", 1)
    assert named in errors


def test_a_method_is_added_by_one_file(tool, add_method, corpus, tmp_path):
    """The example of CONTRIBUTING.md."""
    file_name, source = contributing_example()
    assert len(list(filter(None, source.splitlines()))) <= 20
    add_method(source, file_name)
    assert "longest-name: long names first" in tool("--list-methods")[1]
    output = tmp_path / "mixture.json"
    argv = ("--method", "longest-name", "--corpus", corpus.root, "--output", output)
    status, _, errors = tool(*argv, "--power", "2", "--token-budget", "1000")
    assert (status, errors) == (0, "")
    mixture = Mixture.load(output)
    assert mixture.method == "longest-name"
    assert mixture.weights == pytest.approx({"news": 16 / 57, "code": 16 / 57, "poems": 25 / 57})
    assert "Weights are proportional to length^power" in tool(*argv[:2], "--help")[1]


SHARED_CODE, PROXY_METHOD = re.findall(
    r"^```python\n(.*?)^```",
    (ROOT / "docs/methods/adding_a_method.md").read_text(),
    re.MULTILINE | re.DOTALL,
)


def test_the_example_of_shared_code_runs(corpus, tmp_path):
    options = ChosenDomainsOptions(
        corpus=corpus.root, output=tmp_path / "mixture.json", domains="news,poems"
    )
    exec(compile(SHARED_CODE, "adding_a_method.md", "exec"), {"options": options})
    tokens = corpus.train_tokens
    total = tokens["news"] + tokens["poems"]
    assert Mixture.load(options.output).weights == pytest.approx(
        {name: tokens[name] / total for name in ("news", "poems")}
    )


def test_the_example_of_a_method_with_a_proxy_runs(tool, add_method, corpus, tmp_path):
    add_method(PROXY_METHOD, "last_loss.py")
    output = tmp_path / "mixture.json"
    argv = ("--method", "last-loss", "--corpus", corpus.root, "--output", output)
    training = "--model nano --seq-length 32 --global-batch-size 6 --micro-batch-size 6"
    steps = "--train-iters 3 --lr-warmup-iters 0 --log-interval 1"
    status, _, errors = tool(*argv, *training.split(), *steps.split())
    assert status == 0, errors
    mixture, run = Mixture.load(output), TrainingRun.load(tmp_path / "mixture" / "proxy")
    losses = list(run.metrics())[-1]["domain_loss"]
    total = sum(losses.values())
    assert mixture.weights == pytest.approx({name: loss / total for name, loss in losses.items()})
    assert mixture.parameters["made_from"] == ["mixture/proxy"]
    assert mixture.parameters["total_cost"]["flops"] == run.cost.flops


def test_a_duplicate_name_disables_both(tool, add_method):
    source = contributing_example()[1].replace('name="longest-name"', 'name="uniform"')
    add_method(source, "zz_second.py")
    status, _, errors = tool("--method", "uniform", "--corpus", "c", "--output", "o.json")
    assert (status, len(errors.splitlines())) == (2, 1)
    assert "baselines.py and zz_second.py" in errors
    assert set(find_methods()) == {*NAMES} - {"uniform"}


BROKEN = {
    "name": ("x = 1\nMETHOD = Method()\n", "NameError: name 'Method' is not defined (line 2)"),
    "other": ("METHOD = 'mine'\n", "METHOD"),
}


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_method_is_reported_and_disables_no_other(tool, add_method, source, problem):
    add_method(source, "mine.py")
    status, printed, errors = tool("--list-methods")
    assert (status, errors) == (0, "")
    assert "not usable: mine.py" in printed
    assert problem in " ".join(printed.split())
    assert list(find_methods()) == NAMES
    status, _, errors = tool("--method", "mine", "--corpus", "c", "--output", "o.json")
    assert (status, len(errors.splitlines())) == (2, 1)
    assert "mine.py" in errors
    assert problem in errors


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_a_stopped_method_exits_with_its_status(
    tool, add_method, monkeypatch, corpus, tmp_path, launcher
):
    """Under torchrun the status is 0, since torchrun reports a failure with a traceback."""
    first_line = "    from megatron_chameleon.methods.training_free"
    source = contributing_example()[1].replace(first_line, f"    return 75\n{first_line}")
    add_method(source, "longest_name.py")
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    output = tmp_path / "o.json"
    argv = ("--method", "longest-name", "--corpus", corpus.root, "--output", output)
    assert tool(*argv)[0] == (STOPPED_STATUS if launcher == "python" else 0)
    assert not output.exists()


def test_discovery_imports_no_torch():
    """An import of torch would slow --help and --list-methods down."""
    command = "import sys; from megatron_chameleon.methods.method import discover_methods as d"
    command += "; from megatron_chameleon.commands import pretrain_gpt, sweep_mixture"
    command += "; assert not d().unusable and 'torch' not in sys.modules"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", command], check=True, env=environment, cwd=ROOT)
