from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_chameleon.artifacts import Split
from megatron_chameleon.corpus.hub_datasets import DatasetName, find_parts
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.records import Document
from megatron_chameleon.corpus.sources import Piece, find_sources
from megatron_chameleon.errors import UserError
from tests.unit.corpus.small_hub import COMMIT, serve

BY_CONFIG = DomainOptions(domain_from_config=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_dataset(root, configs):
    """A folder as on the hub; ``configs``: name -> split -> number of files of 3 documents."""
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


def texts(config, split, number):
    return [f"{config} {split} {i} {j}" for i in range(number) for j in range(3)]


def read(*inputs, domains=None, **options):
    source = SourceOptions((inputs,), **options)
    sources = find_sources(source, domains)
    reader = DocumentReader(source, sources, domains)
    return sources, [document for i in range(len(sources)) for document in reader.read(Piece(i))]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hf:o/n", DatasetName("o/n")),
        ("hf:n", DatasetName("n")),
        ("hf:o/n:c", DatasetName("o/n", config="c")),
        ("hf:o/n@v1:c#s", DatasetName("o/n", "v1", "c", "s")),
        ("hf:o/n@refs/convert/parquet:*", DatasetName("o/n", "refs/convert/parquet", "*")),
        ("hf:o/n#s", DatasetName("o/n", split="s")),
        ("hf:/a@b/c:d", DatasetName("/a@b/c", config="d")),
        ("hf:/a:b/c", DatasetName("/a:b/c")),
        ("hf:./n", DatasetName("./n")),
    ],
)
def test_names_are_taken_apart_and_put_together(given, expected):
    assert DatasetName.parse(given) == expected
    assert str(expected) == given


def test_splits_of_a_data_set_are_its_own(tmp_path):
    root = write_dataset(tmp_path / "set", {"en": {"test": 1, "train": 2, "validation": 1}})
    _, found = read(f"a=hf:{root}:en", domains=DomainOptions())
    assert found == [
        *(Document("a", text, "test") for text in texts("en", "test", 1)),
        *(Document("a", text, "train") for text in texts("en", "train", 2)),
        *(Document("a", text, "valid") for text in texts("en", "validation", 1)),
    ]


def test_all_configs_become_domains_each_with_the_splits_it_has(tmp_path):
    root = write_dataset(
        tmp_path / "set", {"en": {"train": 1, "dev": 1, "test": 1}, "fr": {"train": 1, "val": 1}}
    )
    renamed = DomainOptions(domain_from_config=True, rename_domain=(("en=english",),))
    sources, found = read(f"hf:{root}:*", domains=renamed)
    assert {(source.domain, source.split) for source in sources} == {
        ("english", "train"),
        ("english", "valid"),
        ("english", "test"),
        ("fr", None),
        ("fr", "valid"),
    }
    assert Document("fr", "fr val 0 0", "valid") in found
    assert len(found) == 15


ROLES: list[tuple[str, Split]] = [("train", "train"), ("extra", "valid"), ("more", "test")]


def test_a_split_can_be_named_for_any_role(tmp_path):
    root = write_dataset(tmp_path / "set", {"en": {"train": 1, "extra": 1, "more": 1}})
    options = DomainOptions(
        valid_input=((f"a=hf:{root}:en#extra",),), test_input=((f"a=hf:{root}:en#more",),)
    )
    _, found = read(f"a=hf:{root}:en#train", domains=options)
    assert found == [
        Document("a", text, role) for split, role in ROLES for text in texts("en", split, 1)
    ]


def test_a_held_out_input_takes_the_split_of_its_role(tmp_path):
    root = write_dataset(tmp_path / "set", {"en": {"train": 1, "validation": 1}})
    only = write_dataset(tmp_path / "only", {"en": {"train": 1}})
    options = DomainOptions(valid_input=((f"a=hf:{root}:en",),))
    _, found = read(f"a=hf:{only}:en", domains=options)
    assert [document.split for document in found] == [None] * 3 + ["valid"] * 3
    with pytest.raises(UserError, match=r"--test-input hf:.*: no such split; name one"):
        read(f"a=hf:{only}:en", domains=DomainOptions(test_input=((f"a=hf:{only}:en",),)))


def test_without_domains_only_what_is_for_training_is_read(tmp_path):
    root = write_dataset(tmp_path / "set", {"en": {"train": 2, "validation": 1, "test": 1}})
    assert [document.text for document in read(f"hf:{root}")[1]] == texts("en", "train", 2)


def test_files_of_a_data_set_are_read_as_files_are(tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    (root / "train.jsonl").write_bytes(b'{"text": "a"}\n{bad\n{"text": "b", "more": 1}\n')
    (root / "test.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    sources, found = read(f"a=hf:{root}", domains=DomainOptions())
    assert [(source.kind, source.cuttable) for source in sources] == [
        ("lines", True),
        ("lines", False),
    ]
    assert [document.text for document in found] == ["a", "b", "c"]
    assert sources[0].dataset == f"hf:{root}:default#train"


def test_other_formats_are_streamed_shard_by_shard(tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for name, rows in {"train-0": ["a", "b\nc"], "train-1": ["d"], "test": ["e"]}.items():
        lines = [f'"{row}",{{set}}' for row in rows]
        (root / f"{name}.csv").write_text("\n".join(["text,set", *lines, ""]).format(set="web"))
    sources, found = read(f"hf:{root}", domains=DomainOptions(domain_key="set"))
    assert [(source.kind, source.shard, source.num_shards) for source in sources] == [
        ("dataset", 0, 2),
        ("dataset", 1, 2),
        ("dataset", 0, 1),
    ]
    assert len({source.name for source in sources}) == 3
    assert found == [
        Document("web", "a"),
        Document("web", "b\nc"),
        Document("web", "d"),
        Document("web", "e", "test"),
    ]
    with pytest.raises(UserError, match=r"1 of 2\) has no column"):
        read(f"a=hf:{root}", domains=DomainOptions(), text_key="txt")


def test_a_file_that_is_one_large_array_is_streamed_too(tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    records = [{"text": "a", "meta": {"set": "x"}}, {"text": None, "meta": {"set": "y"}}]
    (root / "train.json").write_text(json.dumps(records))
    _, found = read(f"hf:{root}", domains=DomainOptions(domain_key="meta.set"))
    assert found == [Document("x", "a"), Document("y", "")]


@pytest.mark.filterwarnings("ignore:.*skipping")
def test_what_cannot_be_found_is_told_with_what_there_is(tmp_path):
    root = write_dataset(tmp_path / "set", {"en": {"train": 1}, "fr": {"dev": 1}})
    script = tmp_path / "script"
    script.mkdir()
    (script / "script.py").write_text("import datasets\n")
    (tmp_path / "empty").mkdir()
    for given, problem in {
        f"{root}": r"available configs: \['en', 'fr'\].* add :CONFIG, or :\* for all of them",
        f"{root}:de": r"'de' not found. Available: \['en', 'fr'\]",
        f"{root}:en#valid": "no such split; existing splits: train",
        f"{root}:fr": r"has no split 'train'; name one of dev as hf:.*:fr#SPLIT",
        f"{tmp_path}/absent": "Couldn't find any data file",
        f"{tmp_path}/empty": "doesn't contain any data files",
        f"{script}": "scripts are no longer supported.*refs/convert/parquet",
        "": "must be hf:OWNER/NAME",
    }.items():
        with pytest.raises(UserError, match=problem) as told:
            find_parts(f"hf:{given}")
        assert str(told.value).startswith("hf:")
        assert "\n" not in str(told.value)


ON_THE_HUB = """
import sys
from megatron_chameleon.corpus.sources import Piece
from megatron_chameleon.corpus.readers import DocumentReader
from megatron_chameleon.corpus.sources import find_sources
from megatron_chameleon.errors import UserError
from megatron_chameleon.corpus.options import DomainOptions, SourceOptions
from tests.unit.corpus.small_hub import COMMIT, serve

for given in sys.argv[1:]:
    options, domains = SourceOptions(((given,),)), DomainOptions(domain_from_config=True)
    try:
        sources = find_sources(options, domains)
        reader = DocumentReader(options, sources, domains)
        for number, source in enumerate(sources):
            documents = [*reader.read(Piece(number))]
            if source.cuttable and source.kind == "lines":
                halves = [Piece(number, 0, 12), Piece(number, 12, None)]
                assert documents == [doc for half in halves for doc in reader.read(half)]
            print(source.dataset, source.path, source.bytes, source.split, len(documents))
    except UserError as error:
        print("error:", error)
"""


def on_the_hub(tmp_path, address, *given, **environment):
    """What reading data sets by name prints, in a process that takes ``address`` for the hub."""
    own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    env = {**os.environ, **own, **environment}
    ran = subprocess.run(
        [sys.executable, "-c", ON_THE_HUB, *given], capture_output=True, text=True, env=env
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_data_sets_are_streamed_from_the_hub_at_a_revision(tmp_path):
    root = tmp_path / "hub"
    english = {"train": 2, "validation": 1, "test": 1}
    write_dataset(root / "o/n", {"en": english, "fr": {"train": 1}})
    (root / "o/lines").mkdir()
    (root / "o/lines/train.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    (root / "o/lines/test.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))
    (root / "o/table").mkdir()
    (root / "o/table/train.csv").write_text("text\na\nb\n")
    (root / "o/gated").mkdir()
    with serve(root, gated=["o/gated"]) as (address, requests):
        given = ["o/n:*", "o/lines", "o/table", "o/gated", "o/absent", "o/n@v9:en"]
        told = on_the_hub(tmp_path, address, *(f"hf:{name}" for name in given))
    at = f"@{COMMIT}"
    assert told[:5] == [
        f"hf:o/n{at}:{config}#{split} hf://datasets/o/n{at}/data/{config}/{file} "
        f"{(root / 'o/n/data' / config / file).stat().st_size} {role} 3"
        for config, split, file, role in (
            ("en", "train", "train-00000-of-00002.parquet", "train"),
            ("en", "train", "train-00001-of-00002.parquet", "train"),
            ("en", "validation", "validation-00000-of-00001.parquet", "valid"),
            ("en", "test", "test-00000-of-00001.parquet", "test"),
            ("fr", "train", "train-00000-of-00001.parquet", None),
        )
    ]
    lines = f"hf:o/lines{at}:default"
    assert told[5:7] == [
        f"{lines}#train hf://datasets/o/lines{at}/train.jsonl 28 None 2",
        f"{lines}#test hf://datasets/o/lines{at}/test.jsonl.gz 34 test 1",
    ]
    assert told[7] == f"hf:o/table{at}:default#train hf:o/table{at}:default#train 0 None 2"
    assert "'o/gated' is a gated dataset" in told[8]
    assert "log in with 'hf auth login'" in told[8]
    assert "'o/absent' doesn't exist on the Hub or cannot be accessed; correct the name" in told[9]
    assert "Revision 'v9' doesn't exist" in told[10]
    assert len(told) == 11
    # What a file holds is asked for at the commit that its address names, whatever main is by then.
    assert not [request for request in requests if "/main/" in request and "README" not in request]
