from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_chameleon.blend.data_path import DataPath, data_path_tokens
from megatron_chameleon.blend.token_data import (
    check_enough_tokens,
    check_weights,
    corpus_tokens,
    tokens_between,
)
from megatron_chameleon.errors import UserError
from tests.unit.blend.token_files import write_file


@pytest.fixture
def corpus(make_corpus):
    return make_corpus({"a": [5, 3, 9, 1], "b": [9, 9]})


def test_a_corpus_has_a_token_file_per_domain(corpus):
    data = corpus_tokens(corpus, "valid")
    assert data.names == ["a", "b"]
    assert data.tokens == {"a": 18, "b": 18}
    assert data.tokenizer == corpus.tokenizer
    assert data.hash == corpus.hash
    file = data.domains[0].open()
    assert file.lengths.tolist() == [5, 3, 9, 1]
    assert tokens_between(file, 1, 3) == 12


def test_a_file_that_changes_before_it_is_opened_is_rejected(corpus, tmp_path):
    prefix = write_file(tmp_path / "set", [4, 5, 6])
    data = data_path_tokens(DataPath.parse(str(prefix)), "1", corpus.tokenizer)
    write_file(prefix, [4, 5])
    with pytest.raises(UserError, match="changed since the start"):
        data.domains[0].open()


def test_tokens_of_other_types_are_rejected(corpus, tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "wide.bin"), dtype=np.int64)
    builder.add_document(torch.arange(9), [9])
    builder.finalize(str(tmp_path / "wide.idx"))
    data = data_path_tokens(DataPath.parse(str(tmp_path / "wide")), "1", corpus.tokenizer)
    with pytest.raises(UserError, match="type int64"):
        data.domains[0].open()


def test_a_domain_shorter_than_a_sequence_is_rejected(corpus):
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
def test_invalid_weights_are_rejected(corpus, weights, problem):
    with pytest.raises(UserError, match=problem):
        check_weights(corpus_tokens(corpus), weights)
