from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Corpus

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = ROOT / "examples" / "slurm" / "preprocess.sbatch"

# What sbatch would do, at once and on this machine: each task of an array, one after the other.
SBATCH = """#!/usr/bin/env bash
set -euo pipefail
printf '%s\\n' "$*" >> "$CALLS"
export SLURM_JOB_ID=7 SLURM_CPUS_PER_TASK=16
while [[ $1 == --* ]]; do
  [[ $1 == --array=1-* ]] && export SLURM_ARRAY_TASK_COUNT=${1#--array=1-}
  shift
done
for task in $(seq "${SLURM_ARRAY_TASK_COUNT:-1}"); do
  [[ -n ${SLURM_ARRAY_TASK_COUNT:-} ]] && export SLURM_ARRAY_TASK_ID=$task
  bash "$@" >> "$SAID" 2>&1
done
echo '7;cluster'
"""
SRUN = '#!/usr/bin/env bash\necho "cores: $SRUN_CPUS_PER_TASK"\nexec "$@"\n'


@pytest.fixture
def cluster(tmp_path):
    """Calls of the launcher where 'sbatch', 'srun' and 'python' are as on a cluster."""
    programs = tmp_path / "bin"
    programs.mkdir()
    python = f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n'
    for name, content in (("sbatch", SBATCH), ("srun", SRUN), ("python", python)):
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CALLS": str(tmp_path / "calls"),
        "SAID": str(tmp_path / "said"),
    }

    def call(*arguments):
        command = ["bash", str(LAUNCHER), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return call


def test_the_array_makes_the_shards_and_the_job_after_it_joins_them(
    cluster, tmp_path, jsonl, texts, tokenizer_json
):
    path = jsonl("a.jsonl", texts(300))
    arguments = ["--input", f"a={path}", "--output", tmp_path / "corpus", "--shard-bytes", 4000]
    done = cluster(2, *arguments, "--tokenizer-model", tokenizer_json, "--split", "60,20,20")
    said = (tmp_path / "said").read_text()
    assert done.returncode == 0, done.stderr + said
    assert done.stdout == "array job 7 makes the shards, job 7 joins them\n"
    array, join = (tmp_path / "calls").read_text().splitlines()
    assert array.startswith(f"--parsable --array=1-2 {LAUNCHER} --input a={path}")
    assert join.startswith("--parsable --dependency=afterok:7 --kill-on-invalid-dep=yes ")
    assert said.count("cores: 16\n") == 3
    assert "--shard 1/2 is done" in said
    assert "--shard 2/2 is done, and so are all" in said
    assert Corpus.load(tmp_path / "corpus").names == ["a"]


@pytest.mark.parametrize("arguments", [(), ("--input", "a"), ("0",), ("two",)])
def test_the_number_of_machines_comes_first(cluster, tmp_path, arguments):
    done = cluster(*arguments)
    assert done.returncode == 2
    assert "usage: bash" in done.stderr
    assert not (tmp_path / "calls").exists()
