"""What the pages say of the code is so: fields on disk, messages, launchers, figures."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import pkgutil
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from docs.hooks.measurements import figure, machine_told, measurements_page, script_of
from megatron_chameleon import artifacts
from megatron_chameleon.artifacts.downstream_part import DownstreamPart
from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from megatron_chameleon.artifacts.evaluation_result import EvaluationResult
from megatron_chameleon.artifacts.mixture import Mixture
from megatron_chameleon.artifacts.record import FolderRecord
from megatron_chameleon.artifacts.swarm import MemberRecord
from megatron_chameleon.mixture.recipes import RECIPES
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.sizes import ModelShape, model_size

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


# Artifacts


def modules_of_artifacts() -> list[Any]:
    names = [module.name for module in pkgutil.iter_modules(artifacts.__path__)]
    return [importlib.import_module(f"{artifacts.__name__}.{name}") for name in names]


def records() -> dict[str, type]:
    """What is written to disk: the records, and the dataclasses in their fields."""
    modules_of_artifacts()
    waiting: list[Any] = [*FolderRecord.__subclasses__(), Mixture, EvaluationResult]
    waiting += [DownstreamResult, DownstreamPart, MemberRecord]
    found: dict[str, type] = {}
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        if dataclasses.is_dataclass(hint) and hint.__module__.startswith(artifacts.__name__):
            assert isinstance(hint, type)
            if hint.__name__ not in found:
                found[hint.__name__] = hint
                waiting += get_type_hints(hint).values()
    return found


RECORDS = records()


def documented_fields() -> dict[str, list[str]]:
    """Heading in code -> the names in the first column of its table."""
    sections = re.split(r"^#+ ", page("artifacts.md"), flags=re.MULTILINE)
    told = {}
    for section in sections:
        name = re.match(r"`(\w+)`\n", section)
        if name is not None:
            cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
            told[name[1]] = re.findall(r"`(\w+)`", " ".join(cells))
    return told


def test_the_page_of_artifacts_tells_of_every_record_and_no_other():
    assert len(RECORDS) > 25
    assert set(documented_fields()) == set(RECORDS)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_page_of_artifacts_has_every_field_and_no_other(name):
    fields = {field.name for field in dataclasses.fields(RECORDS[name])} - {"root"}
    told = documented_fields()[name]
    assert len(told) == len(set(told))
    assert set(told) == fields


def test_the_page_of_artifacts_has_their_format_versions():
    text = " ".join(page("artifacts.md").split())
    versions = dict(re.findall(r"`(\w+)`,? format version (\d+)", text))
    told = {
        name: str(importlib.import_module(RECORDS[name].__module__).FORMAT_VERSION)
        for name in versions
    }
    assert versions == told
    roots = {record.__name__ for record in FolderRecord.__subclasses__()} & set(RECORDS)
    assert roots | {"Mixture", "EvaluationResult", "DownstreamResult"} <= set(versions)


# Messages


def messages_of_the_package() -> list[str]:
    """Every text of the package in one piece, with a NUL where it takes a value."""
    found = []
    for path in (ROOT / "megatron_chameleon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
                )
                found.append("".join(str(part) for part in parts))
    return found


QUOTED = re.findall(r"^### `(.+)`$", page("troubleshooting.md"), re.MULTILINE)


def test_the_page_of_messages_has_cause_and_fix_of_each():
    assert len(QUOTED) >= 25
    sections = re.split(r"^### ", page("troubleshooting.md"), flags=re.MULTILINE)[1:]
    assert all("**Cause:**" in each and "**Fix:**" in each for each in sections)


@pytest.fixture(scope="module")
def messages():
    return messages_of_the_package()


@pytest.mark.parametrize("quoted", QUOTED)
def test_every_message_that_is_quoted_is_one_of_the_package(messages, quoted):
    pattern = re.compile(
        r"\0".join(re.escape(part.strip(" ")) for part in quoted.split("...")).replace(
            r"\0", r"\W*\0\W*"
        )
    )
    assert any(pattern.search(message) for message in messages)


# Launchers and figures


def test_every_launcher_is_on_the_page_of_the_paper_and_every_one_there_exists():
    text = page("paper.md")
    named = set(re.findall(r"examples/[\w/]+\.(?:sh|sbatch)", text))
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
    shared = {"compare_mixtures", "hyperparameters", "jobs", "launch", "quickstart"}
    launchers = {path for path in (ROOT / "examples").rglob("*.sh") if path.stem not in shared}
    told = {ROOT / name for name in named}
    assert launchers - told == {ROOT / "examples/data/installed_text.sh"}


def test_what_slurm_is_asked_for_is_what_the_page_says():
    script = (ROOT / "examples/slurm/pretrain.sbatch").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script, re.MULTILINE))
    told = dict(re.findall(r"^\| ([\w ]+) \| (\d+)\b", page("slurm.md"), re.MULTILINE))
    assert told == {
        "nodes": asked["nodes"],
        "GPUs of a node": asked["gpus-per-node"],
        "cores of a node": asked["cpus-per-task"],
        "time": asked["time"].partition(":")[0],
    }
    (minutes,) = set(re.findall(r"SAVE_MINUTES:-(\d+)", script))
    assert f"`SAVE_MINUTES` ({minutes})" in page("slurm.md")


COSTS = re.findall(
    r"^\| (\S+) [^|]*\| ([\d,]+) \| (\d+) \| (\S+) \| ([\d.]+)M \| (\S+) \|$",
    page("paper.md"),
    re.M,
)


@pytest.mark.parametrize("row", COSTS, ids="-".join)
def test_the_costs_on_the_page_of_the_paper_are_those_of_the_ledger(row):
    size, steps, batch, tokens, parameters, flops = row
    shape = ModelShape(model_size(size), 50_257, 1024)
    count = int(steps.replace(",", "")) * int(batch) * 1024
    assert f"{count:.2e}".replace("+0", "").replace("+", "") == tokens
    assert f"{shape.num_parameters / 1e6:.1f}" == parameters
    assert f"{training_flops(shape, count, 1024):.2e}".replace("+", "") == flops


def test_the_costs_are_of_all_sizes_of_the_paper():
    assert {row[0] for row in COSTS} == {"60m", "82m", "124m", "210m", "684m", "1.2b"}


def test_what_is_not_in_the_paper_is_told():
    told = re.findall(
        r"^\| ([^|]+) \|", page("paper.md").split("## What is not in the paper")[1], re.M
    )
    expected = ["base model steps", "warm-up", "Adam betas", "dropout", "sequence length"]
    assert told[: len(expected)] == expected


def test_the_recipes_on_the_page_of_the_method_are_those():
    rows = re.findall(
        r"^\| `(\w+)`: [^|]*\| (yes|no) \| (yes|no) \| ([\d.]+)[^|]*"
        r"\| ([\d/]+)[^|]*\| ([\d.]+)[^|]*\|$",
        page("method.md"),
        re.MULTILINE,
    )
    assert {row[0] for row in rows} == set(RECIPES)
    for name, center, normalize, ridge, pretrain, finetune in rows:
        recipe = RECIPES[name]
        assert (recipe.center, recipe.normalize) == (center == "yes", normalize == "yes")
        assert recipe.ridge == float(ridge)
        over, _, under = pretrain.partition("/")
        assert recipe.temperature_pretrain == pytest.approx(float(over) / float(under or 1))
        assert recipe.temperature_finetune == pytest.approx(float(finetune))


# Measurements


def test_the_page_of_measurements_has_every_ratio_that_was_measured():
    text = measurements_page(ROOT)
    results = sorted((ROOT / "benchmarks/results").glob("*.json"))
    assert results
    for path in results:
        assert f"## {path.stem}\n" in text
        assert script_of(path, ROOT) is not None or path.stem.startswith("compare")
        for row in json.loads(path.read_text()).get("rows", []):
            assert str(row["what"]) in text
            faster = row.get("times_faster")
            if isinstance(faster, dict):
                assert all(f"{ratio:.2f}" in text for ratio in faster.values())


def test_a_benchmark_without_results_is_told_to_have_none(tmp_path):
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    usage = "    python benchmarks/fast.py [--a]"
    body = f'"""How fast.\n\n{usage}\n"""\nif __name__ == "__main__":\n    pass\n'
    (tmp_path / "benchmarks/fast.py").write_text(body)
    assert "- `python benchmarks/fast.py [--a]`: How fast." in measurements_page(tmp_path)
    row = {"what": "a thing", "date": "2026-01-02", "speed": {"of_it": 12345.6}, "all": [1, 2]}
    (tmp_path / "benchmarks/results/fast-cpu.json").write_text(json.dumps({"rows": [row]}))
    page = measurements_page(tmp_path)
    assert "Not measured yet" not in page
    assert "\n1. 2026-01-02: a processor that is not named; versions not written down\n" in page
    assert "\n#### a thing\n\n| | |\n|---|---|\n| speed, of it | 12,346 |\n" in page


def test_figures_and_machines_are_told_for_people():
    assert [figure(v) for v in (True, 1234, 0.123456, 1.5e17, "a|b")] == [
        "yes",
        "1,234",
        "0.1235",
        "1.5e+17",
        "a\\|b",
    ]
    machine = {"processor": "P", "cores": 2, "memory_gb": 8, "python": "3.11", "device": "H100"}
    assert machine_told(machine) == "H100, P, 2 cores, 8 GB; Python 3.11"
