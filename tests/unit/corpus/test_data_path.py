"""--data-path and --split compared with Megatron's parsing, domain names, hashes and checks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import get_blend_from_list

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.artifacts import corpus as corpus_artifact
from megatron_chameleon.artifacts.corpus import hash_token_file
from megatron_chameleon.corpus.data_path import DataPath, domain_names, split_range
from megatron_chameleon.corpus.domains import open_data_path
from megatron_chameleon.errors import UserError
from tests.unit.blend.inputs import dataset_config, write_file
from tests.unit.corpus.test_indexed import build


@pytest.mark.parametrize(
    "text",
    ["one", "0.3 one 0.7 two", "one two three", "one two", "30 one 70.5 two/b", "1e-3 one"],
)
def test_a_data_path_is_parsed_as_in_megatron(text):
    prefixes, weights = get_blend_from_list(text.split())
    path = DataPath.parse(text)
    assert list(path.prefixes) == prefixes
    assert (list(path.weights) if path.weights else None) == weights


@pytest.mark.parametrize(
    ("text", "split", "flag"),
    [
        *((text, "1", "--data-path") for text in ("", "0.3 one 0.7", "0.3 one two 0.7")),
        *((text, "1", "--data-path") for text in ("0.5 one 0.5 one", "0.5 a/one 0.5 a/./one")),
        *((text, "1", "'a'") for text in ("a=one a=two", "0.5 x/a 0.5 a=b")),
        *(("one", text, "--split") for text in ("", "a,b", "1,2,3,4", "90,-5,5", "0,0,0")),
        *(("one", text, "--split") for text in ("nan,1,1", "1e2,1", "1_0,1", "0,1")),
    ],
)
def test_an_invalid_data_path_or_split_is_rejected(text, split, flag):
    with pytest.raises(UserError, match=flag):
        (DataPath.parse(text), split_range(split, "train"))


class DocumentRange(GPTDataset):
    """The documents that Megatron's builder assigns to a split, without sample indices."""

    def _build_document_sample_shuffle_indices(self):
        return np.empty(0), np.empty((1, 2)), np.empty(0)


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "90,10", "0.5,0.2,0.3", "100"])
@pytest.mark.parametrize("num_sequences", [37, 500, 1])
def test_splits_are_those_of_megatrons_builder(corpus, tmp_path, num_sequences, split):
    prefix = write_file(tmp_path / "set", [4] * num_sequences)
    blend = [str(prefix)], None
    config = dataset_config(
        corpus.tokenizer, random_seed=1, sequence_length=2, blend=blend, split=split
    )
    builder = BlendedMegatronDatasetBuilder(DocumentRange, [1, 1, 1], lambda: True, config)
    path = DataPath.parse(str(prefix))
    for part, theirs in zip(SPLITS, builder.build(), strict=True):
        if theirs is None:
            with pytest.raises(UserError, match=f"nothing for {part}"):
                open_data_path(path, split, corpus.tokenizer).of(part)
        else:
            (cut,) = open_data_path(path, split, corpus.tokenizer).of(part).domains
            assert list(range(cut.first, cut.stop)) == theirs.indices.tolist()
            assert cut.tokens == 4 * len(theirs.indices)


def test_identity_does_not_depend_on_the_folder(corpus, tmp_path, monkeypatch):
    (tmp_path / "moved").mkdir()
    prefixes = [write_file(tmp_path / name, [n, 5]) for n, name in enumerate("ab", start=3)]
    elsewhere = [write_file(tmp_path / "moved" / p.name, [n, 5]) for n, p in enumerate(prefixes, 3)]
    monkeypatch.chdir(tmp_path / "moved")
    spellings = [prefixes, elsewhere, [Path("a"), Path("./../moved/b")]]
    found = [
        open_data_path(DataPath.parse(" ".join(map(str, paths))), "1", corpus.tokenizer)
        for paths in spellings
    ]
    assert len({data.hash for data in found}) == 1
    assert [data.names for data in found] == [["a", "b"]] * 3
    assert len({tuple(domain.order_key for domain in data.domains) for data in found}) == 1
    # Copies of the same text get different orders.
    path = DataPath.parse(f"1 {prefixes[0]} 1 {elsewhere[0]}")
    first, second = open_data_path(path, "1", corpus.tokenizer).domains
    assert first.order_key != second.order_key


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["/d/1/x/t", "/d/2/x/t", "/d/2/y/t", "/d/u"], ["1/x/t", "2/x/t", "y/t", "u"]),
        (["/t", "/x/t"], ["/t", "x/t"]),
        (["/d/a.b", "/d/a.c"], ["a.b", "a.c"]),
    ],
)
def test_names_are_the_shortest_unique_path_suffixes(prefixes, names):
    assert domain_names(prefixes) == names


def test_an_existing_path_with_an_equals_sign_is_not_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for prefix in ("lang=en/text", "en/text"):
        Path(prefix).parent.mkdir()
        write_file(Path(prefix), [4])
    path = DataPath.parse("lang=en/text other=en/text de=missing")
    assert path.prefixes == ("lang=en/text", "en/text", "missing")
    assert path.names == ("lang=en/text", "other", "de")


def test_blocks_of_large_files_are_hashed(tmp_path, monkeypatch):
    prefix = write_file(tmp_path / "huge", [5])
    os.truncate(prefix.with_suffix(".bin"), 1 << 42)  # a sparse file of 4 TiB
    hash_token_file(prefix)
    monkeypatch.setattr(corpus_artifact, "HASHED_BLOCKS", 4)
    monkeypatch.setattr(corpus_artifact, "HASHED_BLOCK_BYTES", 10)
    prefix = write_file(tmp_path / "set", [250])  # 500 bytes: blocks at 0, 163, 326 and 490
    hashed = {*range(10), *range(163, 173), *range(326, 336), *range(490, 500)}
    file, found = prefix.with_suffix(".bin"), set()
    before, content = hash_token_file(prefix), file.read_bytes()
    for place in range(500):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        if hash_token_file(prefix) != before:
            found.add(place)
    assert found == hashed
    file.write_bytes(content + b"0")
    assert hash_token_file(prefix) != before


def test_files_that_changed_or_have_another_type_are_rejected(corpus, tmp_path):
    prefix = write_file(tmp_path / "set", [4, 5, 6])
    data = open_data_path(DataPath.parse(str(prefix)), "1", corpus.tokenizer)
    write_file(prefix, [4, 5])
    with pytest.raises(UserError, match="has changed"):
        data.domains[0].open()
    wide = build(tmp_path / "wide", "int64", [[range(9)]])
    data = open_data_path(DataPath.parse(str(wide)), "1", corpus.tokenizer)
    with pytest.raises(UserError, match="type int64"):
        data.domains[0].open()
