"""Test that setup.py lists all files, and that constraints.txt pins versions in its ranges."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PYTHONS = ("3.11", "3.12", "3.13")


@pytest.fixture(scope="module")
def setup_arguments() -> dict[str, Any]:
    """The arguments of setuptools.setup."""
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **arguments: seen.update(arguments))
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return seen


def read_requirements(lines: Iterable[str], python: str) -> dict[str, Requirement]:
    """Return the requirements of a Python, by name; those of other systems than Linux, too."""
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found if is_for(each, python)}


def is_for(requirement: Requirement, python: str) -> bool:
    marker = requirement.marker
    versions = {"python_version": python, "python_full_version": f"{python}.1"}
    return marker is None or "python" not in str(marker) or marker.evaluate(versions)


@pytest.mark.parametrize("python", PYTHONS)
def test_requirements_are_ranges_and_constraints_pin_them(setup_arguments, python):
    extras = setup_arguments["extras_require"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = read_requirements(lines, python)
    for pin in pins.values():
        assert [part.operator for part in pin.specifier] == ["=="]
    for extra, lines in {"": setup_arguments["install_requires"], **extras}.items():
        for name, requirement in read_requirements(lines, python).items():
            assert {part.operator for part in requirement.specifier} <= {">=", "<", "!="}
            # make installs only these extras, so only these need pins.
            if extra in ("", "dev", "data", "docs", "eval", "hf", "plots", "ray"):
                (pinned,) = pins[name].specifier
                assert requirement.specifier.contains(pinned.version), f"{requirement} excludes it"
    torch = read_requirements(setup_arguments["install_requires"], python)["torch"].specifier
    # NVIDIA's container has this pre-release of torch, which pip must not replace.
    assert torch.contains("2.9.0a0+145a3a7bda.nv25.10", prereleases=True)


@pytest.mark.parametrize("python", PYTHONS)
def test_uv_lock_agrees_with_the_constraints(python):
    constraints, lock = (
        read_requirements((ROOT / name).read_text(encoding="utf-8").splitlines(), python)
        for name in ("constraints.txt", "requirements.lock")
    )
    assert {name: lock[name].specifier for name in constraints} == {
        name: pin.specifier for name, pin in constraints.items()
    }
    # The other packages belong to CUDA builds of torch, or to other systems than Linux.
    for name in set(lock) - set(constraints):
        marker = lock[name].marker
        assert marker is not None
        assert name.startswith(("cuda-", "nvidia-")) or not marker.evaluate(
            {"sys_platform": "linux"}
        )
    assert "://" not in (ROOT / "requirements.lock").read_text(encoding="utf-8")


def test_citation_has_the_version_of_the_package(setup_arguments):
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {setup_arguments['version']}\n" in citation


def test_every_file_is_installed(setup_arguments):
    package = ROOT / "megatron_chameleon"
    folders = {path.parent for path in package.rglob("*.py")}
    expected = {re.sub("/", ".", folder.relative_to(ROOT).as_posix()) for folder in folders}
    assert set(setup_arguments["packages"]) == expected
    kinds = {".py", ".pyc", ".nbi", ".nbc"}  # source files and caches
    files = {p for p in package.rglob("*") if p.is_file() and p.suffix not in kinds}
    patterns = setup_arguments["package_data"]["megatron_chameleon"]
    assert files == {path for pattern in patterns for path in package.glob(pattern)}
    assert any(path.suffix == ".json" for path in files)


def test_a_read_only_installation_without_a_home_compiles():
    program = (
        "import os; os.access = lambda *_: False\n"  # root may write anywhere
        "import megatron_chameleon.blend.order as order; print(os.environ['NUMBA_CACHE_DIR'])"
    )
    environment = {"HOME": "/proc/none", "PATH": "", "PYTHONPATH": str(ROOT)}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert Path(printed.strip()).name.startswith("numba-")
    assert not Path(printed.strip()).exists()  # it is removed at the end
