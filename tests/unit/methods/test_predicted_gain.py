"""Methods that train proxies: the gain is predicted first, and without one the prior is written."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from megatron_chameleon.artifacts import Corpus, Mixture, Split
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange.mixture_runs import write_mixture_runs
from megatron_chameleon.methods.doge import DogeOptions
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.method import find_methods
from megatron_chameleon.methods.mixing_laws import LawOptions, MixingLawsOptions
from megatron_chameleon.methods.options import PriorOptions
from megatron_chameleon.methods.regmix import RegmixOptions
from megatron_chameleon.methods.surrogate import OptimumOptions, SurrogateOptions
from megatron_chameleon.methods.swarm import MixtureSamplingOptions
from tests.small_corpus import DOMAINS, PREDICTABLE, ring_document, write_small_corpus
from tests.unit.methods.swarm.small_swarm import PROXY, SWARM
from tests.unit.methods.swarm.test_fit import TREES, runs_of

EQUAL = [1 / 3] * 3
OF_PROXY = {"proxy": dataclasses.replace(PROXY, train_iters=2)}
OF_SWARMS: dict[str, Any] = {
    "num_proxies": 4,
    "sampling": MixtureSamplingOptions(smallest_weight=0.05),
    "swarm": dataclasses.replace(SWARM, train_iters=2),
}
METHODS: dict[Any, dict[str, Any]] = {
    DoremiOptions: OF_PROXY,
    DogeOptions: OF_PROXY,
    MixingLawsOptions: {"laws": LawOptions(num_starts=2), **OF_SWARMS},
    SurrogateOptions: {
        "fallback": PriorOptions("uniform"),
        "optimum": OptimumOptions(num_draws=200, splits=2),
        **OF_SWARMS,
        "num_proxies": 16,
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Three domains, and a held-out domain like the first: mixtures gain for it alone."""
    root = tmp_path_factory.mktemp("corpus")
    write_small_corpus(
        root / "all",
        (*DOMAINS, "mine"),
        document=lambda number, rng: ring_document(number % len(DOMAINS), rng),
        counts=PREDICTABLE,
    )
    import_corpus(ImportOptions(root / "held-out", corpus=root / "all", held_out="mine"))
    return root / "held-out"


@pytest.fixture
def compute(corpus, tmp_path):
    """``compute(options_type, **changes)``: the mixture, and whether proxies were trained."""

    def run(options_type, **changes):
        output = tmp_path / "out" / "mixture.json"
        settings = {"corpus": corpus, "output": output, **METHODS[options_type], **changes}
        (method,) = (each for each in find_methods().values() if each.options is options_type)
        assert not method.compute(options_type(**settings))
        mixture = Mixture.load(output)
        assert mixture.method == method.name
        return mixture, output.with_suffix("").exists()

    return run


@pytest.mark.parametrize("options_type", [DoremiOptions, MixingLawsOptions])
def test_without_a_gain_the_prior_is_written_and_no_proxy_is_trained(compute, options_type, capsys):
    """The average over the domains is predicted best by Uniform."""
    mixture, is_trained = compute(options_type)
    assert not is_trained
    assert list(mixture.weights.values()) == pytest.approx(EQUAL)
    assert mixture.parameters["written"] == "prior"
    assert mixture.cost.flops == 0
    headroom = mixture.parameters["headroom"]
    assert headroom["predicted_gain"]["uniform"]["gain"] < 0.01
    assert headroom["predicted_gain"]["prior"]["seeds_needed"] is None
    assert headroom["seed_noise"] > 0
    assert "--accept-uncertain" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
def test_the_prior_is_written_within_the_limits(compute, corpus):
    budget = round(Corpus.load(corpus).train_tokens["code"] / 0.34)
    limits = {"token_budget": budget, "max_epochs": 1.0}
    optimum = OptimumOptions(max_weight="news=0.3")
    mixture, is_trained = compute(SurrogateOptions, optimum=optimum, **limits)
    assert not is_trained
    assert list(mixture.weights.values()) == pytest.approx([0.3, 0.34, 0.36], abs=1e-3)
    assert list(mixture.unconstrained.values()) == pytest.approx([0.3, 0.35, 0.35])
    assert mixture.capped == ["code"]


ACCEPTING = {"fallback": PriorOptions(accept_uncertain=True)}


def test_proxies_are_trained_for_a_certain_gain(compute, capsys):
    mixture, is_trained = compute(DogeOptions, target="mine")
    assert is_trained
    assert "headroom" not in mixture.parameters
    assert "predicted gain" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
@pytest.mark.parametrize("options_type", [DoremiOptions, MixingLawsOptions])
def test_no_gain_is_predicted_if_the_user_accepts_none_or_proxies_exist(
    compute, options_type, capsys
):
    for changes in (ACCEPTING, {}):
        mixture, is_trained = compute(options_type, **changes)
        assert is_trained
        assert mixture.cost.flops + mixture.parameters["total_cost"]["flops"] > 0
        assert "headroom" not in mixture.parameters
        printed = capsys.readouterr().out
        assert "predicted gain" not in printed
        assert ("no gain is predicted, since" in printed) == (changes is not ACCEPTING)


def test_the_method_continues_if_the_gain_cannot_be_measured(compute, tmp_path, capsys):
    """Also without a tokenizer, which the corpora of this file lack."""
    counts: dict[Split, int] = {"train": 20, "valid": 1, "test": 1}
    write_small_corpus(tmp_path / "short", counts=counts)
    _, is_trained = compute(DoremiOptions, corpus=tmp_path / "short")
    assert is_trained
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "not measured" in line)
    assert "news" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"fallback": PriorOptions("missing.json")},
        {"seed_noise": "-1"},
        {"seed_noise": "0.1", **ACCEPTING},
    ],
)
def test_a_mistake_is_not_a_gain_that_cannot_be_measured(compute, changes):
    with pytest.raises(UserError, match=r"missing.json|--seed-noise"):
        compute(DogeOptions, **changes)


@pytest.mark.filterwarnings("ignore::megatron_chameleon.artifacts.MixtureWarning")
@pytest.mark.parametrize(
    ("options_type", "fit"),
    [(RegmixOptions, {"trees": TREES}), (MixingLawsOptions, {"laws": LawOptions(num_starts=2)})],
)
def test_a_fit_to_noise_gives_the_prior_and_a_fit_to_losses_the_optimum(
    corpus, tmp_path, options_type, fit, capsys
):
    tables = {"ratios": tmp_path / "ratios.csv", "metrics": tmp_path / "metrics.csv"}
    settings = {"corpus": corpus, "output": tmp_path / "mixture.json", **fit, **tables}
    (method,) = (each for each in find_methods().values() if each.options is options_type)

    def fitted(losses_of, **changes) -> Mixture:
        write_mixture_runs(runs_of(losses_of, 32), **tables)
        assert not method.compute(options_type(**settings, **changes))
        return Mixture.load(settings["output"])

    rng = np.random.default_rng(1)
    noise = functools.partial(lambda drawn, mixtures: 2 + drawn, rng.normal(0, 0.1, (32, 3)))
    mixture = fitted(noise)
    assert mixture.parameters["written"] == "prior"
    assert list(mixture.weights.values()) == pytest.approx(EQUAL)
    assert mixture.parameters["optimum"] != pytest.approx(mixture.weights, abs=0.01)
    assert "no better than a constant" in capsys.readouterr().out
    natural = fitted(noise, fallback=PriorOptions("natural"))
    assert natural.weights != mixture.weights
    accepted = fitted(noise, **ACCEPTING)
    assert accepted.parameters["written"] == "optimum"
    assert accepted.weights == mixture.parameters["optimum"]
    assert "no better than a constant" in capsys.readouterr().out
    # The fit is better than a constant, but the best mixture is hardly better than Uniform.
    flat = fitted(lambda mixtures: 2 + (mixtures - [0.4, 0.3, 0.3]) ** 2)
    gain = flat.parameters["predicted_gain"]["prior"]
    assert gain["low"] < 0 < gain["high"]
    assert flat.parameters["written"] == "prior"
    assert "no better than a constant" not in capsys.readouterr().out
    steep = fitted(lambda mixtures: 2 + (mixtures - [0.8, 0.1, 0.1]) ** 2)
    assert steep.parameters["predicted_gain"]["prior"]["low"] > 0
    assert steep.parameters["written"] == "optimum"
    assert steep.weights["news"] > 0.6
