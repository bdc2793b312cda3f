"""Report of tools/doctor.py: active features, NVIDIA's Apex, and CUDA test coverage."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from megatron_chameleon.parallel.acceleration import (
    COVERAGE_TABLE,
    ON_SIMULATED,
    RESULTS,
    acceleration_report,
    cuda_coverage,
    format_report,
    nvidia_apex,
)

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("modules", "state", "detail"),
    [
        # The unrelated project must not be imported, since its code could do anything.
        (dict.fromkeys(("", "amqp"), "raise SystemExit"), "wrong package", "pip uninstall apex"),
        (dict.fromkeys(("", "optimizers", "normalization"), ""), "unused", "no CUDA device"),
        ({"": "", "normalization": "", "optimizers": "import amp_C"}, "broken", "amp_C"),
    ],
)
def test_nvidias_apex_is_not_confused_with_another(tmp_path, monkeypatch, modules, state, detail):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, source in modules.items():
        (tmp_path / "apex" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "apex" / name / "__init__.py").write_text(source, encoding="utf-8")
    found, details = nvidia_apex()
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]
    assert found == state
    assert detail in details


def test_the_doctor_reports_a_machine_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = acceleration_report(ROOT)
    assert report.coverage[ON_SIMULATED]
    states = {feature.name: feature.state for feature in report.features}
    assert states["CUDA"] == states["bf16"] == states["flash attention"] == "absent"
    assert [name for name, state in states.items() if state == "active"] == ["megatron-core"]
    text = format_report(report)
    assert all(name in text for name in states)


def test_every_test_that_covers_a_cuda_feature_exists():
    from tests.gpu.test_training_on_gpus import CASES
    from tests.simulated_cuda.cases import TRAINING

    for row in tomllib.loads((ROOT / COVERAGE_TABLE).read_text(encoding="utf-8"))["feature"]:
        assert row.keys() == {"name", "gpu", "simulated"}
        for kind, folder, cases in (
            ("gpu", "tests/gpu", CASES),
            ("simulated", "tests/simulated_cuda", TRAINING),
        ):
            for test in row[kind]:
                parts = re.fullmatch(r"(\w+\.py)::(\w+)(?:\[([\w-]+)\])?", test)
                assert parts is not None, test
                file, name, case = parts.groups()
                assert f"def {name}(" in (ROOT / folder / file).read_text(encoding="utf-8"), test
                assert case is None or case in cases, test


def test_a_feature_is_tested_on_a_device_if_all_its_gpu_tests_passed_there(tmp_path):
    features = {  # feature -> (tests on a GPU, tests on the simulated device)
        "passed": (["a.py::test_a", "a.py::test_b[x]"], []),
        "failed": (["a.py::test_b"], ["b.py::test_c"]),
        "not run": (["a.py::test_b[x]", "a.py::test_c"], []),
        "no tests": ([], []),
    }
    (tmp_path / "tests").mkdir()
    (tmp_path / COVERAGE_TABLE).write_text(
        "\n".join(
            f'[[feature]]\nname = "{name}"\ngpu = {gpu}\nsimulated = {simulated}'
            for name, (gpu, simulated) in features.items()
        )
    )
    outcomes = {"test_a[1]": "passed", "test_a[2]": "passed"}
    outcomes |= {"test_b[x]": "passed", "test_b[y]": "failed"}
    tests = {f"tests/gpu/a.py::{name}": outcome for name, outcome in outcomes.items()}
    (tmp_path / RESULTS).mkdir(parents=True)
    rows = [{"machine": {"device": "H100"}, "tests": tests}]
    (tmp_path / RESULTS / "tests-h100.json").write_text(json.dumps({"rows": rows}))
    on_gpu, on_simulated, untested = cuda_coverage(tmp_path).values()
    assert on_gpu == ["passed (H100)"]
    assert on_simulated == ["failed"]
    assert untested == ["not run", "no tests"]
