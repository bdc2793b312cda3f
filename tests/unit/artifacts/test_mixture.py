from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Mixture, MixtureWarning, normalized
from megatron_chameleon.errors import UserError


@pytest.fixture
def read_weights(tmp_path):
    """Return ``read(weights, **others)``, which loads a mixture file with only these fields."""

    def read(weights, **others):
        path = tmp_path / "by_hand.json"
        path.write_text(json.dumps({"weights": weights, **others}))
        return Mixture.load(path)

    return read


def test_user_supplied_weights_are_read(read_weights):
    mixture = read_weights({"a": 0.25, "b": 0.75})
    assert mixture == Mixture(weights={"a": 0.25, "b": 0.75}, method="manual")
    reordered = Mixture(weights={"b": 0.75, "a": 0.25}, method="chameleon", scores={"a": 3.0})
    assert mixture.hash == reordered.hash != Mixture.uniform(["a", "b"]).hash
    with pytest.raises(UserError, match="max_epoch"):
        read_weights({"a": 1.0}, max_epoch=3.0)  # misspelt


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({"a": 0.5, "b": -0.1}, "'b'"),
        ({"a": math.nan, "b": 1.0}, "NaN"),
        ({"a": 0.0, "b": 0.0}, "zero"),
        ({}, "zero"),
        ({"a": 1e308, "b": 1e308}, "too large"),
    ],
)
def test_invalid_weights_are_rejected(read_weights, weights, named):
    with pytest.raises(UserError, match=rf"by_hand\.json: [^\n]*{named}"):
        read_weights(weights)


def test_weights_are_renormalised_with_a_warning(read_weights):
    with pytest.warns(MixtureWarning, match=r"1\.000002, not 1"):
        assert sum(read_weights({"a": 0.5, "b": 0.500002}).weights.values()) == pytest.approx(1.0)


@given(
    st.dictionaries(
        st.text(max_size=3), st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=8
    ).filter(lambda weights: any(weights.values()))
)
def test_normalized_weights_keep_their_proportions(weights):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixtureWarning)
        shares = normalized(weights, "here")
    total = math.fsum(weights.values())
    expected = {name: weight / total for name, weight in weights.items()}
    assert shares == pytest.approx(expected, rel=2e-6, abs=0)
    assert list(shares) == list(weights)
    assert normalized(shares, "here") == shares


def test_weights_are_ordered_like_the_domains_of_a_corpus():
    mixture = Mixture(weights={"c": 0.5, "a": 0.2, "b": 0.3})
    assert mixture.weights_for(["a", "b", "c"], "corpus") == [0.2, 0.3, 0.5]
    with pytest.raises(UserError, match=r"'c', which is not a domain of corpus; .*'a', 'b'"):
        mixture.weights_for(["a", "b"], "corpus")
    with pytest.warns(MixtureWarning, match="d, e"):
        assert mixture.weights_for([*"abcde"], "corpus") == [0.2, 0.3, 0.5, 0.0, 0.0]
    zero = Mixture(weights={"a": 1.0, "b": 0.0, "held": 0.0})
    assert zero.weights_for(["a"], "corpus", held_out=["held"]) == [1.0]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32), st.floats(0.01, 10), st.booleans())
def test_saved_mixture_is_read_bit_for_bit(tmp_path_factory, k, seed, sharpness, in_float32):
    raw = np.random.default_rng(seed).gamma(sharpness, size=k) + 1e-30
    weights = (raw / raw.sum()).astype(np.float32 if in_float32 else np.float64)
    written = Mixture({f"ü {i}": weight for i, weight in enumerate(weights.tolist())})
    path = tmp_path_factory.mktemp("mixture") / "mixture.json"
    written.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = Mixture.load(path)
    assert read == written
    assert list(read.weights) == list(written.weights)
