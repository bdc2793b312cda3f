from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Mixture, MixtureWarning, implied_epochs, normalized
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import corpus_in, sample_mixture


@pytest.fixture
def corpus(tmp_path):
    return corpus_in(tmp_path / "corpus", names=("a", "b", "c"))


@pytest.fixture
def read_weights(tmp_path):
    """Load a file that holds the weights and nothing else, as a person writes it."""

    def read(weights):
        path = tmp_path / "by_hand.json"
        path.write_text(json.dumps({"weights": weights}))
        return Mixture.load(path)

    return read


def test_weights_alone_make_a_mixture(read_weights):
    mixture = read_weights({"a": 0.25, "b": 0.75})
    assert mixture == Mixture(weights={"a": 0.25, "b": 0.75}, method="manual")


def test_the_mixture_of_no_preference():
    assert Mixture.uniform(["x", "y", "z"]).weights == dict.fromkeys("xyz", 1 / 3)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"a": 0.5, "b": -0.1}, "weight of 'b' is -0.1; weights are finite and not negative"),
        ({"a": math.nan, "b": 1.0}, "weights.a"),
        ({"a": 1.0, "b": math.inf}, "weights.b"),
        ({"a": 0.0, "b": 0.0}, "all weights are zero; give at least one domain a weight"),
        ({}, "all weights are zero"),
        ({"a": 1e308, "b": 1e308}, "too large to add up"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(read_weights, weights, problem):
    with pytest.raises(UserError, match=rf"by_hand\.json: .*{problem}"):
        read_weights(weights)


@pytest.mark.parametrize(
    ("weights", "total"),
    [([1, 3], "4"), ([0.5, 0.6], "1.1"), ([0.5, 0.500002], "1.000002"), ([1e-9, 0], "1e-09")],
)
def test_another_sum_is_renormalised_with_a_warning_that_shows_it(read_weights, weights, total):
    with pytest.warns(MixtureWarning, match=f"the weights sum to {total}, not 1"):
        mixture = read_weights(dict(zip("ab", weights, strict=True)))
    assert mixture.weights["a"] == pytest.approx(weights[0] / sum(weights))
    assert sum(mixture.weights.values()) == pytest.approx(1.0, abs=1e-15)


@given(
    st.dictionaries(
        st.text(max_size=3), st.floats(0, 1e300, allow_subnormal=False), min_size=1, max_size=8
    ).filter(lambda weights: any(weights.values()))
)
def test_normalised_weights_are_shares_in_the_same_proportions(weights):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixtureWarning)
        shares = normalized(weights, "here")
    assert list(shares) == list(weights)
    assert math.fsum(shares.values()) == pytest.approx(1.0, abs=1e-12)
    total = math.fsum(weights.values())
    for name, weight in weights.items():
        assert shares[name] == pytest.approx(weight / total, rel=1e-12)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=50))
def test_shares_are_left_alone_and_pass_without_a_warning(values):
    shares = {str(i): value / math.fsum(values) for i, value in enumerate(values)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = normalized(shares, "here")
    assert again == shares


def test_weights_come_in_the_corpus_order(corpus):
    mixture = Mixture(weights={"c": 0.5, "a": 0.2, "b": 0.3})
    assert mixture.weights_for(corpus.names, "it") == [0.2, 0.3, 0.5]


def test_a_weight_for_an_unknown_domain_is_refused(corpus):
    with pytest.raises(
        UserError, match=r"weight for 'd', which is not .*; its domains are a, b, c"
    ):
        Mixture(weights={"a": 0.5, "d": 0.5}).weights_for(corpus.names, "it")


def test_a_domain_left_out_gets_weight_zero_and_a_warning(corpus):
    with pytest.warns(MixtureWarning, match="says nothing of b, c: they get weight 0"):
        assert Mixture(weights={"a": 1.0}).weights_for(corpus.names, "it") == [1.0, 0.0, 0.0]


def test_epochs_are_the_tokens_drawn_over_the_tokens_there_are(corpus):
    # A domain of the samples has 5 training tokens.
    epochs = implied_epochs(corpus.train_tokens, {"a": 0.75, "b": 0.25}, 100)
    assert epochs == {"a": 15.0, "b": 5.0, "c": 0.0}


def test_the_hash_is_that_of_the_weights_whatever_found_them():
    mixture = sample_mixture()
    by_hand = Mixture(weights=dict(reversed(mixture.weights.items())), method="manual")
    assert mixture.hash == by_hand.hash
    assert mixture.hash != Mixture(weights={"a": 0.126, "ü/..": 0.874}).hash


@settings(max_examples=50, deadline=None)
@given(
    num_domains=st.integers(1, 5000),
    seed=st.integers(0, 2**32),
    sharpness=st.floats(0.01, 10),
    in_float32=st.booleans(),
)
def test_a_mixture_survives_the_file_to_the_last_bit(
    tmp_path_factory, num_domains, seed, sharpness, in_float32
):
    raw = np.random.default_rng(seed).gamma(sharpness, size=num_domains) + 1e-30
    weights = (raw / raw.sum()).astype(np.float32 if in_float32 else np.float64)
    written = Mixture({f"ü {i}": weight for i, weight in enumerate(weights.tolist())})
    path = tmp_path_factory.mktemp("mixture") / "mixture.json"
    written.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read = Mixture.load(path)
    assert read == written  # floats compare by value: every bit but the sign of a zero
    assert list(read.weights) == list(written.weights)
    assert read.hash == written.hash
    read.save(path.with_name("again.json"))
    assert path.with_name("again.json").read_bytes() == path.read_bytes()


def test_a_misspelt_field_is_refused(tmp_path):
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps({"weights": {"a": 1.0}, "max_epoch": 3.0}))
    with pytest.raises(UserError, match="max_epoch"):
        Mixture.load(path)
