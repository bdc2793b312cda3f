from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Cost
from megatron_chameleon.artifacts.provenance import PACKAGES, provenance
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions

OPTIONS = PreprocessOptions(SourceOptions((("a=x", "b=y"),)), Path("out"), Path("tok"))
costs = st.builds(
    Cost, st.floats(0, 1e24), st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 4096)
)


def test_provenance_records_command_options_inputs_and_versions(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/tools/compute_mixture.py", "--layer", "3"])
    made = provenance(OPTIONS, {"corpus": "c" * 64})
    assert made.command == ["compute_mixture.py", "--layer", "3"]
    assert made.options == json.loads(json.dumps(made.options))
    assert made.options["source"]["input"] == [["a=x", "b=y"]]
    assert made.options["output"] == "out"
    assert made.inputs == {"corpus": "c" * 64}
    assert made.working_folder == str(Path.cwd())
    assert set(made.versions) == {"python", *PACKAGES}
    created = datetime.datetime.fromisoformat(made.created)
    assert abs(datetime.datetime.now(datetime.UTC) - created) < datetime.timedelta(minutes=5)


def test_commit_is_none_without_git(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(OPTIONS, {}).git_commit is None


@given(costs, costs)
def test_costs_add_up_in_any_order(first, second):
    total = first + second
    assert total == second + first
    assert total.device_seconds == first.device_seconds + second.device_seconds
    assert total.num_devices == max(first.num_devices, second.num_devices)
    assert first + Cost() == first
