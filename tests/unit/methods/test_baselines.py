"""Training-free baselines: uniform, natural and UniMax."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Corpus, Mixture, MixtureWarning
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods import baselines
from megatron_chameleon.methods.limits import EpochLimit
from tests.small_corpus import without_training_text

METHODS = {method.name: method for method in baselines.METHODS}


@pytest.fixture
def options(corpus, tmp_path):
    """``options(name, **changes)``: options of a method on the small corpus."""

    def make(name, **changes):
        settings = {"corpus": corpus.root, "output": tmp_path / f"{name}.json", **changes}
        if name == "unimax":
            settings.setdefault("token_budget", 1000)
        return METHODS[name].options(**settings)

    return make


@pytest.fixture
def compute(options):
    """``compute(name, **changes)``: run a method and load the mixture that it wrote."""

    def run(name, **changes):
        run_options = options(name, **changes)
        METHODS[name].compute(run_options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # loading must not warn that weights do not sum to 1
            return Mixture.load(run_options.output)

    return run


def tokens_of(corpus: Corpus) -> np.ndarray:
    return np.array(list(corpus.train_tokens.values()), np.float64)


def unimax_of_the_paper(tokens: np.ndarray, budget: float, max_epochs: float) -> np.ndarray:
    """UniMax, Algorithm 1: each domain, smallest first, gets at most an equal share of the rest."""
    left, shares = budget, np.zeros(len(tokens))
    for done, domain in enumerate(np.argsort(tokens)):
        part = left / (len(tokens) - done)
        shares[domain] = min(part, tokens[domain] * max_epochs)
        left -= shares[domain]
    return shares / shares.sum()


def test_natural_weights_are_powers_of_the_token_shares(compute, corpus):
    mixture = compute("natural", temperature=3.0)
    powers = tokens_of(corpus) ** (1 / 3)
    np.testing.assert_allclose(list(mixture.weights.values()), powers / powers.sum())
    assert mixture.parameters["temperature"] == 3.0


def test_unimax_is_the_algorithm_of_its_paper(compute, corpus):
    tokens, max_epochs = tokens_of(corpus), 2.0
    budget = int(0.97 * max_epochs * tokens.sum())
    mixture = compute("unimax", token_budget=budget, max_epochs=max_epochs)
    expected = unimax_of_the_paper(tokens, budget, max_epochs)
    np.testing.assert_allclose(list(mixture.weights.values()), expected)
    at_limit = np.isclose(expected * budget, tokens * max_epochs, rtol=1e-12)
    assert mixture.capped == np.array(corpus.names)[at_limit].tolist()


@pytest.mark.parametrize("name", METHODS)
def test_domains_output_and_record(options, compute, corpus, monkeypatch, name):
    mixture = compute(name)
    assert mixture.method == name
    assert mixture.provenance.inputs == {"corpus": corpus.hash}
    assert (mixture.parameters["paper_flops"], mixture.cost.flops) == (0.0, 0.0)
    some = compute(name, domains="poems, news")
    assert list(some.weights) == ["news", "poems"]
    if name == "uniform":
        assert some.weights["news"] == 0.5
    options(name).output.unlink()
    monkeypatch.setenv("RANK", "1")
    METHODS[name].compute(options(name))
    assert not options(name).output.exists()


@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=30),
    st.floats(0.01, 10.0),
    st.floats(0.001, 1.0),
)
@example([1] * 6, 1.0, 1.0)  # in floating point, the sum of six caps of 1/6 is less than 1
def test_the_epoch_limit_of_uniform_weights_is_unimax(sizes, max_epochs, share):
    tokens = {str(position): size for position, size in enumerate(sizes)}
    budget = max(1, int(share * max_epochs * sum(sizes)))
    assume(budget <= max_epochs * sum(sizes))
    even = np.full(len(sizes), 1 / len(sizes))
    weights = EpochLimit(tokens, budget, max_epochs).apply(even)
    expected = unimax_of_the_paper(np.array(sizes, np.float64), budget, max_epochs)
    np.testing.assert_allclose(weights, expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("uniform", {"domains": "news,verse"}, "verse"),
        ("uniform", {"domains": " , "}, "--domains"),
        ("uniform", {"max_epochs": 0.0, "token_budget": 9}, "--max-epochs"),
        ("unimax", {"token_budget": 10**9}, "--max-epochs"),
    ],
)
def test_mistakes_are_errors_and_write_nothing(compute, tmp_path, name, changes, problem):
    with pytest.raises(UserError, match=problem) as error:
        compute(name, **changes)
    assert "\n" not in str(error.value)
    assert list(tmp_path.glob("*.json")) == []


def test_a_domain_without_text_gets_no_weight(compute, corpus, tmp_path):
    root = without_training_text(corpus, tmp_path / "copy", "poems").root
    with pytest.raises(UserError, match="'poems'"):
        compute("uniform", corpus=root)
    assert compute("natural", corpus=root).weights["poems"] == 0.0
    with pytest.warns(MixtureWarning, match="poems"):
        mixture = compute("unimax", corpus=root)
    assert mixture.weights["poems"] == 0.0
