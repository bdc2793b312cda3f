"""Gathering text from a site-packages folder: domains, limits, duplicates, bad input."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from megatron_chameleon.corpus.installed_text import (
    DOMAINS,
    SUMMARY_FILE,
    assign_domains,
    gather_installed_text,
    list_files,
)
from megatron_chameleon.corpus.options import GatherOptions
from megatron_chameleon.errors import UserError


def words(seed: int, lines: int = 40) -> str:
    """Text that no other seed gives."""
    rng = random.Random(seed)
    return "\n".join(f"line {rng.randrange(10**9)} of {seed}" for _ in range(lines))


def write(root: Path, source: str, text: str | bytes) -> None:
    path = root / source
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)


FILE_OF_DOMAIN = {
    "test_suites": "pack{}/tests/test_{}.py",
    "reference_prose": "numpy/sub{}/module_{}.py",
    "python_source": "pack{}/module_{}.py",
    "cpp_headers": "torch/include/sub{}/header_{}.h",
    "type_stubs": "pack{}/module_{}.pyi",
    "licences_and_readmes": "pack{}-1.0.dist-info/licenses/LICENSE.{}",
    "number_tables": "pack{}/data/table_{}.csv",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Seven domains of 12 documents each."""
    root = tmp_path / "site-packages"
    for place, (name, pattern) in enumerate(FILE_OF_DOMAIN.items()):
        for index in range(12):
            text = words(100 * place + index)
            if name == "reference_prose":
                text = f'"""{text}"""\nsecret_code = {index}\n'
            write(root, pattern.format(index % 3, index), text)
    return root


@pytest.fixture
def options(site: Path, tmp_path: Path) -> GatherOptions:
    return GatherOptions(
        output_dir=tmp_path / "text",
        roots=(site,),
        min_bytes_per_domain=5_000,
        min_documents_per_domain=10,
    )


def read_domain(options: GatherOptions, name: str) -> list[dict[str, str]]:
    path = options.output_dir / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_domain_gets_its_own_files_and_their_text(site, options):
    gathered = gather_installed_text(options)
    assert {found.domain.name for found in gathered} == set(FILE_OF_DOMAIN)
    for found in gathered:
        rows = read_domain(options, found.domain.name)
        assert [row["source"] for row in rows] == sorted(row["source"] for row in rows)
        assert len(rows) == 12
        assert found.num_bytes == sum(len(row["text"].encode()) for row in rows)
        if found.domain.name != "reference_prose":
            for row in rows:
                assert row["text"] == (site / row["source"]).read_text(encoding="utf-8").strip()


def test_exact_duplicates_are_dropped_within_and_across_domains(site, options):
    text = words(7_000)
    for source in ("pack0/copy_a.py", "pack1/copy_b.py", "pack2/copy.pyi", "pack0/copy.csv"):
        write(site, source, text)
    gathered = gather_installed_text(options)
    texts = [text for found in gathered for text in found.documents.values()]
    assert texts.count(text) == 1
    assert len(texts) == len(set(texts)) == 12 * 7 + 1


def test_what_is_no_text_or_too_short_is_left_out(site, options):
    write(site, "pack0/latin1.py", words(1).encode() + b"\xe9")
    write(site, "pack0/nul.py", words(2) + "\0")
    write(site, "pack0/short.py", "x" * 199)
    write(site, "pack0/long_enough.py", "x" * 200)
    write(site, "pip/module.py", words(3))
    write(site, "pack0/__pycache__/module.py", words(4))
    (site / "pack0" / "link.py").symlink_to(site / "pack0" / "long_enough.py")
    gather_installed_text(options)
    sources = {row["source"] for row in read_domain(options, "python_source")}
    assert "pack0/long_enough.py" in sources
    assert len(sources) == 12 + 1


def test_a_domain_that_is_too_small_is_replaced_by_the_next(site, options):
    options = dataclasses.replace(options, num_domains=6)
    first = [found.domain.name for found in gather_installed_text(options)]
    assert "number_tables" not in first
    for path in (site / "torch").rglob("*.h"):
        path.unlink()
    second = [found.domain.name for found in gather_installed_text(options)]
    assert set(first) - set(second) == {"cpp_headers"}
    assert set(second) - set(first) == {"number_tables"}
    # The folder holds what the second run found and nothing of the first.
    assert {path.stem for path in options.output_dir.glob("*.jsonl")} == set(second)
    recorded = json.loads((options.output_dir / SUMMARY_FILE).read_text(encoding="utf-8"))
    assert [domain["name"] for domain in recorded["domains"]] == second


def test_a_folder_with_other_files_is_refused_and_left_alone(options):
    write(options.output_dir, "mine.txt", "mine")
    with pytest.raises(UserError, match=r"mine\.txt"):
        gather_installed_text(options)
    assert [path.name for path in options.output_dir.iterdir()] == ["mine.txt"]


def test_a_file_belongs_to_the_first_domain_that_matches(site):
    sources = {
        "numpy/linalg/tests/test_a.py": "test_suites",
        "numpy/linalg/a.py": "reference_prose",
        "torch/nn/a.py": "python_source",
        "triton/backends/nvidia/include/cuda.h": "cuda_headers",
        "nvidia/cu13/include/cuda.h": "cuda_headers",
        "torch/include/c10/a.h": "cpp_headers",
        "torch-2.13.0.dist-info/METADATA": "licences_and_readmes",
        "numpy/random/tests/data/a.csv": None,
        "numpy/_core/a.csv": "number_tables",
        "numpy/a.so": None,
    }
    for source in sources:
        write(site, source, "")
    assigned = assign_domains(list_files([site]), DOMAINS)
    found = {source: name for name, sources_ in assigned.items() for source in sources_}
    assert {source: found.get(source) for source in sources} == sources
