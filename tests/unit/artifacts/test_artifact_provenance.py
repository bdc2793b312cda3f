from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

from megatron_chameleon.artifacts.provenance import PACKAGES, plain_options, provenance
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.options.mixture import ExtractionOptions

OPTIONS = ChameleonOptions(
    corpus=Path("corpus"),
    checkpoint=Path("run"),
    output=Path("mixture.json"),
    extraction=ExtractionOptions(layer=3),
)


def test_options_become_plain_json_with_their_groups():
    options = plain_options(OPTIONS)
    assert json.loads(json.dumps(options)) == options
    assert options["corpus"] == "corpus"
    assert options["store"] is None
    assert options["extraction"]["layer"] == 3
    assert options["parallel"]["sequence_parallel"] is False


def test_tuples_become_lists_as_in_the_file():
    options = PreprocessOptions(SourceOptions((("a=x", "b=y"),)), Path("out"), Path("tok"))
    assert plain_options(options)["source"]["input"] == [["a=x", "b=y"]]


def test_provenance_says_what_ran_on_what(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/tools/compute_mixture.py", "--layer", "3"])
    made = provenance(OPTIONS, {"corpus": "c" * 64})
    assert made.command == ["compute_mixture.py", "--layer", "3"]
    assert made.options == plain_options(OPTIONS)
    assert made.inputs == {"corpus": "c" * 64}
    assert made.working_folder == str(Path.cwd())
    assert set(made.versions) == {"python", *PACKAGES}
    assert made.versions["numpy"][0].isdigit()
    created = datetime.datetime.fromisoformat(made.created)
    assert abs(datetime.datetime.now(datetime.UTC) - created) < datetime.timedelta(minutes=1)


def test_the_commit_is_that_of_the_source_tree_or_none():
    folder = Path(__file__).parent
    git = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--verify", "-q", "HEAD"],
        capture_output=True,
        text=True,
    )
    commit = provenance(OPTIONS, {}).git_commit
    if git.returncode == 0:
        assert commit is not None
        assert commit.removesuffix("+changes") == git.stdout.strip()
    else:
        assert commit is None


def test_without_git_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(OPTIONS, {}).git_commit is None
