from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list

from megatron_chameleon.artifacts import SPLITS
from megatron_chameleon.blend.token_data import (
    DataPath,
    check_enough_tokens,
    check_weights,
    corpus_tokens,
    data_path_tokens,
    split_range,
    tokens_between,
)
from megatron_chameleon.corpus.indexed_writer import IndexedWriter
from megatron_chameleon.errors import UserError


@pytest.fixture
def corpus(make_corpus):
    return make_corpus({"a": [5, 3, 9, 1], "b": [9, 9]})


def test_a_corpus_gives_one_split_of_each_domain(corpus):
    data = corpus_tokens(corpus, "valid")
    assert data.names == ["a", "b"]
    assert data.tokens == {"a": 18, "b": 18}
    assert data.tokenizer == corpus.tokenizer
    assert data.hash == corpus.hash
    file = data.domains[0].open()
    assert file.lengths.tolist() == [5, 3, 9, 1]
    assert tokens_between(file, 1, 3) == 12


@pytest.mark.parametrize(
    "given",
    ["one", "0.3 one 0.7 two", "one two three", "one two", "30 one 70.5 two/b", "1e-3 one"],
)
def test_a_data_path_is_read_as_megatron_reads_it(given):
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
def test_a_data_path_that_says_nothing_clear_is_refused(given, problem):
    with pytest.raises(UserError, match=problem):
        DataPath.parse(given)


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "90,10", "100", "0.5,0.2,0.3", "7,0,3"])
def test_splits_are_cut_as_megatron_cuts_them(split):
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
def test_a_split_that_is_none_is_refused(split):
    with pytest.raises(UserError, match="--split"):
        split_range(split, "train")


def write_file(prefix: Path, lengths: list[int]) -> Path:
    """A data set of these sequences in place of the one that is there."""
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).unlink(missing_ok=True)
    writer = IndexedWriter(prefix, "uint16")
    for length in lengths:
        writer.add(np.arange(length))
    writer.finish()
    return prefix


def test_data_sets_of_megatron_are_cut_by_sequences(corpus, tmp_path):
    prefix = write_file(tmp_path / "set", list(range(1, 101)))
    path = DataPath.parse(f"0.5 {prefix} 0.5 {corpus.prefix('b', 'train')}")
    parts = [data_path_tokens(path, "80,15,5", corpus.tokenizer, part) for part in SPLITS[:2]]
    ranges = [(part.domains[0].first, part.domains[0].stop) for part in parts]
    assert ranges == [(0, 80), (80, 95)]
    assert parts[0].tokens[str(prefix)] == sum(range(1, 81))
    assert parts[0].hash != parts[1].hash


def test_the_hash_tells_other_tokens_apart(corpus, tmp_path):
    def digest(lengths, split="1,1,1"):
        path = DataPath.parse(str(write_file(tmp_path / "set", lengths)))
        return data_path_tokens(path, split, corpus.tokenizer).hash

    assert digest([4, 5, 6]) == digest([4, 5, 6])
    assert digest([4, 5, 6]) != digest([4, 6, 5])
    assert digest([4, 5, 6]) != digest([4, 5, 6], "2,1,0")


def test_a_file_that_changes_between_the_plan_and_its_use_is_refused(corpus, tmp_path):
    prefix = write_file(tmp_path / "set", [4, 5, 6])
    data = data_path_tokens(DataPath.parse(str(prefix)), "1", corpus.tokenizer)
    write_file(prefix, [4, 5])
    with pytest.raises(UserError, match="changed since the start"):
        data.domains[0].open()


def test_tokens_of_another_type_are_refused(corpus, tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "wide.bin"), dtype=np.int64)
    builder.add_document(torch.arange(9), [9])
    builder.finalize(str(tmp_path / "wide.idx"))
    data = data_path_tokens(DataPath.parse(str(tmp_path / "wide")), "1", corpus.tokenizer)
    with pytest.raises(UserError, match="type int64"):
        data.domains[0].open()


def test_a_domain_shorter_than_a_sequence_is_refused_unless_its_weight_is_zero(corpus):
    data = corpus_tokens(corpus)
    with pytest.raises(UserError, match=r"'a' of .* has 18 tokens .*18\+1.*--seq-length"):
        check_enough_tokens(data, [1, 1], 18)
    check_enough_tokens(data, [1, 1], 17)
    data = dataclasses.replace(data, domains=data.domains[:1])
    check_enough_tokens(data, [0], 18)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1], "1 weights for the 2 domains"),
        ([1, -0.1], "weight of 'b' is -0.1"),
        ([1, float("nan")], "weight of 'b' is nan"),
        ([0, 0], "all weights are zero"),
        ([1e308, 1e308], "too large to add up"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(corpus, weights, problem):
    with pytest.raises(UserError, match=problem):
        check_weights(corpus_tokens(corpus), weights)
