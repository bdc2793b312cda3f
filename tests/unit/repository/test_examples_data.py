"""Recipes of examples/data call preprocess_data with valid options."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from megatron_chameleon.cli import parse_options
from megatron_chameleon.corpus.options import PreprocessOptions

ROOT = Path(__file__).resolve().parents[3]
RECIPES = {path.stem: path for path in (ROOT / "examples" / "data").glob("*.sh")}
# This stand-in for Python records its arguments.
PYTHON = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" > "$CALL"\n'


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_command_of_a_recipe_parses(tmp_path, recipe):
    for name in ("python", "gathered.json", "a.jsonl", "tokenizer.json"):
        (tmp_path / name).write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    collection = recipe.partition("_")[0]
    (tmp_path / "gathered.json").write_text(f'{{\n  "collection": "{collection}"\n}}')
    own = {"INPUT": f"{tmp_path}", "OUTPUT": "corpus", "TOKENIZER": f"{tmp_path}/tokenizer.json"}
    own |= {"WORKERS": "5", "SHARD": "2/3", "CALL": f"{tmp_path}/call"}
    own["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", str(RECIPES[recipe]), "--shard-bytes", "1000"]
    subprocess.run(command, env={**os.environ, **own}, check=True)
    command_line = (tmp_path / "call").read_text().split("\0")[:-1]
    assert command_line[:3] == ["-m", "megatron_chameleon", "preprocess_data"]
    options = parse_options(PreprocessOptions, command_line[3:])
    assert (options.output, options.shard_bytes) == (Path("corpus"), 1000)
    assert str(tmp_path) in options.source.input[0][0]
    if recipe in ("installed_text", "registers_text", "code_text"):
        (tmp_path / "gathered.json").write_text('{"collection": "other"}')
        assert subprocess.run(command, env={**os.environ, **own}).returncode == 2
    else:
        assert (options.workers, options.shard) == (5, "2/3")
        assert options.domains.rename_table
