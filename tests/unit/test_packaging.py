"""setup.py gives ranges, constraints.txt pins, and every file is installed."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable
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


def read_requirements(lines: Iterable[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(each.name): each for each in found}


def test_requirements_are_ranges_and_constraints_pin_them(setup_arguments):
    extras = setup_arguments["extras_require"]
    pins = read_requirements((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    for pin in pins.values():
        assert [part.operator for part in pin.specifier] == ["=="], f"{pin} is not a pin"
        assert "+" not in str(pin), f"{pin}: a local tag ties the pin to one build"
    for extra, lines in {"": setup_arguments["install_requires"], **extras}.items():
        for name, requirement in read_requirements(lines).items():
            operators = {part.operator for part in requirement.specifier}
            assert operators, f"{requirement} has no lower bound"
            assert operators <= {">=", "<", "!="}, f"{requirement} is a pin"
            # Of the container, and PyPI's apex is another project.
            assert name not in ("apex", "nvidia-apex", "triton", "transformer-engine")
            if extra in ("", "dev", "data", "docs", "eval", "hf"):  # make installs these
                (pinned,) = pins[name].specifier
                assert requirement.specifier.contains(pinned.version), f"{requirement} excludes it"
    assert {"torch", "triton", "setuptools"} <= set(pins)
    torch = read_requirements(setup_arguments["install_requires"])["torch"].specifier
    # NVIDIA's container has a pre-release with a local tag, which pip must keep.
    for version in ("2.9.0a0+145a3a7bda.nv25.10", "2.11.0", "2.13.0+cpu"):
        assert torch.contains(version, prereleases=True)
    assert not torch.contains("2.8.0", prereleases=True)


def test_extras_are_documented(setup_arguments):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.search(r"Extras:(.*?)\n\n", readme, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(setup_arguments["extras_require"])


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
