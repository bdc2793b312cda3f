"""Sources of files, folders, globs and data sets; their domains and splits."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import Document, DocumentReader
from megatron_chameleon.corpus.sources import Chunk, DatasetName, find_sources
from megatron_chameleon.errors import UserError
from tests.unit.corpus.small_hub import COMMIT, serve

READ_IN_FOLDERS = ["[x].jsonl", "a.jsonl", "b.JSONL"]
READ_IN_FOLDERS += ["sub/c.jsonl.gz", "sub/d.jsonl.zst", "sub/p.parquet"]
FILES = [*READ_IN_FOLDERS[::-1], "e.json", "f.json.gz", "notes.txt", "README.md", "notes.csv"]
FILES += [".hidden.jsonl", "code/x.py", "code/y.TXT", "code/LICENSE"]
BY_NAME = r"/([^/]*)\.(?:jsonl|parquet)"


@pytest.fixture
def folder(tmp_path):
    for name in [*FILES, ".cache/g.jsonl"]:
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "texts"


def find(*inputs, **domains):
    """Find the sources of ``inputs``; keyword arguments are DomainOptions."""
    options: dict[str, Any] = {
        name: (tuple(value),) if isinstance(value, list) else value
        for name, value in domains.items()
    }
    source = SourceOptions((tuple(str(text) for text in inputs),))
    return find_sources(source, DomainOptions(**options) if domains else None)


def names(folder, found):
    return [(str(Path(source.path).relative_to(folder)), source.domain) for source in found]


def test_folders_are_searched_at_any_depth(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    for path in (".", "./", *READ_IN_FOLDERS):  # the name does not depend on the folder's spelling
        assert {source.name for source in find(path)} <= set(READ_IN_FOLDERS)
    assert names(folder, find(f"x={folder}")) == [(name, "x") for name in READ_IN_FOLDERS]
    assert names(folder, find(f"{folder}/[x].jsonl")) == [("[x].jsonl", None)]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "far.jsonl").touch()
    (folder / "link").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)  # a circular link
    found = [name for name, _ in names(folder, find(folder))]
    assert found == sorted([*READ_IN_FOLDERS, "link/far.jsonl"])


def test_folders_without_records_are_read_as_text(folder):
    (folder / "code/train.rs").touch()  # no split of the data
    with pytest.warns(UserWarning, match=r"1 of 4 files are not read \(1 without a suffix\)$"):
        found = find(f"x={folder}/code")
    assert names(folder, found) == [(f"code/{name}", "x") for name in ("train.rs", "x.py", "y.TXT")]


def test_text_beside_data_is_not_read_as_data(folder):
    (folder / "table").mkdir()
    (folder / "table/a.csv").touch()
    (folder / "table/README.md").touch()
    with (
        pytest.warns(UserWarning, match="2 of 2 files are not read"),
        pytest.raises(UserError, match=r"no file of a supported format.*to read text beside data"),
    ):
        find(f"x={folder}/table")
    assert names(folder, find(f"x={folder}/table/**/*.md")) == [("table/README.md", "x")]


def test_a_file_is_read_once_per_domain_under_different_names(folder):
    path = f"{folder}/a.jsonl"
    found = find(f"x={path}", f"x={folder}/a*.jsonl", f"y={path}", path, f"{folder}/b.JSONL")
    assert [(source.name, source.domain) for source in found] == [
        (f"x={path}", "x"),
        (f"y={path}", "y"),
        (f"={path}", None),
        (f"{folder}/b.JSONL", None),
    ]
    (folder / "lang=en").mkdir()  # here, the equals sign is part of the path
    (folder / "lang=en/a.jsonl").touch()
    assert names(folder, find(folder / "lang=en")) == [("lang=en/a.jsonl", None)]


@pytest.mark.parametrize(
    ("inputs", "options", "problem"),
    [
        ([], {}, "--input is empty"),
        (["x={f}/absent.jsonl"], {}, "no such file"),
        (["x={f}/notes.csv"], {}, "unsupported format"),
        (["{f}/a.jsonl"], {"domain_from_config": True}, "has no domain"),
        (["x={f}/a.jsonl"], {"domain_key": "set"}, "--domain-key has no effect"),
        (["x={f}/a.jsonl"], {"valid_input": ["x={f}/a.jsonl"]}, "for all splits and for valid"),
        (["x={f}/s"], {}, "s.jsonl.gz: not a regular file"),
    ],
)
def test_wrong_inputs_are_rejected(folder, inputs, options, problem):
    (folder / "s").mkdir()
    os.mkfifo(folder / "s" / "s.jsonl.gz")

    def at(texts):
        return [text.replace("{f}", str(folder)) for text in texts]

    options = {n: at(value) if isinstance(value, list) else value for n, value in options.items()}
    with pytest.raises(UserError, match=problem) as raised:
        find(*at(inputs), **options)
    assert "\n" not in str(raised.value)


def test_domains_in_paths_can_be_renamed_or_left_out(folder):
    with pytest.warns(UserWarning, match=r"leaves out 1 files, of domains '\[x\]'"):
        found = find(
            f"a={folder}/b.JSONL",
            folder / "a.jsonl",
            folder / "sub",
            folder / "[x].jsonl",
            domain_from_path=BY_NAME,
            rename_domain=["c=one", "d=one", "p=p", "*=", "a=other"],
        )
    assert [domain for _, domain in names(folder, found)] == ["a", "other", "one", "one", "p"]


def test_all_input_is_for_training_if_valid_and_test_are_passed(folder):
    found = find(
        f"x={folder}/a.jsonl",
        f"y={folder}/a.jsonl",
        valid_input=[f"x={folder}/b.JSONL", f"y={folder}/b.JSONL"],
        test_input=[f"x={folder}/e.json"],
    )
    assert [(Path(source.path).stem, source.domain, source.split) for source in found] == [
        ("a", "x", "train"),
        ("a", "y", None),
        ("b", "x", "valid"),
        ("b", "y", "valid"),
        ("e", "x", "test"),
    ]
    held_out = {"valid_input": [f"{folder}/b.JSONL"], "test_input": [f"{folder}/sub/c.jsonl.gz"]}
    found = find(folder / "a.jsonl", domain_key="set", **held_out)
    assert [source.split for source in found] == ["train", "valid", "test"]


# Data sets


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_dataset(root, configs):
    """Write a data set folder; ``configs``: name -> split -> number of files of 3 documents."""
    header = ["---", "configs:"]
    for config, splits in configs.items():
        header += [f"- config_name: {config}", "  data_files:"]
        for split, number in splits.items():
            header += [f"  - split: {split}", f"    path: data/{config}/{split}-*"]
            for i in range(number):
                path = root / f"data/{config}/{split}-{i:05}-of-{number:05}.parquet"
                path.parent.mkdir(parents=True, exist_ok=True)
                texts = [f"{config} {split} {i} {j}" for j in range(3)]
                pq.write_table(pa.table({"text": texts}), path)
    (root / "README.md").write_text("\n".join([*header, "---", ""]))
    return root


def read(*inputs, domains=None):
    source = SourceOptions((inputs,))
    sources = find_sources(source, domains)
    reader = DocumentReader(source, sources, domains)
    return sources, [document for i in range(len(sources)) for document in reader.read(Chunk(i))]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:o/n@v1:c#s", DatasetName("o/n", "v1", "c", "s")),
        ("hf:o/n@refs/convert/parquet:*", DatasetName("o/n", "refs/convert/parquet", "*")),
        ("hf:/a@b/c:d", DatasetName("/a@b/c", config="d")),
        ("hf:/a:b/c", DatasetName("/a:b/c")),
    ],
)
def test_data_set_names_are_parsed(text, name):
    assert DatasetName.parse(text) == name
    assert str(name) == text


def test_configs_can_be_domains_with_their_own_splits(tmp_path, own_cache, monkeypatch):
    configs = {"en": {"train": 2, "dev": 1, "test": 1}, "fr": {"train": 1, "val": 1}}
    root = write_dataset(tmp_path / "set@v1:en", configs)
    renamed = DomainOptions(domain_from_config=True, rename_domain=(("en=english",),))
    _, found = read(f"hf:{root}:*", domains=renamed)
    assert [tuple(document) for document in found] == [
        (domain, f"{config} {split} {i} {j}", role)
        for domain, config, split, count, role in (
            ("english", "en", "train", 2, "train"),
            ("english", "en", "dev", 1, "valid"),
            ("english", "en", "test", 1, "test"),
            ("fr", "fr", "train", 1, None),
            ("fr", "fr", "val", 1, "valid"),
        )
        for i in range(count)
        for j in range(3)
    ]
    assert len(read(f"hf:{root}:en")[1]) == 6  # these are the files of the train split
    monkeypatch.chdir(tmp_path)
    assert DatasetName.parse(f"hf:{root.name}#dev") == DatasetName(root.name, split="dev")


def test_files_of_data_sets_are_read_like_files_and_other_formats_streamed(tmp_path, own_cache):
    root = tmp_path / "lines"
    root.mkdir()
    (root / "train.jsonl").write_bytes(b'{"text": "a"}\n{bad\n{"text": "b", "more": 1}\n')
    (root / "test.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    sources, found = read(f"a=hf:{root}", domains=DomainOptions())
    assert [(s.kind, s.cuttable) for s in sources] == [("lines", True), ("lines", False)]
    assert [document.text for document in found] == ["a", "b", "c"]
    assert sources[0].dataset == f"hf:{root}:default#train"

    root = tmp_path / "tables"
    root.mkdir()
    for name, rows in {"train-0": ["a", "b\nc"], "train-1": ["d"], "test": ["e"]}.items():
        lines = [f'"{row}",web' for row in rows]
        (root / f"{name}.csv").write_text("\n".join(["text,set", *lines, ""]))
    sources, found = read(f"hf:{root}", domains=DomainOptions(domain_key="set"))
    shards = [(source.kind, source.shard, source.num_shards) for source in sources]
    assert shards == [("dataset", 0, 2), ("dataset", 1, 2), ("dataset", 0, 1)]
    assert len({source.name for source in sources}) == 3
    train = [Document("web", text) for text in ("a", "b\nc", "d")]
    assert found == [*train, Document("web", "e", "test")]

    root = tmp_path / "dotted"
    root.mkdir()
    (root / "train.csv").write_text("text.a,text.b\nd,e\n")
    with pytest.raises(UserError, match=r"no column 'text'; existing columns: text\.a, text\.b"):
        read(f"a=hf:{root}", domains=DomainOptions())

    root = tmp_path / "array"
    root.mkdir()
    records = [{"text": "a", "meta": {"set": "x"}}, {"text": None, "meta": {"set": "y"}}]
    (root / "train.json").write_text(json.dumps(records))
    _, found = read(f"hf:{root}", domains=DomainOptions(domain_key="meta.set"))
    assert found == [Document("x", "a"), Document("y", "")]


@pytest.mark.filterwarnings("ignore:.*skipping")
def test_saved_data_sets_are_read_in_the_order_of_their_rows(tmp_path, own_cache):
    rows = [{"text": f"row {n}"} for n in range(30)]
    one, two = datasets.Dataset.from_list(rows), datasets.Dataset.from_list(rows[:4])
    one.save_to_disk(tmp_path / "one", num_shards=11)
    (tmp_path / "one/stale.arrow").write_bytes(b"")
    _, found = read(f"a=hf:{tmp_path / 'one'}", domains=DomainOptions())
    assert [document.text for document in found] == [row["text"] for row in rows]
    datasets.DatasetDict(train=one, test=two).save_to_disk(tmp_path / "both")
    sources, found = read(f"a=hf:{tmp_path / 'both'}", domains=DomainOptions())
    assert {source.split for source in sources} == {None, "test"}
    assert len(found) == 34
    with pytest.raises(UserError, match="hf:FOLDER"):
        find(f"a={tmp_path / 'one'}")


def test_absent_data_sets_configs_and_splits_are_rejected(tmp_path, own_cache):
    root = write_dataset(tmp_path / "set", {"en": {"train": 1}, "fr": {"dev": 1}})
    for name, problem in {
        f"{root}": r"\['en', 'fr'\].*:CONFIG",
        f"{root}:en#valid": "existing splits: train",
        f"{root}:fr": "#SPLIT",
        f"{tmp_path}/absent": "Couldn't find",
        "": "OWNER/NAME",
    }.items():
        with pytest.raises(UserError, match=problem) as raised:
            find(f"a=hf:{name}")
        assert str(raised.value).startswith("hf:")
        assert "\n" not in str(raised.value)


ON_THE_HUB = """
import sys
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import Chunk, find_sources
from megatron_chameleon.errors import UserError

for name in sys.argv[1:]:
    options, domains = SourceOptions(((name,),)), DomainOptions(domain_from_config=True)
    try:
        sources = find_sources(options, domains)
        reader = DocumentReader(options, sources, domains)
        for number, source in enumerate(sources):
            documents = [*reader.read(Chunk(number))]
            if source.cuttable and source.kind == "lines":
                halves = [Chunk(number, 0, 12), Chunk(number, 12, None)]
                assert documents == [doc for half in halves for doc in reader.read(half)]
            print(source.dataset, source.path, source.bytes, source.split, len(documents))
    except UserError as error:
        print("error:", error)
"""


def test_data_sets_are_streamed_from_the_hub_at_a_revision(tmp_path):
    root, at = tmp_path / "hub" / "o", f"@{COMMIT}"
    write_dataset(root / "n", {"en": {"train": 2, "validation": 1, "test": 1}, "fr": {"train": 1}})
    for name in ("lines", "table"):
        (root / name).mkdir()
    (root / "lines/train.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    (root / "lines/test.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    (root / "table/train.csv").write_text("text\na\nb\n")
    with serve(root.parent) as (address, requests):
        names = ["o/n:*", "o/lines", "o/table", "o/absent", "o/n@v9:en"]
        own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", ON_THE_HUB, *(f"hf:{name}" for name in names)]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})
    assert ran.returncode == 0, ran.stderr
    *found, absent, no_revision = ran.stdout.splitlines()
    expected = [
        f"hf:o/n{at}:{config}#{split} hf://datasets/o/n{at}/{path.relative_to(root / 'n')} "
        f"{path.stat().st_size} {role} 3"
        for config, split, role in (
            ("en", "train", "train"),
            ("en", "validation", "valid"),
            ("en", "test", "test"),
            ("fr", "train", None),
        )
        for path in sorted((root / "n/data" / config).glob(f"{split}-*"))
    ]
    lines = f"hf:o/lines{at}:default"
    assert found == [
        *expected,
        f"{lines}#train hf://datasets/o/lines{at}/train.jsonl 28 None 2",
        f"{lines}#test hf://datasets/o/lines{at}/test.jsonl.gz 34 test 1",
        f"hf:o/table{at}:default#train hf:o/table{at}:default#train 0 None 2",
    ]
    assert "hf auth login" in absent
    assert "'v9'" in no_revision
    # Files are requested at the commit in their addresses, not at main.
    assert not [request for request in requests if "/main/" in request and "README" not in request]
