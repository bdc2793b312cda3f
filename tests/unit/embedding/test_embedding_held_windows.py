"""Windows that are held in memory are those that would be read from the files."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from megatron_chameleon.blend.data_path import DataPath, data_path_tokens
from megatron_chameleon.blend.token_data import corpus_tokens
from megatron_chameleon.corpus.indexed import open_tokens
from megatron_chameleon.embedding.windows import draw_windows, hold_windows
from megatron_chameleon.errors import UserError
from tests.small_corpus import DOMAINS


def texts_of(file, windows):
    places = zip(windows.document, windows.start, windows.length, strict=True)
    return [file.get(int(d), int(start), int(n)).tolist() for d, start, n in places]


@pytest.mark.parametrize("number", range(len(DOMAINS)))
def test_they_are_what_is_drawn_for_an_embedding_store(corpus, number):
    domain = corpus_tokens(corpus).domains[number]
    held = hold_windows(domain, 32, 20, seed=7)
    file = open_tokens(corpus, domain.name, "train")
    drawn = draw_windows(file.lengths, 32, 20, seed=7, name=domain.name).longest_first()
    assert len(held.windows) == 20
    assert texts_of(held.tokens, held.windows) == texts_of(file, drawn)
    assert held.tokens.tokens.size == drawn.length.sum()
    np.testing.assert_array_equal(held.tokens.starts, np.cumsum(drawn.length) - drawn.length)


def test_they_lie_in_the_training_part_of_a_data_path(corpus):
    prefix = corpus.prefix("code", "train")
    path = DataPath.parse(f"1.0 {prefix}")
    data = data_path_tokens(path, "50,25,25", corpus.tokenizer, "valid")
    (domain,) = data.domains
    assert domain.first > 0
    held = hold_windows(domain, 32, 10_000, seed=0)
    file = open_tokens(corpus, "code", "train")
    cut = []
    for number in range(domain.first, domain.stop):
        text = file.get(number).tolist()
        parts = -(-len(text) // 32)
        ends = [len(text) * part // parts for part in range(parts + 1)]
        cut += [text[start:end] for start, end in itertools.pairwise(ends)]
    assert sorted(texts_of(held.tokens, held.windows)) == sorted(cut)


def test_a_token_of_another_vocabulary_is_refused(corpus):
    domain = dataclasses.replace(corpus_tokens(corpus).domains[0], vocab_size=100)
    with pytest.raises(UserError, match=r"holds token \d+"):
        hold_windows(domain, 32, 10_000, seed=0)
