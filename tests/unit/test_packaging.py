"""setup.py gives ranges, constraints.txt pins, and every file is installed."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_arguments() -> dict[str, Any]:
    """The arguments of setuptools.setup."""
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: seen.update(arguments))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return seen


@pytest.fixture(scope="module")
def requirements(setup_arguments) -> list[Requirement]:
    extras = setup_arguments["extras_require"].values()
    return [
        Requirement(line)
        for group in [setup_arguments["install_requires"], *extras]
        for line in group
    ]


@pytest.fixture(scope="module")
def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(pin.name): pin for pin in found}


def test_requirements_are_ranges(requirements, pins):
    assert len(requirements) > 20
    for requirement in requirements:
        operators = {part.operator for part in requirement.specifier}
        assert operators, f"{requirement} has no lower bound"
        assert operators <= {">=", "<", "!="}, f"{requirement} is a pin"
    names = {canonicalize_name(requirement.name) for requirement in requirements}
    assert not names & {"apex", "nvidia-apex", "triton", "transformer-engine"}
    assert "apex" not in pins


def test_installed_torch_is_kept(requirements):
    """Also that of NVIDIA's container, a pre-release with a local tag."""
    (torch,) = [requirement for requirement in requirements if requirement.name == "torch"]
    for version in ("2.9.0a0+145a3a7bda.nv25.10", "2.11.0", "2.13.0+cpu"):
        assert torch.specifier.contains(version, prereleases=True)
    assert not torch.specifier.contains("2.8.0", prereleases=True)


def test_extras_are_documented(setup_arguments):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.search(r"Extras:(.*?)\n\n", readme, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(setup_arguments["extras_require"])


def test_constraints_pin_what_make_installs(setup_arguments, pins):
    for pin in pins.values():
        assert [part.operator for part in pin.specifier] == ["=="], f"{pin} is not a pin"
        assert "+" not in str(pin), f"{pin}: a local tag ties the pin to one build"
    extras = setup_arguments["extras_require"]
    installed = [
        *setup_arguments["install_requires"],
        *(line for extra in ("dev", "data", "docs", "eval", "hf") for line in extras[extra]),
    ]
    for requirement in map(Requirement, installed):
        (pinned,) = pins[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pinned.version), f"{requirement} excludes its pin"
    assert {"torch", "triton", "psutil", "matplotlib", "setuptools"} <= set(pins)


def test_every_file_is_installed(setup_arguments):
    package = ROOT / "megatron_chameleon"
    folders = {path.parent for path in package.rglob("*.py")}
    expected = {re.sub("/", ".", folder.relative_to(ROOT).as_posix()) for folder in folders}
    assert set(setup_arguments["packages"]) == expected
    kinds = {".py", ".pyc", ".nbi", ".nbc"}  # sources and caches
    files = {p for p in package.rglob("*") if p.is_file() and p.suffix not in kinds}
    patterns = setup_arguments["package_data"]["megatron_chameleon"]
    assert files == {path for pattern in patterns for path in package.glob(pattern)}
    assert any(path.suffix == ".json" for path in files)
