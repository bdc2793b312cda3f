"""Gathering text from a site-packages folder: domains, limits, duplicates, bad input."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil

import pytest

from megatron_chameleon.corpus.installed_text import gather_installed_text
from megatron_chameleon.corpus.options import GatherOptions
from megatron_chameleon.errors import UserError

FILE_OF_DOMAIN = {
    "test_suites": "pack{}/tests/test_{}.py",
    "reference_prose": "numpy/sub{}/module_{}.py",
    "python_source": "pack{}/module_{}.py",
    "cpp_headers": "torch/include/sub{}/header_{}.h",
    "type_stubs": "pack{}/module_{}.pyi",
    "licences_and_readmes": "pack{}-1.0.dist-info/licenses/LICENSE.{}",
    "number_tables": "pack{}/data/table_{}.csv",
}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def words(seed):
    """Return text that differs between seeds."""
    rng = random.Random(seed)
    return "\n".join(f"line {rng.randrange(10**9)} of {seed}" for _ in range(40))


@pytest.fixture
def options(tmp_path):
    """Seven domains of 12 documents each."""
    for place, (name, pattern) in enumerate(FILE_OF_DOMAIN.items()):
        for index in range(12):
            text = words(100 * place + index)
            if name == "reference_prose":
                text = f'"""{text}"""\nsecret_code = {index}\n'
            write(tmp_path / pattern.format(index % 3, index), text)
    return GatherOptions(
        tmp_path / "text",
        (tmp_path,),
        min_bytes_per_domain=5_000,
        min_documents_per_domain=10,
    )


def test_each_domain_gets_its_own_texts_once(options):
    site = options.roots[0]
    for source in ("pack0/copy_a.py", "pack1/copy_b.py", "pack2/copy.pyi", "pack0/copy.csv"):
        write(site / source, words(7_000))
    (site / "pack0/latin1.py").write_bytes(words(1).encode() + b"\xe9")
    write(site / "pack0/nul.py", words(2) + "\0")
    write(site / "pip/module.py", words(3))
    gathered = gather_installed_text(options)
    assert {found.domain.name for found in gathered} == set(FILE_OF_DOMAIN)
    for found in gathered:
        name = found.domain.name
        lines = (options.output_dir / f"{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == (13 if name == "python_source" else 12)
        assert found.num_bytes == sum(len(row["text"].encode()) for row in rows)
        for row in rows:
            in_file = (site / row["source"]).read_text().strip()
            assert row["text"] == (in_file.split('"""')[1] if '"""' in in_file else in_file)


def test_a_domain_that_is_too_small_is_replaced_by_the_next(options):
    options = dataclasses.replace(options, num_domains=6)
    with pytest.raises(UserError, match="0 of the 6 required domains"):
        gather_installed_text(dataclasses.replace(options, min_bytes_per_domain=10**9))
    assert not options.output_dir.exists()
    first = {found.domain.name for found in gather_installed_text(options)}
    shutil.rmtree(options.roots[0] / "torch")
    # A killed run has left this file.
    unfinished = options.output_dir / ".python_source.jsonl.0123456789ab.tmp"
    unfinished.touch()
    second = {found.domain.name for found in gather_installed_text(options)}
    assert first ^ second == {"cpp_headers", "number_tables"}
    # Files of the first run are removed; other files are never removed.
    assert {path.stem for path in options.output_dir.glob("*.jsonl")} == second
    assert not unfinished.exists()
    (options.output_dir / "mine.txt").touch()
    with pytest.raises(UserError, match=r"mine\.txt"):
        gather_installed_text(options)
