from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets import helpers, helpers_cpp

from megatron_chameleon.blend import sample_index as module
from megatron_chameleon.blend.sample_index import (
    build_sample_index,
    count_samples,
    sample_index_reference,
)


def int32(values):
    return np.asarray(values, dtype=np.int32)


def compiled(lengths, documents, seq_length, epochs, tokens, drop, extra):
    """Megatron's own helper, without the assertions of its wrapper."""
    return helpers_cpp.build_sample_idx_int32(
        lengths, documents, seq_length, epochs, tokens, drop, int(extra)
    )


def assert_same(found, expected):
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


@st.composite
def streams(draw):
    """Lengths, an order of several epochs and what one epoch holds."""
    lengths = int32(draw(st.lists(st.integers(0, 40), min_size=1, max_size=40)))
    epochs = draw(st.integers(1, 4))
    order = np.tile(np.arange(lengths.size, dtype=np.int32), epochs)
    np.random.RandomState(draw(st.integers(0, 2**32 - 1))).shuffle(order)
    return lengths, order, epochs, int(lengths.sum())


@settings(deadline=None, max_examples=400)
# Below 2 tokens a sample the helper writes beyond its array where there are none at all.
@given(streams(), st.integers(2, 60), st.booleans(), st.booleans(), st.integers(1, 5))
def test_equals_the_compiled_helper(stream, seq_length, drop, extra, threads):
    lengths, order, epochs, tokens = stream
    arguments = (lengths, order, seq_length, epochs, tokens, drop, extra)
    with pytest.MonkeyPatch.context() as patch:
        # So that these short streams, too, are cut into parts.
        patch.setattr(module, "DOCUMENTS_WORTH_A_THREAD", 3)
        found = build_sample_index(*arguments, threads)
    assert_same(found, compiled(*arguments))


@settings(deadline=None, max_examples=100)
@given(streams(), st.integers(1, 60), st.booleans(), st.booleans())
def test_reference_agrees(stream, seq_length, drop, extra):
    lengths, order, epochs, tokens = stream
    samples = count_samples(seq_length, epochs * tokens, drop, extra)
    np.testing.assert_array_equal(
        build_sample_index(lengths, order, seq_length, epochs, tokens, drop, extra),
        sample_index_reference(lengths, order, seq_length, samples, extra),
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("seq_length", [1, 7, 512, 100_000])
def test_many_documents(seq_length, threads):
    rng = np.random.default_rng(seq_length)
    # Mostly short, some empty, a few much longer than a sequence.
    lengths = rng.integers(0, 6, 500_000, dtype=np.int32)
    lengths[rng.integers(0, lengths.size, 50)] = 20_000
    order = rng.permutation(lengths.size).astype(np.int32)
    arguments = (lengths, order, seq_length, 1, int(lengths.sum()), True, True)
    expected = helpers.build_sample_idx(*arguments)
    assert_same(build_sample_index(*arguments, threads), expected)


# The counts that a caller gives, and what the documents hold, need not agree.
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 5, 14, 15, 16, 30, 31, 100])
def test_starts_beyond_the_stream_are_its_end(tokens, drop, extra):
    arguments = (int32([10, 0, 20]), int32([2, 1, 0]), 5, 1, tokens, drop, extra)
    assert_same(build_sample_index(*arguments), compiled(*arguments))


def test_the_end_in_an_empty_last_document():
    arguments = (int32([10, 0]), int32([0, 1]), 4, 1, 10, False, True)
    found = build_sample_index(*arguments)
    assert_same(found, compiled(*arguments))
    assert found[-1].tolist() == [1, -1]


def test_arrays_with_gaps():
    lengths, order = int32([3, 9, 4, 9, 5, 9]), int32([2, 9, 1, 9, 0, 9])
    assert_same(
        build_sample_index(lengths[::2], order[::2], 4, 1, 12),
        build_sample_index(int32([3, 4, 5]), int32([2, 1, 0]), 4, 1, 12),
    )


def test_float32_decides_the_number_of_partial_samples():
    # 2**24 + 3 samples and a bit; rounded to float32 the quotient is 2**24 + 4.
    tokens = (2**24 + 2) * 3 + 2
    rows = compiled(int32([tokens]), int32([0]), 3, 1, tokens, False, True).shape[0]
    assert count_samples(3, tokens, False, True) == rows - 1


@pytest.mark.parametrize(
    ("lengths", "order", "seq_length", "problem"),
    [
        ([5, 5], [0, 2], 3, "beyond the 2 documents"),
        ([5, 5], [0, -1], 3, "beyond the 2 documents"),
        ([5, -5], [0, 1], 3, "document 1 has a negative length"),
        ([5, 5], [], 3, "no documents"),
        ([], [0], 3, "no documents"),
        ([5, 5], [0, 1], 0, "seq_length is 0"),
    ],
)
def test_refuses_what_is_no_stream(lengths, order, seq_length, problem):
    with pytest.raises(ValueError, match=problem):
        build_sample_index(int32(lengths), int32(order), seq_length, 1, 10)


def test_refuses_other_types():
    with pytest.raises(ValueError, match=r"lengths is int64 of shape \(2,\)"):
        build_sample_index(np.array([1, 2]), int32([0, 1]), 2, 1, 3)
    with pytest.raises(ValueError, match=r"document_index is int32 of shape \(1, 2\)"):
        build_sample_index(int32([1, 2]), int32([[0, 1]]), 2, 1, 3)
