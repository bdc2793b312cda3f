"""Releases of megatron-core that cannot be used are reported in one line."""

from __future__ import annotations

import sys

import pytest

from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.parallel.releases import release_problem


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Function that puts the metadata of another megatron-core before those of the installed."""

    def put(version, python=">=3.10"):
        folder = tmp_path / f"megatron_core-{version}.dist-info"
        folder.mkdir()
        lines = ("Metadata-Version: 2.1", "Name: megatron-core", f"Version: {version}")
        (folder / "METADATA").write_text("\n".join([*lines, f"Requires-Python: {python}", ""]))
        monkeypatch.syspath_prepend(tmp_path)

    return put


def test_the_installed_release_can_be_used():
    assert release_problem() is None


@pytest.mark.parametrize("version", ["0.15.3", "0.20.0", "0.20.0rc0", "1.0"])
def test_a_release_outside_the_range_is_named_with_the_range(install, version):
    install(version)
    problem = release_problem() or ""
    assert problem.startswith(f"megatron-core {version} is installed")
    assert "0.16" in problem
    assert "<0.20" in problem
    assert "\n" not in problem
    with pytest.raises(UserError, match="is installed"), distributed(ParallelOptions(), seed=1):
        pass


def test_another_python_is_named_with_the_one_that_is_needed(install):
    install("0.17.0", python=">=3.99")
    found = ".".join(map(str, sys.version_info[:3]))
    assert f"0.17.0 needs Python >=3.99, but this is Python {found}" in (release_problem() or "")
