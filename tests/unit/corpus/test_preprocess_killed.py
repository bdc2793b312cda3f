from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("shard_bytes", "least_changes", "least_resumed"),
    [(4000, 100, 15), pytest.param(1_000_000, 100, 5, id="one shard")],
)
def test_a_run_killed_at_any_moment_is_gone_on_with(
    tmp_path, jsonl, texts, tokenizer_json, shard_bytes, least_changes, least_resumed
):
    some = texts(240, 1)
    records = [{"text": text, "set": "ab"[i % 2]} for i, text in enumerate(some + some[:40])]
    jsonl("0.jsonl", records[:150])
    jsonl("1.jsonl", records[150:])
    shutil.copy(tokenizer_json, tmp_path)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_runs.py"), tmp_path, str(shard_bytes)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(
        r"(\d+) changes, killed at (\d+) of them, (\d+) runs were gone on with, (\d+) cleaned up\n",
        done.stdout,
    )
    assert found, done.stdout
    changes, moments, resumed, cleaned = map(int, found.groups())
    assert changes > least_changes
    assert moments > 30
    assert cleaned > 3
    assert resumed > least_resumed
