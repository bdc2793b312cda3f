from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.blend import data_path
from megatron_chameleon.blend.data_path import (
    DataPath,
    data_path_tokens,
    domain_names,
    hash_token_file,
    split_range,
)
from megatron_chameleon.errors import UserError
from tests.unit.blend.token_files import MegatronTokenizer, write_file


@pytest.fixture
def corpus(make_corpus):
    return make_corpus({"a": [5, 3, 9, 1], "b": [9, 9]})


@pytest.mark.parametrize(
    "given",
    ["one", "0.3 one 0.7 two", "one two three", "one two", "30 one 70.5 two/b", "1e-3 one"],
)
def test_a_data_path_is_parsed_like_in_megatron(given):
    prefixes, weights = get_blend_from_list(given.split())
    path = DataPath.parse(given)
    assert list(path.prefixes) == prefixes
    assert (list(path.weights) if path.weights else None) == weights


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "WEIGHT PREFIX"),
        ("0.3 one 0.7", "WEIGHT PREFIX"),
        ("0.3 one two 0.7", "WEIGHT PREFIX"),
        ("0.5 one 0.5 one", "names one twice"),
        ("0.5 a/one 0.5 a/./one", "names a/one twice"),
    ],
)
def test_an_ambiguous_data_path_is_rejected(given, problem):
    with pytest.raises(UserError, match=problem):
        DataPath.parse(given)


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "90,10", "100", "0.5,0.2,0.3", "7,0,3"])
def test_ranges_of_splits_are_megatrons(split):
    theirs = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for part, expected in zip(SPLITS, theirs, strict=True):
        if expected is None:
            with pytest.raises(UserError, match=f"nothing for {part}"):
                split_range(split, part)
        else:
            assert split_range(split, part) == expected


@pytest.mark.parametrize(
    "split", ["", "a,b", "1,2,3,4", "90,-5,5", "0,0,0", "nan,1,1", "1e2,1", "1_0,1"]
)
def test_an_invalid_split_is_rejected(split):
    with pytest.raises(UserError, match="--split"):
        split_range(split, "train")


def test_data_sets_are_split_by_sequences(corpus, tmp_path):
    prefix = write_file(tmp_path / "set", list(range(1, 101)))
    path = DataPath.parse(f"0.5 {prefix} 0.5 {corpus.prefix('b', 'train')}")
    parts = [data_path_tokens(path, "80,15,5", corpus.tokenizer, part) for part in SPLITS[:2]]
    ranges = [(part.domains[0].first, part.domains[0].stop) for part in parts]
    assert ranges == [(0, 80), (80, 95)]
    assert parts[0].tokens == {"set": sum(range(1, 81)), "b-train": 18}
    assert parts[0].hash != parts[1].hash


def moved(prefix: Path, folder: Path) -> Path:
    """Copies of a pair of files in another folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for suffix in (".bin", ".idx"):
        shutil.copy(prefix.with_suffix(suffix), folder)
    return folder / prefix.name


def test_identity_does_not_depend_on_the_folder(corpus, tmp_path, monkeypatch):
    prefixes = [write_file(tmp_path / name, [n, 5]) for n, name in enumerate("ab", start=3)]
    elsewhere = [moved(prefix, tmp_path / "moved") for prefix in prefixes]
    monkeypatch.chdir(tmp_path / "moved")
    spellings = [prefixes, elsewhere, [Path("a"), Path("./../moved/b")]]
    found = [
        data_path_tokens(DataPath(tuple(map(str, paths)), None), "1", corpus.tokenizer)
        for paths in spellings
    ]
    assert len({data.hash for data in found}) == 1
    assert [data.names for data in found] == [["a", "b"]] * 3
    keys = [[domain.order_key for domain in data.domains] for data in found]
    assert keys[0] == keys[1] == keys[2]
    assert keys[0][0] != keys[0][1]


def test_two_copies_have_different_orders(corpus, tmp_path):
    prefix = write_file(tmp_path / "a", [3, 4])
    path = DataPath.parse(f"1 {prefix} 1 {moved(prefix, tmp_path / 'copy')}")
    first, second = data_path_tokens(path, "1", corpus.tokenizer).domains
    assert first.order_key != second.order_key
    assert (first.name, second.name) == (f"{tmp_path.name}/a", "copy/a")


@pytest.mark.parametrize(
    ("prefixes", "names"),
    [
        (["/d/news_document"], ["news_document"]),
        (["/d/news", "code"], ["news", "code"]),
        (["/d/news/train", "/d/code/train"], ["news/train", "code/train"]),
        (["/d/1/x/t", "/d/2/x/t", "/d/2/y/t", "/d/u"], ["1/x/t", "2/x/t", "y/t", "u"]),
        (["/t", "/x/t"], ["/t", "x/t"]),
        (["/d/a.b", "/d/a.c"], ["a.b", "a.c"]),
    ],
)
def test_names_are_the_shortest_unique_path_suffixes(prefixes, names):
    assert domain_names(prefixes) == names


def overwrite(path: Path, place: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(place)
        (byte,) = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte ^ 1]))


def test_blocks_of_large_files_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(data_path, "HASHED_BLOCKS", 4)
    monkeypatch.setattr(data_path, "HASHED_BLOCK_BYTES", 10)
    prefix = write_file(tmp_path / "set", [250])  # 500 bytes: blocks at 0, 163, 326 and 490
    hashed = {*range(10), *range(163, 173), *range(326, 336), *range(490, 500)}
    before, found = hash_token_file(prefix), set()
    for place in range(500):
        overwrite(prefix.with_suffix(".bin"), place)
        if hash_token_file(prefix) != before:
            found.add(place)
        overwrite(prefix.with_suffix(".bin"), place)
    assert found == hashed
    with prefix.with_suffix(".bin").open("ab") as stream:
        stream.write(b"0")
    assert hash_token_file(prefix) != before


def test_a_large_file_is_not_read_completely(tmp_path):
    prefix = write_file(tmp_path / "set", [5])
    size = 1 << 42  # four tebibytes, on disk a hole
    os.truncate(prefix.with_suffix(".bin"), size)
    places = data_path._hashed_places(size)
    assert len(places) == 1024
    assert places[0] == 0
    assert places[-1] == size - data_path.HASHED_BLOCK_BYTES
    assert np.ptp(np.diff(places)) <= 1
    hash_token_file(prefix)


class CutDataset(GPTDataset):
    """What Megatron's builder cuts out for a data set, without the indices made from it."""

    def _build_document_sample_shuffle_indices(self):
        return np.empty(0), np.empty((1, 2)), np.empty(0)


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "7,2,1"])
@pytest.mark.parametrize("num_sequences", [37, 50, 500, 1])
def test_splits_are_rounded_like_in_megatrons_builder(corpus, tmp_path, num_sequences, split):
    prefix = write_file(tmp_path / "set", [4] * num_sequences)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=2,
        blend=([str(prefix)], None),
        split=split,
        tokenizer=MegatronTokenizer(corpus.tokenizer.eod_id, corpus.tokenizer.vocab_size),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    builder = BlendedMegatronDatasetBuilder(CutDataset, [1, 1, 1], lambda: True, config)
    theirs = [dataset.indices.tolist() for dataset in builder.build()]
    path = DataPath.parse(str(prefix))
    cuts = [data_path_tokens(path, split, corpus.tokenizer, part).domains[0] for part in SPLITS]
    assert [list(range(cut.first, cut.stop)) for cut in cuts] == theirs
