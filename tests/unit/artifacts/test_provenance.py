from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

from megatron_chameleon.artifacts.provenance import PACKAGES, provenance
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions

OPTIONS = PreprocessOptions(SourceOptions((("a=x", "b=y"),)), Path("out"), Path("tok"))


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
