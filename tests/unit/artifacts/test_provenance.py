"""Provenance without secrets, and without paths of one machine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from megatron_chameleon.artifacts import provenance


@dataclasses.dataclass(frozen=True)
class Options:
    input: tuple[str, ...]
    output: Path = Path("corpus")


SECRETS = {
    "s3://KEY:SECRET@bucket/a.jsonl": "s3://bucket/a.jsonl",
    "web=https://user:SECRET@host/a?x=1": "web=https://host/a?x=1",
    "https://host/a?sig=SECRET&x=1": "https://host/a?sig=***&x=1",
    "https://host/a?X-Amz-Signature=SECRET": "https://host/a?X-Amz-Signature=***",
    "https://user:p@SECRET@host/x?text_key=a&e=b@c": "https://host/x?text_key=a&e=b@c",
    "abfs://container@account/x": "abfs://container@account/x",
    "hf:owner/name@revision": "hf:owner/name@revision",
    "notes/me@home.txt": "notes/me@home.txt",
}


def test_credentials_of_urls_are_not_recorded(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/tool", *SECRETS])
    made = provenance(Options(tuple(SECRETS)), dict.fromkeys(SECRETS, "hash"))
    assert made.command == ["tool", *SECRETS.values()]
    assert made.options["input"] == list(SECRETS.values()) == list(made.inputs)
    assert "SECRET" not in str(made)


def test_portable_provenance_has_no_absolute_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tool", f"--input=a={tmp_path}/a.jsonl", str(tmp_path)])
    values = (f"{tmp_path}/a/b.jsonl", "b=/home/me/x.jsonl", f"{tmp_path}-2/c", "https://host/a/b")
    made = provenance(Options(values), {}).portable()
    assert made.command == ["tool", "--input=a=a.jsonl", ""]
    assert made.options["input"] == ["a/b.jsonl", "b=x.jsonl", "c", "https://host/a/b"]
    assert made.working_folder is None


def test_portable_provenance_changes_paths_only():
    made = provenance(Options(()), {"/a/x": "1", "/b/x": "2"})
    root = dataclasses.replace(made, working_folder="/")
    assert root.portable_text("corpora/mine/x") == "corpora/mine/x"
    data = dataclasses.replace(made, working_folder="/data")
    url = "s3://bucket/data/a.jsonl"
    assert data.portable_text(f"a=/data/b {url} /mnt/data/c") == f"a=b {url} c"
    assert data.portable_text("/home/me/My Data/secret/x") == "x"
    assert data.portable_text("a=file:///home/me/x") == "a=x"
    assert sorted(made.portable().inputs.values()) == ["1", "2"]
