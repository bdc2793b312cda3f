"""Uniform, natural and UniMax: mixtures for which nothing is trained."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Corpus, Mixture, MixtureWarning
from megatron_chameleon.artifacts.corpus import index_file_bytes
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods import natural, uniform, unimax
from megatron_chameleon.methods.common.epoch_limit import EpochLimit
from megatron_chameleon.methods.natural import NaturalOptions
from megatron_chameleon.methods.uniform import UniformOptions
from megatron_chameleon.methods.unimax import UnimaxOptions

METHODS = {"uniform": uniform, "natural": natural, "unimax": unimax}


@pytest.fixture
def options(corpus, tmp_path):
    """``options(name, **changes)`` of a method, on the small corpus."""
    kinds = {"uniform": UniformOptions, "natural": NaturalOptions, "unimax": UnimaxOptions}

    def make(name, **changes):
        settings = {"corpus": corpus.root, "output": tmp_path / f"{name}.json", **changes}
        if name == "unimax":
            settings.setdefault("token_budget", 1000)
        return kinds[name](**settings)

    return make


@pytest.fixture
def found(options):
    """``found(name, **changes)``: the mixture on disk."""

    def find(name, **changes):
        asked = options(name, **changes)
        METHODS[name].compute(asked)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is written sums to 1
            return Mixture.load(asked.output)

    return find


@pytest.mark.parametrize("name", METHODS)
def test_a_file_that_is_no_mixture_is_not_replaced(options, found, corpus, name):
    for source in (next(corpus.root.rglob("*.bin")), corpus.root / "corpus.json"):
        asked = options(name)
        shutil.copy(source, asked.output)
        with pytest.raises(UserError, match="exists and is "):
            METHODS[name].compute(asked)
        assert asked.output.read_bytes() == source.read_bytes()
        asked.output.unlink()
    found(name)
    found(name)  # a mixture is


@pytest.mark.parametrize("name", METHODS)
def test_the_same_command_gives_the_same_file_provenance_and_time_apart(options, found, name):
    bodies = []
    for _ in range(2):
        found(name)
        body = json.loads(options(name).output.read_text(), object_pairs_hook=list)
        bodies.append([field for field in body if field[0] not in ("provenance", "cost")])
    assert bodies[0] == bodies[1]


def tokens_of(corpus: Corpus) -> np.ndarray:
    return np.array(list(corpus.train_tokens.values()), np.float64)


def by_the_papers_words(tokens: np.ndarray, budget: float, max_epochs: float) -> np.ndarray:
    """UniMax as its authors describe it: the smallest first, an equal part of what is left."""
    left, shares = budget, np.zeros(len(tokens))
    for done, domain in enumerate(np.argsort(tokens)):
        part = left / (len(tokens) - done)
        shares[domain] = min(part, tokens[domain] * max_epochs)
        left -= shares[domain]
    return shares / shares.sum()


def test_uniform_gives_every_domain_the_same(found, corpus):
    mixture = found("uniform")
    assert mixture.weights == dict.fromkeys(corpus.names, pytest.approx(1 / 3))
    assert mixture.method == "uniform"


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_natural_weights_are_powers_of_the_shares_of_tokens(found, corpus, temperature):
    mixture = found("natural", temperature=temperature)
    powers = tokens_of(corpus) ** (1 / temperature)
    np.testing.assert_allclose(list(mixture.weights.values()), powers / powers.sum())
    assert mixture.parameters["temperature"] == temperature


@pytest.mark.parametrize("share", [0.2, 0.9, 0.97, 0.999, 1.0])
def test_unimax_is_what_its_paper_says(found, corpus, share):
    tokens, max_epochs = tokens_of(corpus), 2.0
    budget = int(share * max_epochs * tokens.sum())
    mixture = found("unimax", token_budget=budget, max_epochs=max_epochs)
    expected = by_the_papers_words(tokens, budget, max_epochs)
    np.testing.assert_allclose(list(mixture.weights.values()), expected)
    held = np.isclose(expected * budget, tokens * max_epochs, rtol=1e-12)
    if share < 1:
        assert mixture.capped == [
            n for n, is_held in zip(corpus.names, held, strict=True) if is_held
        ]
    assert all(epochs <= max_epochs * (1 + 1e-9) for epochs in mixture.epochs.values())


def test_unimax_needs_a_budget_that_the_epochs_can_fill(options):
    without_budget: dict[str, Any] = {"corpus": Path("c"), "output": Path("o.json")}
    with pytest.raises(TypeError, match="token_budget"):
        UnimaxOptions(**without_budget)
    with pytest.raises(UserError, match="fewer than the --token-budget"):
        unimax.compute(options("unimax", token_budget=10**9))


@pytest.mark.parametrize("name", METHODS)
def test_some_domains_alone(found, name):
    mixture = found(name, domains="poems, news")
    assert list(mixture.weights) == ["news", "poems"]
    assert sum(mixture.weights.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", METHODS)
def test_a_limit_of_epochs_is_kept_and_its_binding_is_told(found, corpus, capsys, name):
    budget = int(tokens_of(corpus).sum() * 0.9995)
    with pytest.warns(MixtureWarning, match=r"--max-epochs 1 holds \w+.* down, and the other"):
        mixture = found(name, token_budget=budget, max_epochs=1.0, **sharpened(name))
    assert max(mixture.epochs.values()) == pytest.approx(1.0)
    assert mixture.capped
    assert mixture.unconstrained != mixture.weights
    assert "held at the limit of 1 epochs" in capsys.readouterr().out


def sharpened(name: str) -> dict[str, float]:
    return {"temperature": 0.5} if name == "natural" else {}


@pytest.mark.parametrize("name", METHODS)
def test_the_file_says_how_it_was_found_and_that_it_cost_no_flops(found, corpus, name):
    mixture = found(name)
    assert mixture.provenance.inputs == {"corpus": corpus.hash}
    assert mixture.parameters["paper_flops"] == 0.0
    assert mixture.cost.flops == 0.0
    assert mixture.cost.wall_seconds > 0.0


@pytest.mark.parametrize("name", METHODS)
def test_the_end_says_what_was_made_and_what_is_next(options, capsys, name):
    asked = options(name)
    METHODS[name].compute(asked)
    said = capsys.readouterr().out
    assert "poems" in said
    assert f"written to {asked.output}; next: tools/pretrain_gpt.py" in said


@pytest.mark.parametrize("name", METHODS)
def test_only_the_first_rank_writes_and_speaks(options, monkeypatch, capsys, name):
    asked = options(name)
    monkeypatch.setenv("RANK", "1")
    METHODS[name].compute(asked)
    assert not asked.output.exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("uniform", {"domains": "news,verse"}, "there is no domain 'verse'"),
        ("natural", {"temperature": 0.0}, "--temperature 0 for .*: it must be a finite number"),
        ("unimax", {"max_epochs": 0.0}, "--max-epochs 0"),
        ("uniform", {"max_epochs": 2.0}, "limits the epochs of a --token-budget"),
    ],
)
def test_a_mistake_has_one_line_and_writes_nothing(options, name, changes, problem):
    asked = options(name, **changes)
    with pytest.raises(UserError, match=problem) as refused:
        METHODS[name].compute(asked)
    assert "\n" not in str(refused.value)
    assert not asked.output.exists()


@pytest.fixture
def with_an_empty_domain(corpus, tmp_path):
    """A copy of the corpus whose poems have no training text."""
    root = shutil.copytree(corpus.root, tmp_path / "copy")
    (root / "train/poems.bin").write_bytes(b"")
    index = root / "train/poems.idx"
    index.write_bytes(index.read_bytes()[: index_file_bytes(0)])
    body = json.loads((root / "corpus.json").read_text())
    body["domains"]["poems"]["train"] |= {"tokens": 0, "documents": 0, "block_checksums": None}
    body.pop("checksum", None)
    (root / "corpus.json").write_text(json.dumps(body))
    return root


def test_a_domain_without_text_gets_a_weight_by_no_method(options, found, with_an_empty_domain):
    with pytest.raises(UserError, match=r"'poems' of .* has no training tokens to draw"):
        uniform.compute(options("uniform", corpus=with_an_empty_domain))
    assert found("natural", corpus=with_an_empty_domain).weights["poems"] == 0.0
    with pytest.warns(MixtureWarning, match="holds poems down"):
        mixture = found("unimax", corpus=with_an_empty_domain)
    assert mixture.weights["poems"] == 0.0
    alone = found("uniform", corpus=with_an_empty_domain, domains="news,code")
    assert alone.weights == {"news": 0.5, "code": 0.5}


@given(
    st.lists(st.integers(1, 10**9), min_size=1, max_size=30),
    st.floats(0.01, 10.0),
    st.floats(0.001, 1.0),
)
@example([1] * 6, 1.0, 1.0)  # six sixths are less than 1 by their rounding
def test_the_limit_of_epochs_deals_a_budget_out_as_unimax_does(sizes, max_epochs, share):
    tokens = {str(position): size for position, size in enumerate(sizes)}
    budget = max(1, int(share * max_epochs * sum(sizes)))
    assume(budget <= max_epochs * sum(sizes))
    even = np.full(len(sizes), 1 / len(sizes))
    dealt = EpochLimit(tokens, budget, max_epochs).apply(even).weights
    expected = by_the_papers_words(np.array(sizes, np.float64), budget, max_epochs)
    np.testing.assert_allclose(dealt, expected, rtol=1e-9)
