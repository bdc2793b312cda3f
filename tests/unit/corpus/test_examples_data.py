"""Recipes of examples/data on small files with the schemas of the real data."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_chameleon.artifacts import SPLITS, Corpus
from tests.unit.corpus.corpus_making import documents_of

RECIPES = Path(__file__).resolve().parents[3] / "examples" / "data"
SLIMPAJAMA = {
    **{f"RedPajama{name}": name.lower() for name in ("ArXiv", "Book", "C4", "Github", "Wikipedia")},
    "RedPajamaStackExchange": "stackexchange",
    "RedPajamaCommonCrawl": "cc",
}
PILE = [
    *("ArXiv", "DM Mathematics", "Enron Emails", "EuroParl", "FreeLaw", "Github", "HackerNews"),
    *("Gutenberg (PG-19)", "NIH ExPorter", "PhilPapers", "Pile-CC", "PubMed Abstracts"),
    *("PubMed Central", "StackExchange", "USPTO Backgrounds", "Ubuntu IRC", "Wikipedia (en)"),
]
PILE_UNUSED = ("Books3", "OpenWebText2", "YoutubeSubtitles", "OpenSubtitles", "BookCorpus2")
WIKI40B = {"de": "german", "es": "spanish", "fr": "french", "it": "italian"}
WIKI40B |= {"nl": "dutch", "pl": "polish", "pt": "portuguese"}
STACK = {name: name for name in ("python", "java", "c", "go", "ruby", "php")} | {"c++": "cpp"}
# Documents per domain in each split.
COUNTS = {"train": 3, "validation": 2, "test": 1}


@pytest.fixture
def run(tmp_path, tokenizer_json):
    """``run(recipe, INPUT, *flags, **environment)``: the finished process."""

    def run(recipe, given, *flags, **environment):
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "INPUT": str(given),
            "OUTPUT": str(tmp_path / "corpus"),
            "TOKENIZER": str(tokenizer_json),
            "WORKERS": "1",
        }
        environment = {**os.environ, **own, **environment}
        command = ["bash", str(RECIPES / f"{recipe}.sh"), *flags]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True
        )

    return run


def texts(seed, count):
    rng = random.Random(seed)
    return [f"{seed}| {i} {rng.random()} some words" for i in range(count)]


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        path.write_bytes(zstandard.compress(lines.encode()))


def write_mixed(pattern, names, key):
    """Two files a split with documents of all domains, shuffled as in the real data."""
    for split, count in COUNTS.items():
        records = [
            {"text": text, "meta": {key: name}}
            for name in names
            for text in texts(f"{name} {split}", count)
        ]
        random.Random(0).shuffle(records)
        for i in range(2):
            write(Path(pattern.format(split=split, i=i)), records[i::2])


def write_readme(root, folders):
    """The header of a data set on the hub; ``folders``: config -> folder of its files."""
    lines = ["---", "configs:"]
    for config, folder in folders.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in COUNTS:
            lines += [f"  - split: {split}", f"    path: {folder}/{split}-*"]
    (root / "README.md").write_text("\n".join([*lines, "---", ""]))


def contents(folder):
    """Domain -> counts of the sources and splits that its texts name."""
    corpus = Corpus.load(folder / "corpus")
    found: dict[str, Counter[str]] = {name: Counter() for name in corpus.names}
    for name, counts in found.items():
        for split in SPLITS:
            for text in documents_of(corpus, name, split):
                *source, own_split = text.split("|")[0].split()
                counts.update([" ".join(source), f"{own_split} in {split}"])
    return found


def with_own_splits(names):
    """Expected contents of data with ``COUNTS``; ``names`` maps the source's domains to ours."""
    splits = {"train in train": 3, "validation in valid": 2, "test in test": 1}
    return {ours: Counter({theirs: 6, **splits}) for theirs, ours in names.items()}


def test_slimpajama_6b(tmp_path, run):
    """Parquet files by split, meta a struct, a README that lists them."""
    root = tmp_path / "slimpajama-6b"
    pattern = f"{root}/data/{{split}}-{{i:05}}-of-00002.parquet"
    write_mixed(pattern, SLIMPAJAMA, "redpajama_set_name")
    write_readme(root, {"default": "data"})
    assert run("slimpajama_6b", f"hf:{root}").returncode == 0
    assert contents(tmp_path) == with_own_splits(SLIMPAJAMA)


def test_pile(tmp_path, run):
    """Compressed JSON lines; five domains are not used."""
    root, pattern = tmp_path / "pile", f"{tmp_path}/pile/{{split}}/{{i:02}}.jsonl.zst"
    write_mixed(pattern, [*PILE, *PILE_UNUSED], "pile_set_name")
    for split, name in (("validation", "val"), ("test", "test")):  # one file each
        files = [root / split / f"{i:02}.jsonl.zst" for i in range(2)]
        (root / f"{name}.jsonl.zst").write_bytes(b"".join(file.read_bytes() for file in files))
    assert run("pile", root).returncode == 0
    ours = {name: re.sub(r"\W+", "_", name.lower()).strip("_") for name in PILE}
    assert contents(tmp_path) == with_own_splits(ours)


def test_wiki40b(tmp_path, run):
    """A configuration per language; some are not used."""
    root, languages = tmp_path / "wiki40b", [*WIKI40B, "en", "zh-cn"]
    for language in languages:
        for split, count in COUNTS.items():
            found = texts(f"{language} {split}", count)
            rows = [{"wikidata_id": "Q1", "text": f"\n_START_ARTICLE_\n{text}"} for text in found]
            write(root / f"{language}/{split}-00000-of-00001.parquet", rows)
    write_readme(root, {language: language for language in languages})
    assert run("wiki40b", f"hf:{root}").returncode == 0
    starts = {f"_START_ARTICLE_ {theirs}": ours for theirs, ours in WIKI40B.items()}
    assert contents(tmp_path) == with_own_splits(starts)


def test_stack(tmp_path, run):
    """A folder per language, some not used; no splits; text in `content`."""
    root = tmp_path / "data/the-stack-dedup"
    for language in [*STACK, "c-sharp", "cobol"]:
        for i in range(2):
            found = texts(f"{language} either", 20 * i + 20)
            rows = [{"hexsha": "0", "lang": language.title(), "content": text} for text in found]
            write(root / f"data/{language}/data-{i:05}-of-00002.parquet", rows)
    assert run("stack", root, "--split", "60,20,20").returncode == 0
    found = contents(tmp_path)
    assert found.keys() == set(STACK.values())
    for theirs, ours in STACK.items():
        assert found[ours][theirs] == 40  # the 20 of the first file are in the second one too
        assert min(found[ours][f"either in {split}"] for split in SPLITS) > 1
