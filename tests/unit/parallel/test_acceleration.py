"""The doctor's findings: active features, NVIDIA's Apex, and CUDA coverage."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from megatron_chameleon.parallel.acceleration import (
    COVERAGE_TABLE,
    RESULTS,
    AccelerationReport,
    acceleration_report,
    cuda_coverage,
    nvidia_apex,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the import path; packages imported from it are unloaded afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


def write_package(site: Path, *modules: str, source: str = "") -> None:
    for module in modules:
        (site / module).mkdir(parents=True)
        (site / module / "__init__.py").write_text(source, encoding="utf-8")


def test_no_apex_is_absent():
    assert nvidia_apex().state == "absent"


def test_the_unrelated_apex_is_the_wrong_package(site):
    """It is not imported: it could do anything."""
    write_package(site, "apex", "apex/amqp", source="raise SystemExit('imported')")
    found = nvidia_apex()
    assert found.state == "wrong package"
    assert "pip uninstall apex" in found.detail
    assert str(site / "apex") in found.detail


def test_nvidias_apex_is_recognized(site):
    write_package(site, "apex", "apex/optimizers", "apex/normalization")
    assert nvidia_apex().state == ("available" if torch.cuda.is_available() else "unused")


def test_an_apex_whose_extensions_do_not_load_is_broken(site):
    write_package(site, "apex", "apex/normalization")
    write_package(site, "apex/optimizers", source="raise ImportError('no amp_C')")
    found = nvidia_apex()
    assert found.state == "broken"
    assert "no amp_C" in found.detail


def test_a_machine_without_cuda_has_no_active_cuda_feature():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    report = acceleration_report(ROOT)
    assert report.cuda_devices == ()
    states = {feature.name: feature.state for feature in report.features}
    assert states["CUDA"] == states["bf16"] == states["flash attention"] == "absent"
    assert "active" not in states.values()


def test_the_command_prints_json_and_leaves_with_0():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    names = {field.name for field in dataclasses.fields(AccelerationReport)}
    assert set(report) == names
    assert {row["place"] for row in report["coverage"]} >= {"pretended device", "never"}
    assert {feature["name"] for feature in report["features"]} >= {"CUDA", "Transformer Engine"}


def test_every_test_that_covers_a_cuda_feature_exists():
    from tests.gpu.test_training_on_gpus import CASES
    from tests.pretended_cuda.cases import TRAINING

    folders: dict[str, tuple[Path, Collection[str]]] = {
        "gpu": (ROOT / "tests/gpu", CASES),
        "pretended": (ROOT / "tests/pretended_cuda", TRAINING),
    }
    rows = tomllib.loads((ROOT / COVERAGE_TABLE).read_text(encoding="utf-8"))["feature"]
    for row in rows:
        assert row.keys() == {"name", *folders}
        for kind, (folder, cases) in folders.items():
            for test in row[kind]:
                parts = re.fullmatch(r"(\w+\.py)::(\w+)(?:\[([\w-]+)\])?", test)
                assert parts is not None, test
                file, name, case = parts.groups()
                assert f"def {name}(" in (folder / file).read_text(encoding="utf-8"), test
                assert case is None or case in cases, test


def test_a_feature_has_run_on_a_device_if_all_its_gpu_tests_passed_there(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / COVERAGE_TABLE).write_text(
        "\n".join(
            f'[[feature]]\nname = "{name}"\ngpu = {gpu}\npretended = {pretended}'
            for name, gpu, pretended in (
                ("all cases", ["a.py::test_a"], []),
                ("one case", ["a.py::test_b[x]"], []),
                ("a failed case", ["a.py::test_b"], ["b.py::test_c"]),
                ("not run", ["a.py::test_b[x]", "a.py::test_c"], []),
                ("no tests", [], []),
            )
        )
    )
    tests = {
        "test_a[1]": "passed",
        "test_a[2]": "passed",
        "test_b[x]": "passed",
        "test_b[y]": "failed",
    }
    row = {
        "machine": {"device": "H100"},
        "tests": {f"tests/gpu/a.py::{k}": v for k, v in tests.items()},
    }
    (tmp_path / RESULTS).mkdir(parents=True)
    (tmp_path / RESULTS / "tests-h100.json").write_text(json.dumps({"rows": [row]}))
    places = {row.feature: row.place for row in cuda_coverage(tmp_path)}
    assert places == {
        "all cases": "real device",
        "one case": "real device",
        "a failed case": "pretended device",
        "not run": "never",
        "no tests": "never",
    }
    assert cuda_coverage(tmp_path / "tests") == ()
