from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus.encoders import PATTERNS, TiktokenEncoder
from megatron_chameleon.corpus.tokenizer import parts
from tests.unit.corpus.tokenizer_samples import write_tiktoken

LONGEST = 40
WORDS = st.sampled_from(
    [
        "word",
        "Word's",
        "x",
        "12",
        "1234567",
        "(",
        "==",
        "//",
        "世界",
        "é",
        "\t",
        "-a-",
        "'s",
        "<|x|>",
    ]
)
SPACES = st.sampled_from(
    [" ", " ", " ", "", "  ", "    ", "\n", "\n\n", " \n  ", "\r\n", "\t", "\n "]
)
# Every stretch of a part's length has a place to cut at.
TEXTS = st.lists(st.tuples(WORDS, SPACES, WORDS, st.just(" ")), max_size=30).map(
    lambda found: "".join(part for group in found for part in group)
)


@given(st.text(alphabet="ab \n", max_size=300), st.booleans())
@settings(max_examples=100, deadline=None)
def test_parts_are_the_text_and_none_is_longer(text, drop_space):
    cut = list(parts(text, drop_space, LONGEST))
    assert max(map(len, cut)) <= LONGEST
    assert len(cut) == 1 or all(cut)
    if drop_space:
        assert "".join(cut).replace(" ", "") == text.replace(" ", "")
    else:
        assert "".join(cut) == text


@pytest.fixture(scope="module")
def encoders(tokenizer_json, tmp_path_factory):
    path = write_tiktoken(tokenizer_json, tmp_path_factory.mktemp("long") / "a.tiktoken")
    content = path.read_bytes()
    return [TiktokenEncoder(path, content, pattern, {"<e>": 399}) for pattern in PATTERNS.values()]


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_the_tokens_of_the_parts_are_those_of_the_text(encoders, text):
    for encoder in encoders:
        (whole,) = encoder.encode_batch([text])
        in_parts = encoder.encode_batch(list(parts(text, False, LONGEST)))
        np.testing.assert_array_equal(np.concatenate(in_parts), whole)


def test_a_text_without_a_place_to_cut_at_is_cut_at_the_end_of_a_part():
    assert list(parts("世" * 100, False, LONGEST)) == ["世" * 40, "世" * 40, "世" * 20]
    assert list(parts(" " * 50, False, LONGEST)) == [" " * 40, " " * 10]


def test_lines_are_kept_where_there_are_no_spaces():
    assert list(parts(("世" * 15 + "\n") * 4, False, LONGEST)) == [("世" * 15 + "\n") * 2] * 2


def test_a_space_that_the_tokenizer_puts_before_every_text_is_left_out():
    assert list(parts("ab " * 20, True, LONGEST)) == [("ab " * 13)[:-1], "ab " * 7]
