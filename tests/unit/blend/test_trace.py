"""Compare traced samples with the batches that training runs read."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from megatron_chameleon.artifacts import Corpus, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.artifacts.training_run import BatchLayout
from megatron_chameleon.blend import trace as trace_module
from megatron_chameleon.blend.options import DataOptions, TraceOptions
from megatron_chameleon.blend.trace import RunTrace, trace_samples
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.options import (
    EncoderOptions,
    ImportOptions,
    PreprocessOptions,
    SourceOptions,
)
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.online.options import OnlineOptions, hook_class
from megatron_chameleon.training.options import OptimizerOptions, PretrainOptions
from megatron_chameleon.training.trainer import pretrain
from tests.recorded_batches import recorded_batches, traced_batches, traced_rows
from tests.unit.corpus.corpus_making import documents_of

# As --data-path without weights, 48 samples are read within an epoch; with weights, one sample more
# is built, which begins another.
STEPS, SAVE_INTERVAL, BATCH = 8, 4, 6
WORDS = 90


@pytest.fixture(autouse=True)
def _small_tables(monkeypatch):
    """List the rows of five samples at a time."""
    monkeypatch.setattr(trace_module, "_BLOCK_TOKENS", 5 * 16)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A corpus of two domains; every second line of domain a is blank, and its texts repeat."""
    root = tmp_path_factory.mktemp("traced")
    vocabulary = {f"w{word}": word for word in range(WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(root / "tokenizer.json"))
    rng = np.random.default_rng(0)
    texts = {
        name: [
            " ".join(f"w{word}" for word in rng.integers(0, WORDS, rng.integers(3, 40)))
            for _ in range(count)
        ]
        for name, count in (("a", 40), ("b", 25))
    }
    texts["a"] += texts["a"][:5]
    lines = {name: [json.dumps({"text": text}) for text in of] for name, of in texts.items()}
    (root / "a.jsonl").write_text("\n\n".join(lines["a"]))
    (root / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines["b"]).encode()))
    inputs = (f"a={root / 'a.jsonl'}", f"b={root / 'b.jsonl.gz'}")
    options = PreprocessOptions(
        SourceOptions((inputs,)),
        root / "corpus",
        root / "tokenizer.json",
        encoding=EncoderOptions(encoder="own"),
        split="60,20,20",
        workers=1,
    )
    preprocess_data(options)
    return Corpus.load(root / "corpus")


def options_of(corpus, run_dir, data, **changes):
    settings = {
        "corpus": None if data.uses_data_path else corpus.root,
        "model": "nano",
        "seq_length": 16,
        "train_iters": STEPS,
        "global_batch_size": BATCH,
        "micro_batch_size": 2,
        "log_interval": 2,
        "save_interval": SAVE_INTERVAL,
        "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
        "data": data,
    }
    return PretrainOptions(run_dir=run_dir, **{**settings, **changes})


def test_traced_samples_are_those_that_training_read(corpus, tmp_path):
    (tmp_path / "mixture.json").write_text('{"weights": {"a": 0.1, "b": 0.9}}')
    tokenizer, moved_tokenizer = tmp_path / "tokenizer.json", tmp_path / "moved.json"
    shutil.copy(corpus.root / corpus.tokenizer.file, tokenizer)
    prefixes = " ".join(str(corpus.prefix(name, "train")) for name in corpus.names)
    changes = ((f"1..5={tmp_path / 'mixture.json'}",), ("6=uniform",))
    online = OnlineOptions(online="odm", online_interval=1, online_warmup_iters=1)
    cases = {
        "megatron": DataOptions(),
        "data path": DataOptions(data_path=prefixes, split="9,1,0", tokenizer_model=tokenizer),
        "resumed": DataOptions(permutation="epoch", mixture_change=changes),
        "online": DataOptions(permutation="feistel"),
    }
    for name, data in cases.items():
        more = {"online": online, "target_tokens": 2 * STEPS * BATCH * 16}
        options = options_of(corpus, tmp_path / name, data, **(more if name == "online" else {}))
        with recorded_batches() as read:
            pretrain(options, hook_class(options.online.online))
        if name == "resumed":
            shutil.rmtree(step_folder(options.run_dir, STEPS))
            with recorded_batches() as later:
                pretrain(dataclasses.replace(options, micro_batch_size=1))
            before = {place: read[place] for place in read if place[0] <= SAVE_INTERVAL}
            read = before | later
        run = TrainingRun.load(options.run_dir)
        trace = RunTrace(run)
        assert traced_batches(trace, 1, STEPS) == read, name
        if name == "data path":  # the run had no weights, which decides its order
            weighted = " ".join(f"0.5 {corpus.prefix(name, 'train')}" for name in corpus.names)
            text = trace.text(0, 0)
            tokenizer.rename(moved_tokenizer)
            moved = RunTrace(run, data_path=weighted)
            assert traced_batches(moved, 1, STEPS) == read
            with pytest.raises(UserError, match="--tokenizer-model"):
                moved.text(0, 0)
            assert RunTrace(run, tokenizer_model=moved_tokenizer).text(0, 0) == text
        some = {place: windows for place, windows in read.items() if 3 <= place[0] <= 5}
        assert traced_batches(trace, 3, 5) == some
        expected = [BatchLayout(0, 1, 2)] + [BatchLayout(4, 1, 1)] * (name == "resumed")
        assert run.batch_layouts == expected
        assert_counts_are_those_of_the_rows(trace)


def assert_counts_are_those_of_the_rows(trace):
    """Compare with loops over the rows, whose first token of each sample is not predicted."""
    tokens: dict[tuple[str, int], int] = {}
    samples: dict[tuple[str, int], set[int]] = {}
    before = None
    for line in traced_rows(trace, 2, STEPS).itertuples():
        count = line.stop_token - line.first_token - (line.sample != before)
        before = line.sample
        if count:
            key = line.domain, line.document
            tokens[key] = tokens.get(key, 0) + count
            samples.setdefault(key, set()).add(line.sample)
    counts = trace.counts(2, STEPS)
    found = {(line.domain, line.document): line for line in counts.itertuples()}
    assert {key: line.tokens for key, line in found.items()} == tokens
    assert {key: line.samples for key, line in found.items()} == {
        key: len(those) for key, those in samples.items()
    }
    assert counts["tokens"].sum() == (STEPS - 1) * BATCH * trace.options.seq_length


@pytest.fixture(scope="module")
def run_dir(corpus, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run") / "run"
    pretrain(options_of(corpus, run_dir, DataOptions(permutation="epoch")))
    return run_dir


def written(tmp_path, **options):
    output = tmp_path / "trace.jsonl"
    trace_samples(TraceOptions(output=output, overwrite=True, **options))
    return pd.read_json(output, lines=True)


def source_words(row):
    """Words in the line of the source file that a row names."""
    file, _, number = row.source.rpartition(":")
    content = Path(file).read_bytes()
    content = gzip.decompress(content) if file.endswith(".gz") else content
    return json.loads(content.decode().split("\n")[int(number) - 1])["text"].split()


def test_document_is_found_with_its_source_line_and_its_steps(corpus, run_dir, tmp_path, capsys):
    rows = written(tmp_path, run=run_dir, steps="2:3", text=True, source_lines=True)
    for line in rows.itertuples():
        words = source_words(line)
        assert line.text.split() == words[line.first_token : line.stop_token]
        assert line.document_tokens == len(words) + 1
    text = documents_of(corpus, "b", "train")[8]
    trace = RunTrace(TrainingRun.load(run_dir))
    everything = traced_rows(trace, 1, STEPS)
    found = written(tmp_path, run=run_dir, find=text)
    expected = everything[(everything["domain"] == "b") & (everything["document"] == 8)]
    assert found["sample"].tolist() == expected["sample"].tolist()
    steps = ", ".join(map(str, expected["step"].unique()))
    assert f"b document 8: steps {steps}\n" in capsys.readouterr().out
    counted = written(tmp_path, run=run_dir, counts=True, find=text)
    count = trace.counts(1, STEPS).query("domain == 'b' and document == 8")
    assert counted["tokens"].tolist() == count["tokens"].tolist()
    assert written(tmp_path, run=run_dir, find="no such text").empty
    trace_samples(TraceOptions(run=run_dir, steps=f"1:{STEPS}", output=tmp_path / "trace.csv"))
    assert pd.read_csv(tmp_path / "trace.csv").equals(everything.astype(object).infer_objects())


def test_source_lines_of_a_corpus_with_linked_token_files(corpus, tmp_path):
    first = tmp_path / "first"
    shutil.copytree(corpus.root, first)
    import_corpus(ImportOptions(corpus=first, held_out="a", output=tmp_path / "linked"))
    linked, run = Corpus.load(tmp_path / "linked"), tmp_path / "run"
    pretrain(options_of(linked, run, DataOptions()))
    rows = written(tmp_path, run=run, steps="1", text=True, source_lines=True)
    assert len(rows)
    for row in rows.itertuples():
        assert "b.jsonl.gz:" in row.source
        assert row.text.split() == source_words(row)[row.first_token : row.stop_token]
    # The linked corpus has its own copies or links of the tokens; the sources are those of `first`.
    record = json.loads((first / "corpus.json").read_text())
    record["domains"]["a"]["train"]["sha256"] = "0" * 64
    del record["checksum"]
    (first / "corpus.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="first, which has changed"):
        written(tmp_path, run=run, steps="1", source_lines=True)
    shutil.rmtree(first)
    with pytest.raises(UserError, match="first"):
        written(tmp_path, run=run, steps="1", source_lines=True)


def test_user_errors(corpus, run_dir, tmp_path):
    moved = Path(shutil.copytree(corpus.root, tmp_path / "moved"))
    assert len(written(tmp_path, run=run_dir, steps="1", corpus=moved))
    record = json.loads((moved / "corpus.json").read_text())
    record["domains"]["a"]["train"]["sha256"] = "0" * 64
    del record["checksum"]
    (moved / "corpus.json").write_text(json.dumps(record))
    run = TrainingRun.load(run_dir)
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    dataclasses.replace(run, root=copy, order_version=1).save()
    damaged = tmp_path / "damaged"
    dataclasses.replace(run, root=damaged, mixture_phases=[]).save()
    for options, problem in (
        ({"run": run_dir, "steps": f"7:{STEPS + 1}"}, f"at step {STEPS} of {STEPS}"),
        ({"run": run_dir, "steps": "1", "corpus": moved}, "has changed"),
        ({"run": run_dir, "steps": "1", "corpus": tmp_path}, "no corpus"),
        ({"run": run_dir, "steps": "1", "data_path": "x"}, "--data-path"),
        ({"run": copy, "steps": "1"}, "version 1 of the sample order"),
        ({"run": damaged, "steps": "1"}, "mixture_phases"),
        ({"run": tmp_path, "steps": "1"}, "run.json"),
    ):
        with pytest.raises(UserError, match=problem):
            trace_samples(TraceOptions(**options))
    for steps, text in ((None, None), ("3:2", None), ("0:2", None), ("a", None), ("1", "")):
        with pytest.raises(UserError):
            TraceOptions(run=run_dir, steps=steps, find=text)
