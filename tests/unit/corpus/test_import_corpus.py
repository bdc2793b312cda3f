"""Corpora over existing .bin/.idx files, compared with plain reads of Megatron's own files."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_chameleon.artifacts import SPLITS, Corpus, Mixture, Protocol
from megatron_chameleon.blend import BlendedTokens, MixtureSchedule
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.corpus.data_path import DataPath
from megatron_chameleon.corpus.domains import open_data_path, open_domains
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.join import document_bytes, token_bytes
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.corpus.train_tokenizer import byte_level_bpe
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.perplexity import held_out_domain
from megatron_chameleon.interchange import ConvertOptions, write_blend
from megatron_chameleon.interchange.convert import converted_text
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from tests.small_corpus import EOD, word_tokenizer
from tests.unit.corpus.corpus_making import make_corpus, regrouped, tokens_of
from tests.unit.corpus.test_indexed import build

SPLIT, WEIGHTS = "80,12,8", (0.3, 0.5, 0.1, 0.1)
# File name -> (type, kind). A document of "several" has up to four sequences, the file "flat" has
# no document boundaries, and the file "whole" is a single document.
FILES = {
    "web": (np.uint16, "one"),
    "code": (np.int32, "several"),
    "old": (np.uint16, "flat"),
    "new": (np.int32, "whole"),
}


def write_files(folder: Path, count: int = 60) -> list[str]:
    """Write the files of FILES with Megatron's builder; return their prefixes."""
    rng = np.random.default_rng(3)
    prefixes = []
    for name, (dtype, kind) in FILES.items():
        prefix = str(folder / f"{name}_text_document")
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for _ in range(count):
            document = np.append(rng.integers(0, EOD, rng.integers(4, 90)), EOD)
            cuts = np.sort(rng.integers(1, document.size, rng.integers(4)))
            for part in np.split(document, cuts if kind == "several" else []):
                builder.add_item(torch.from_numpy(part.astype(np.int64)))
            for _ in range({"one": 1, "several": int(rng.integers(1, 3))}.get(kind, 0)):
                builder.end_document()  # the second call ends a document without sequences
        if kind == "whole":
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
        prefixes.append(prefix)
    return prefixes


@pytest.fixture
def options(tmp_path):
    """Options that import the files of FILES with WEIGHTS."""
    (tmp_path / "data").mkdir()
    pairs = zip(WEIGHTS, write_files(tmp_path / "data"), strict=True)
    return ImportOptions(
        data_path=" ".join(f"{weight} {prefix}" for weight, prefix in pairs),
        tokenizer_model=word_tokenizer(tmp_path / "tokenizer.json"),
        output=tmp_path / "corpus",
        split=SPLIT,
    )


@pytest.fixture
def imported(options):
    """The corpus of these options."""
    with pytest.warns(UserWarning, match="no document boundaries in 'old.*', 'new"):
        import_corpus(options)
    return Corpus.load(options.output)


def plain_documents(prefix: str, first: int, stop: int) -> list[list[int]]:
    """Join the sequences ``first`` to ``stop`` of a file to documents, one after the other."""
    raw = Path(f"{prefix}.idx").read_bytes()
    code, sequences, boundaries = struct.unpack("<BQQ", raw[17:34])
    tokens = np.fromfile(f"{prefix}.bin", {8: np.uint16, 4: np.int32}[code])
    lengths = np.frombuffer(raw, "<i4", sequences, 34)
    starts = np.frombuffer(raw, "<i8", boundaries, 34 + 12 * sequences).tolist()
    ends = np.cumsum(lengths)
    documents: list[list[int]] = []
    for sequence in range(first, stop):
        if sequence == first or sequence in starts or len(starts) <= 2:
            documents.append([])
        end = int(ends[sequence])
        documents[-1] += tokens[end - int(lengths[sequence]) : end].tolist()
    return documents


def test_every_split_holds_the_documents_of_its_range(imported):
    imported.verify()
    assert imported.names == [f"{name}_text_document" for name in FILES]
    for name in imported.names:
        end = 0
        for split in SPLITS:
            part = imported.domains[name].split(split)
            file = open_domains(imported).open(name, split)
            first, stop = part.sequences
            assert first == end < stop
            end = stop
            expected = plain_documents(part.prefix, first, stop)
            assert tokens_of(imported, name, split) == expected
            assert np.array_equal(file.starts, file.pointers // file.dtype.itemsize)
            assert file.tokens[:].tolist() == [token for document in expected for token in document]
            assert (part.documents, part.tokens) == (len(expected), file.tokens.size)
        total = imported.domains[name].test.sequences[1]
        assert total == struct.unpack("<Q", Path(f"{part.prefix}.idx").read_bytes()[18:26])[0]
    # The documents of several sequences are joined, except where a split cuts one of them.
    several = imported.domains["code_text_document"]
    assert 60 <= sum(several.split(split).documents for split in SPLITS) <= 62


@pytest.mark.parametrize("permutation", ["megatron", "epoch", "feistel"])
def test_samples_equal_those_of_data_path(imported, options, permutation):
    weights = Mixture.load(options.output / "data-path.json").weights_for(imported.names, "")
    assert weights == list(WEIGHTS)
    path = DataPath.parse(options.data_path)
    for split in SPLITS:
        one, other = (
            BlendedTokens(data, MixtureSchedule.fixed(weights), 300, 16, 5, permutation)
            for data in (
                open_domains(imported).of(split),
                open_data_path(path, SPLIT, imported.tokenizer).of(split),
            )
        )
        for name, batch in one.batch(range(300)).items():
            assert torch.equal(batch, other.batch(range(300))[name])


def test_documents_move_to_other_domains(imported, tmp_path):
    uint16_and_int32 = imported.names[:2]
    regrouped(imported, uint16_and_int32, ["x", "y", "z"], tmp_path / "new")


# Held-out domains


def test_a_held_out_prefix_has_all_its_sequences_in_valid_and_test(options, imported):
    weights = f"0.3 {options.data_path.split()[1]} 0.7 {options.data_path.split()[3]}"
    web, code = imported.names[:2]
    zero = weights.replace("0.7", "0")
    options = dataclasses.replace(options, data_path=zero, held_out=code, overwrite=True)
    import_corpus(options)
    found = Corpus.load(options.output)
    found.verify()
    assert found.domains == {web: imported.domains[web]}
    assert Mixture.load(options.output / "data-path.json").weights == {web: 1.0}
    (domain,) = found.held_out.values()
    assert domain.imported == dataclasses.replace(imported.domains[code].imported, split="0,12,8")
    assert domain.valid.sequences is not None
    assert domain.test.sequences is not None
    (first, end), (second, last) = domain.valid.sequences, domain.test.sequences
    assert domain.train.sequences == (0, 0)
    assert (first, second, last) == (0, end, imported.domains[code].test.sequences[1])
    assert end == round(0.6 * last)
    assert tokens_of(found, code, "train") == []
    assert tokens_of(found, code, "valid") == plain_documents(domain.valid.prefix, 0, end)
    assert tokens_of(found, code, "test") == plain_documents(domain.valid.prefix, end, last)
    for wrong, match in (
        ({"data_path": weights}, "0.7"),
        ({"held_out": "other"}, "'other'"),
        ({"held_out": f"{web}, {code}"}, "no domain to train on"),
        ({"split": "1"}, "valid"),
    ):
        with pytest.raises(UserError, match=match):
            import_corpus(dataclasses.replace(options, **wrong))


def test_a_domain_of_a_corpus_is_held_out_without_copies(imported, corpus, tmp_path):
    for number, source in enumerate((imported, corpus)):
        name, *others = source.names
        output = tmp_path / f"derived{number}"
        import_corpus(ImportOptions(output, corpus=source.root, held_out=name))
        found = Corpus.load(output)
        found.verify()
        assert found.names == others
        assert list(found.held_out) == [name]
        assert tokens_of(found, name, "train") == []
        for other in others:
            assert found.domain_hash(other) == source.domain_hash(other)
        for split in ("valid", "test"):
            assert tokens_of(found, name, split) == tokens_of(source, name, split)
            one, two = (Path(f"{c.prefix(name, split)}.bin") for c in (found, source))
            assert one.samefile(two)
        # Another domain is held out, next to the first one.
        more = tmp_path / f"more{number}"
        import_corpus(ImportOptions(more, corpus=output, held_out=others[0]))
        assert list(Corpus.load(more).held_out) == [name, others[0]]
        assert Corpus.load(more).held_out[name].valid.sha256 == found.held_out[name].valid.sha256
        inside = ImportOptions(output, corpus=output, held_out=others[0], overwrite=True)
        with pytest.raises(UserError, match="--output"):
            import_corpus(inside)
    with pytest.raises(UserError, match="--split"):
        ImportOptions(tmp_path, corpus=corpus.root, held_out="code", split="1,1,1")


# Evaluation


def test_held_out_text_equals_that_of_the_preprocessed_corpus(tmp_path, jsonl, preprocessing):
    rng = np.random.default_rng(1)
    words = ["ein", "Wörterbuch", "für", "日本語", "テキスト", "текст", "🙂🙃", "naïve"]
    texts = [" ".join(rng.choice(words, 30)) + str(i) for i in range(80)]
    model = tmp_path / "tokenizer.json"
    model.write_bytes(byte_level_bpe(iter(texts), 330, "<|endoftext|>"))
    native = make_corpus(
        preprocessing(f"web={jsonl('a.jsonl', texts)}", output="native", tokenizer_model=model)
    )
    parts = [native.domains["web"].split(split) for split in SPLITS]
    builder = IndexedDatasetBuilder(str(tmp_path / "all.bin"), dtype=np.uint16)
    for split in SPLITS:
        builder.add_index(str(native.prefix("web", split)))
    builder.finalize(str(tmp_path / "all.idx"))
    counts_of_splits = ",".join(str(part.documents) for part in parts)
    path = f"web={tmp_path / 'all'}"
    import_corpus(
        ImportOptions(tmp_path / "imported", model, data_path=path, split=counts_of_splits)
    )
    imported = Corpus.load(tmp_path / "imported")
    sizes = token_bytes(corpus_tokenizer(imported))
    for packing in ("packed", "documents"):
        protocol = Protocol("test", 16, packing=packing)
        with distributed(ParallelOptions(), seed=0):
            one, other = (
                held_out_domain(open_domains(corpus), "web", protocol, sizes)
                for corpus in (native, imported)
            )
        assert one is not None
        assert other is not None
        assert one.unigram_loss == other.unigram_loss
        for field in ("clusters", "tokens", "text_bytes"):
            assert np.array_equal(getattr(one, field), getattr(other, field))
        for ours, theirs in zip(one.text.scored_blocks(), other.text.scored_blocks(), strict=True):
            assert all(map(np.array_equal, ours, theirs))
    for split, part in zip(SPLITS, parts, strict=True):
        counts = document_bytes(open_domains(imported).open("web", split), sizes, None)
        assert (len(counts), counts.sum()) == (part.documents, part.text_bytes)


# Names and weights


def test_names_and_the_file_of_arguments(options, tmp_path):
    web, code, old, _ = (word for word in options.data_path.split() if "/" in word)
    arguments = tmp_path / "blend.txt"
    arguments.write_text(f"first={web}\n{code}\n{tmp_path}/data/./old_text_document\n")
    options = dataclasses.replace(options, data_path=None, data_args_path=arguments)
    with pytest.warns(UserWarning, match="document boundaries"):
        import_corpus(options)
    imported = Corpus.load(options.output)
    assert imported.names == ["first", "code_text_document", "old_text_document"]
    assert imported.domains["old_text_document"].test.prefix == old
    assert not (options.output / "data-path.json").exists()
    data = DataOptions(data_args_path=arguments, tokenizer_model=options.tokenizer_model)
    run = PretrainOptions(run_dir=tmp_path / "run", seq_length=16, data=data)
    assert plan_training(run).data.names == imported.names
    for more in ({"corpus": options.output}, {"data": dataclasses.replace(data, data_path="x")}):
        with pytest.raises(UserError, match="--data-args-path"):
            dataclasses.replace(run, **more)


def test_export_divides_imported_files_by_their_split(imported, options, tmp_path):
    mixture = options.output / "data-path.json"
    export = functools.partial(ConvertOptions, mixture=mixture, corpus=options.output)
    blend = json.loads(converted_text(export(format="megatron-bridge")))
    path = DataPath.parse(options.data_path)
    expected = [list(path.prefixes), list(WEIGHTS)]
    assert blend == {"blend": expected, "blend_per_split": None, "split": SPLIT}
    with pytest.warns(UserWarning, match=f"--split {SPLIT}"):
        line = converted_text(export(format="megatron-data-path"))
    assert DataPath.parse(line).prefixes == path.prefixes
    with pytest.raises(UserError, match=f"--split {SPLIT}"):
        converted_text(export(format="megatron-per-split"))
    lines = write_blend(
        tmp_path / "m.json", Mixture.load(options.output / "data-path.json"), imported
    )
    assert lines[1].endswith(f"--data-path {line.strip()} --split {SPLIT}")
    assert json.loads((tmp_path / "m.bridge.json").read_text()) == blend


# Damage and mistakes


def test_files_that_change_after_the_import_are_detected(imported, options):
    prefix = imported.prefix("web_text_document", "train")
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2] + b"\7\0")
    with pytest.raises(UserError, match="has changed"):
        Corpus.load(options.output).verify()
    tokens.write_bytes(content[:-2])
    with pytest.raises(UserError, match=r"web_text_document\.bin has"):
        Corpus.load(options.output)
    tokens.write_bytes(content)
    lengths = np.fromfile(index, "<i4", 60, offset=34)
    raw = bytearray(index.read_bytes())
    move = np.array([1, *[0] * 58, -1], np.int32)
    ends = np.cumsum(lengths + move, dtype=np.int64)
    raw[34:274] = (lengths + move).tobytes()
    raw[274:754] = (2 * (ends - (lengths + move))).tobytes()
    index.write_bytes(raw)
    with pytest.raises(UserError, match="has changed"):
        open_domains(Corpus.load(options.output)).open("web_text_document", "train")


def test_another_end_of_document_token_is_reported(options):
    options = dataclasses.replace(options, eod_token="7")
    with pytest.warns(UserWarning, match="no sampled document of .* ends with 7"):
        import_corpus(options)


def damage(name: str, path: Path) -> None:
    """Damage the files with prefix ``path`` as named."""
    tokens = Path(f"{path}.bin")
    if name == "short bin":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    elif name == "type":
        build(path, "int64", [[[1, 2, EOD]]] * 50)
    elif name == "ids":
        content = np.fromfile(tokens, np.uint16)
        content[content.size // 2] = EOD + 1
        content.tofile(tokens)


@pytest.mark.parametrize(
    ("problem", "changes", "message"),
    [
        ("short bin", {}, "web_text_document.bin"),
        ("type", {}, "int64"),
        ("ids", {}, "outside the vocabulary"),
        ("", {"split": "9990,5,5"}, "no tokens for valid"),
        ("", {"data_path": "PREFIX x/PREFIX", "eod_token": "<none>"}, "--eod-token"),
        ("", {"data_path": "corpus/tokens/x", "overwrite": True}, "--output"),
        ("", {"data_path": "-1 PREFIX 2 OTHER"}, "weights"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    options, tmp_path, monkeypatch, problem, changes, message
):
    monkeypatch.chdir(tmp_path)
    web, code, *_ = (word for word in options.data_path.split() if "/" in word)
    damage(problem, Path(web))
    words = {"PREFIX": web, "OTHER": code}
    if text := changes.get("data_path"):
        for word, prefix in words.items():
            text = text.replace(word, prefix)
        changes = {**changes, "data_path": text}
    options = dataclasses.replace(options, **changes)
    with pytest.raises(UserError, match=message) as error:
        import_corpus(options)
    assert "\n" not in str(error.value)
    assert not options.output.exists()
