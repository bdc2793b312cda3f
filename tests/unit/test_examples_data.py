"""Recipes of examples/data on small files with the schemas of the real data."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_chameleon.artifacts import SPLITS, Corpus
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "data"

SLIMPAJAMA = {
    "RedPajamaArXiv": "arxiv",
    "RedPajamaBook": "book",
    "RedPajamaCommonCrawl": "cc",
    "RedPajamaC4": "c4",
    "RedPajamaGithub": "github",
    "RedPajamaStackExchange": "stackexchange",
    "RedPajamaWikipedia": "wikipedia",
}
PILE = {
    "ArXiv": "arxiv",
    "DM Mathematics": "dm_mathematics",
    "Enron Emails": "enron_emails",
    "EuroParl": "europarl",
    "FreeLaw": "freelaw",
    "Github": "github",
    "Gutenberg (PG-19)": "gutenberg_pg_19",
    "HackerNews": "hackernews",
    "NIH ExPorter": "nih_exporter",
    "PhilPapers": "philpapers",
    "Pile-CC": "pile_cc",
    "PubMed Abstracts": "pubmed_abstracts",
    "PubMed Central": "pubmed_central",
    "StackExchange": "stackexchange",
    "USPTO Backgrounds": "uspto_backgrounds",
    "Ubuntu IRC": "ubuntu_irc",
    "Wikipedia (en)": "wikipedia_en",
}
WIKI40B = {
    "fr": "french",
    "de": "german",
    "it": "italian",
    "es": "spanish",
    "pt": "portuguese",
    "nl": "dutch",
    "pl": "polish",
}
STACK = {
    "python": "python",
    "java": "java",
    "c": "c",
    "c++": "cpp",
    "go": "go",
    "ruby": "ruby",
    "php": "php",
}
# Documents per domain in each split.
COUNTS = {"train": 3, "validation": 2, "test": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(byte_level_bpe(iter(["some words to merge"] * 3), 300, "<|endoftext|>"))
    return path


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Callable[..., Corpus | None]:
    """``run(recipe, INPUT, *flags, **environment)``: the corpus, if it is complete."""

    def run(recipe: str, given: str, *flags: str, **environment: str) -> Corpus | None:
        output = tmp_path / "corpus"
        own = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "1",
            "INPUT": given,
            "OUTPUT": str(output),
            "TOKENIZER": str(tokenizer),
            "WORKERS": "1",
        }
        ran = subprocess.run(
            ["bash", str(RECIPES / f"{recipe}.sh"), *flags],
            env={**os.environ, **own, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        return Corpus.load(output) if (output / "corpus.json").exists() else None

    return run


def texts(seed: str, count: int) -> list[str]:
    rng = random.Random(seed)
    return [f"{seed}| {i} {rng.random()} some words" for i in range(count)]


def mixed_records(names: Sequence[str], key: str, split: str, count: int) -> list[dict[str, Any]]:
    """Documents of all domains, shuffled as in the real data."""
    records = [
        {"text": text, "meta": {key: name}}
        for name in names
        for text in texts(f"{name} {split}", count)
    ]
    random.Random(0).shuffle(records)
    return records


def write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(records), path)


def write_zst(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(zstandard.compress(lines.encode()))


def contents(corpus: Corpus) -> dict[str, Counter[str]]:
    """Domain -> counts of the sources and splits that its texts name."""
    tokenizer = corpus_tokenizer(corpus)
    found: dict[str, Counter[str]] = {}
    for name in corpus.names:
        found[name] = Counter()
        for split in SPLITS:
            dataset = open_tokens(corpus, name, split)
            for index in range(len(dataset)):
                text = tokenizer.decode(dataset.get(index)[:-1].tolist())
                found[name][f"{text.split('|')[0].split()[-1]} in {split}"] += 1
                found[name][" ".join(text.split("|")[0].split()[:-1])] += 1
    return found


def with_own_splits(names: dict[str, str]) -> dict[str, Counter[str]]:
    """Expected contents of data with ``COUNTS``; ``names`` maps the source's domains to ours."""
    splits = {"train in train": 3, "validation in valid": 2, "test in test": 1}
    return {ours: Counter({theirs: 6, **splits}) for theirs, ours in names.items()}


def test_slimpajama_6b(tmp_path, run):
    """Parquet files by split, meta a struct, a README that lists them."""
    root, header = tmp_path / "slimpajama-6b", ["---", "configs:", "- config_name: default"]
    header.append("  data_files:")
    for split, count in COUNTS.items():
        records = mixed_records(list(SLIMPAJAMA), "redpajama_set_name", split, count)
        rows = [{**record, "__index_level_0__": i} for i, record in enumerate(records)]
        write_parquet(root / f"data/{split}-00000-of-00002-ab12.parquet", rows[::2])
        write_parquet(root / f"data/{split}-00001-of-00002-cd34.parquet", rows[1::2])
        header += [f"  - split: {split}", f"    path: data/{split}-*"]
    (root / "README.md").write_text("\n".join([*header, "---", "# SlimPajama"]))
    corpus = run("slimpajama_6b", f"hf:{root}")
    assert contents(corpus) == with_own_splits(SLIMPAJAMA)


def write_slimpajama_627b(root: Path) -> None:
    for split, count in COUNTS.items():
        records = mixed_records(list(SLIMPAJAMA), "redpajama_set_name", split, count)
        for chunk in (1, 2):
            name = f"{split}/chunk{chunk}/example_{split}_0.jsonl.zst"
            write_zst(root / name, records[chunk - 1 :: 2])


def test_slimpajama_627b_on_two_machines(tmp_path, run):
    """Compressed JSON lines in folders by split and chunk, on two machines."""
    write_slimpajama_627b(tmp_path / "slimpajama")
    given, small = str(tmp_path / "slimpajama"), ("--shard-bytes", "500")
    for shard in ("1/2", "2/2"):
        assert run("slimpajama_627b", given, *small, SHARD=shard) is None
    corpus = run("slimpajama_627b", given, *small)
    assert contents(corpus) == with_own_splits(SLIMPAJAMA)


def test_pile(tmp_path, run):
    """Compressed JSON lines; five domains are not used."""
    root, unwanted = tmp_path / "pile", ["Books3", "OpenWebText2", "YoutubeSubtitles"]
    names = [*PILE, *unwanted, "OpenSubtitles", "BookCorpus2"]
    records = mixed_records(names, "pile_set_name", "train", 3)
    write_zst(root / "train/00.jsonl.zst", records[::2])
    write_zst(root / "train/01.jsonl.zst", records[1::2])
    write_zst(root / "val.jsonl.zst", mixed_records(names, "pile_set_name", "validation", 2))
    write_zst(root / "test.jsonl.zst", mixed_records(names, "pile_set_name", "test", 1))
    corpus = run("pile", str(root))
    assert contents(corpus) == with_own_splits(PILE)


def test_wiki40b(tmp_path, run):
    """A configuration per language; some are not used."""
    root, header = tmp_path / "wiki40b", ["---", "configs:"]
    for language in [*WIKI40B, "en", "zh-cn"]:
        header += [f"- config_name: {language}", "  data_files:"]
        for split, count in COUNTS.items():
            rows = [
                {"wikidata_id": "Q1", "text": f"\n_START_ARTICLE_\n{text}", "version_id": "1"}
                for text in texts(f"{language} {split}", count)
            ]
            write_parquet(root / f"{language}/{split}-00000-of-00001.parquet", rows)
            header += [f"  - split: {split}", f"    path: {language}/{split}-*"]
    (root / "README.md").write_text("\n".join([*header, "---", ""]))
    corpus = run("wiki40b", f"hf:{root}")
    starts = {f"_START_ARTICLE_ {theirs}": ours for theirs, ours in WIKI40B.items()}
    assert contents(corpus) == with_own_splits(starts)


def test_stack(tmp_path, run):
    """A folder per language, some not used; no splits; text in `content`."""
    root = tmp_path / "data/the-stack-dedup"
    for language in [*STACK, "c-sharp", "cobol"]:
        for i in range(2):
            rows = [
                {"hexsha": "0", "size": len(text), "lang": language.title(), "content": text}
                for text in texts(f"{language} either", 20 * i + 20)
            ]
            write_parquet(root / f"data/{language}/data-{i:05}-of-00002.parquet", rows)
    corpus = run("stack", str(root), "--split", "60,20,20")
    found = contents(corpus)
    for theirs, ours in STACK.items():
        assert found[ours][theirs] == 40  # the 20 of the first file are in the second one too
        assert min(found[ours][f"either in {split}"] for split in SPLITS) > 1
    assert len(found) == len(STACK)


@pytest.mark.parametrize("recipe", ["pile", "wiki40b"])
def test_missing_data_is_reported(tmp_path, tokenizer, recipe):
    own = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZER": str(tokenizer),
    }
    command = ["bash", str(RECIPES / f"{recipe}.sh")]
    ran = subprocess.run(
        command, env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert len(ran.stderr.splitlines()) == 1
    assert "no such file or folder" in ran.stderr or "on the Hub" in ran.stderr
