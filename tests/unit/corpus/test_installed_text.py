"""Gathering text from a site-packages folder: domains, limits, duplicates, bad input."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from megatron_chameleon.corpus.installed_text import (
    SUMMARY_FILE,
    gather_installed_text,
)
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


def words(seed):
    """Text that no other seed gives."""
    rng = random.Random(seed)
    return "\n".join(f"line {rng.randrange(10**9)} of {seed}" for _ in range(40))


@pytest.fixture
def write(tmp_path):
    """``write(source, text)`` writes a file in site-packages."""

    def write(source, text):
        path = tmp_path / "site-packages" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return write


@pytest.fixture
def options(write, tmp_path):
    """Seven domains of 12 documents each."""
    for place, (name, pattern) in enumerate(FILE_OF_DOMAIN.items()):
        for index in range(12):
            text = words(100 * place + index)
            if name == "reference_prose":
                text = f'"""{text}"""\nsecret_code = {index}\n'
            write(pattern.format(index % 3, index), text)
    return GatherOptions(
        output_dir=tmp_path / "text",
        roots=(tmp_path / "site-packages",),
        min_bytes_per_domain=5_000,
        min_documents_per_domain=10,
    )


def test_each_domain_gets_its_own_texts_once(options, write):
    for source in ("pack0/copy_a.py", "pack1/copy_b.py", "pack2/copy.pyi", "pack0/copy.csv"):
        write(source, words(7_000))
    write("pack0/latin1.py", words(1).encode() + b"\xe9")
    write("pack0/nul.py", words(2) + "\0")
    write("pack0/short.py", "x" * 199)
    write("pip/module.py", words(3))
    write("pack0/__pycache__/module.py", words(4))
    site = options.roots[0]
    (site / "pack0" / "link.py").symlink_to(site / "pack0" / "nul.py")
    gathered = gather_installed_text(options)
    assert {found.domain.name for found in gathered} == set(FILE_OF_DOMAIN)
    for found in gathered:
        name = found.domain.name
        content = (options.output_dir / f"{name}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in content.splitlines()]
        assert [row["source"] for row in rows] == sorted(row["source"] for row in rows)
        assert len(rows) == (13 if name == "python_source" else 12)
        assert found.num_bytes == sum(len(row["text"].encode()) for row in rows)
        for row in rows:
            in_file = (site / row["source"]).read_text(encoding="utf-8").strip()
            if name == "reference_prose":
                in_file = in_file.split('"""')[1]
            assert row["text"] == in_file


def test_a_domain_that_is_too_small_is_replaced_by_the_next(options):
    options = dataclasses.replace(options, num_domains=6)
    first = [found.domain.name for found in gather_installed_text(options)]
    for path in (options.roots[0] / "torch").rglob("*.h"):
        path.unlink()
    second = [found.domain.name for found in gather_installed_text(options)]
    assert set(first) ^ set(second) == {"cpp_headers", "number_tables"}
    # The folder holds what the second run found and nothing of the first.
    assert {path.stem for path in options.output_dir.glob("*.jsonl")} == set(second)
    recorded = json.loads((options.output_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    assert [domain["name"] for domain in recorded["domains"]] == second
    (options.output_dir / "mine.txt").touch()
    with pytest.raises(UserError, match=r"mine\.txt"):
        gather_installed_text(options)
    assert (options.output_dir / "mine.txt").exists()
