"""The paper's figures of cost, from its rule and its settings, and the same settings counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.paper_flops import (
    PAPER,
    PaperSettings,
    counted_flops,
    paper_flops,
    paper_parameters,
)
from megatron_chameleon.model.sizes import ModelShape, ModelSize, model_size

# As printed under the table of perplexities, and the ratios to Chameleon that the text speaks of.
PRINTED = {"doremi": 1.34e18, "doge": 6.68e17, "chameleon": 1.36e17, "regmix": 1.20e18}
RATIOS = {"doremi": 10, "doge": 5, "chameleon": 1, "regmix": 9, "mixing-laws": 394}
VOCABULARY = 50257


@pytest.mark.parametrize("method", PRINTED)
def test_the_papers_settings_give_the_figures_it_prints(method):
    assert float(f"{paper_flops(method):.2e}") == PRINTED[method]


@pytest.mark.parametrize("method", RATIOS)
def test_the_papers_settings_give_its_ratios_to_chameleon(method):
    assert round(paper_flops(method) / paper_flops("chameleon")) == RATIOS[method]


def test_mixing_laws_are_within_the_papers_own_rounding():
    """It prints 5.36e19, which is 40 times its rounded figure for DoReMi."""
    assert paper_flops("mixing-laws") == pytest.approx(5.36e19, rel=0.005)


def test_embedding_the_pile_takes_what_the_paper_prints():
    settings = PaperSettings(embedded_tokens=17 * 4000 * 400)
    assert float(f"{paper_flops('chameleon', settings):.2e}") == 4.62e15


@pytest.mark.parametrize("method", PAPER)
def test_a_run_of_other_settings_is_counted_by_them(method):
    settings = PaperSettings(model_size="mini", trained_tokens=1000, num_proxies=3)
    parameters = 12 * 6 * 256**2
    trainings = 3 * (2 if method == "doremi" else 1)
    assert paper_flops(method, settings) == 6 * parameters * 1000 * trainings


def test_a_method_that_the_paper_does_not_have_is_counted_by_its_settings_alone():
    settings = PaperSettings(model_size="mini", trained_tokens=1000)
    assert paper_flops("mine", settings) == 6 * 12 * 6 * 256**2 * 1000
    with pytest.raises(ValueError, match=r"the paper has no 'mine', only doremi, doge, .*: give"):
        paper_flops("mine")


def test_parameters_are_those_of_the_size_or_as_printed_for_it():
    assert paper_parameters("82m") == 12 * 12 * 768**2 == 84_934_656
    assert paper_parameters(model_size("82m")) == 84_934_656
    assert paper_parameters("124m") == paper_parameters("82m")
    assert paper_parameters(ModelSize(5, 2, 10, 40)) == 12 * 5 * 100


def counted(method: str) -> float:
    settings = PAPER[method]
    length = 2048 if method == "regmix" else 1024
    assert isinstance(settings.model_size, str)
    shape = ModelShape(model_size(settings.model_size), VOCABULARY, length)
    return counted_flops(method, settings, shape, length, window_length=512)


def test_the_true_82m_proxy_is_nearer_to_doge_and_further_from_doremi():
    """With six layers, their attention, the head and the forward passes of the reference."""
    assert counted("doremi") / counted("chameleon") == pytest.approx(11.6, abs=0.05)
    assert counted("doge") / counted("chameleon") == pytest.approx(5.0, abs=0.05)


def test_the_reference_reads_what_the_proxy_is_trained_on():
    """Two trainings of three forward passes, and one forward pass."""
    shape = ModelShape(model_size("82m"), VOCABULARY, 1024)
    one = training_flops(shape, PAPER["doremi"].trained_tokens, 1024)
    assert counted("doremi") == pytest.approx(one * (2 + 1 / 3))


DOCUMENTED = re.findall(
    r"^\| (\w[\w ]+) \| (\d\.\d+e\d+) \| \S+ \| (\d+)x \| (?:(\S+) \| ([\d.]+)x)?",
    (Path(__file__).resolve().parents[3] / "docs/methods/index.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize("row", DOCUMENTED, ids=lambda row: row[0])
def test_the_documented_figures_are_those(row):
    name, rule, ratio, true, true_ratio = row
    method = name.lower().replace(" ", "-")
    assert f"{paper_flops(method):.2e}".replace("+", "") == rule
    assert round(paper_flops(method) / paper_flops("chameleon")) == int(ratio)
    if true:
        assert f"{counted(method):.2e}".replace("+", "") == true
        assert f"{counted(method) / counted('chameleon'):.1f}" == true_ratio


def test_all_of_the_documented_figures_are_compared():
    assert {row[0] for row in DOCUMENTED} == {
        "Chameleon",
        "DoGE",
        "RegMix",
        "DoReMi",
        "mixing laws",
    }
