"""Figures inside the page: real text, the page's colours, ids of their own, and not too large."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pandas as pd
import pytest

from megatron_chameleon.report.figures import (
    COLORS,
    GRID_COLOR,
    RunCurves,
    affinity_figure,
    loss_figure,
    new_figure,
    weights_figure,
)
from megatron_chameleon.report.svg import IMAGE_DPI, PAGE_COLORS, svg_content
from tests.unit.report.html_reading import read_html
from tests.unit.report.report_samples import NAMES, random_mixture, random_weights


@pytest.fixture
def mixtures(rng):
    features = rng.normal(size=(len(NAMES), 4))
    return {"one": random_mixture(random_weights(NAMES, rng), "pretrain", features)}


def svg_of(figure, name="picture"):
    return read_html(f"<!DOCTYPE html>\n<svg>{svg_content(figure, name)}</svg>")


def test_texts_are_texts(mixtures):
    texts = {node.text for node in svg_of(weights_figure(mixtures)).all("text")}
    assert {*NAMES, "one", "uniform (1/3)"} <= texts


def test_colours_are_the_page_s(mixtures):
    page = svg_content(weights_figure(mixtures), "w")
    for name in ("--paper", "--grid", "--reference", "--series-0"):
        assert f"var({name})" in page
    for color in PAGE_COLORS:
        assert color not in page.lower()
    assert GRID_COLOR.lower() in PAGE_COLORS
    assert {color.lower() for color in COLORS} <= set(PAGE_COLORS)


def test_signs_on_the_heat_map_keep_their_colours(rng):
    features = rng.normal(size=(5, 8))
    svg = svg_of(affinity_figure(features @ features.T, list("abcde")))
    figures = [n for n in svg.all("text") if re.fullmatch(r"−?-?\d+\.\d\d", n.text)]
    styles = [n.attributes["style"] for n in figures if "fill:" in n.attributes["style"]]
    assert len(styles) == 25
    assert all(re.search("fill: (#111111|#fdfdfd)", style) for style in styles)


def test_two_figures_share_no_id(mixtures):
    ids = []
    for name in ("one", "two"):
        svg = svg_of(weights_figure(mixtures), name)
        ids += [n.attributes["id"] for n in svg.everything() if "id" in n.attributes]
    assert len(ids) > 6
    assert len(ids) == len(set(ids))


def test_the_style_of_a_figure_does_not_reach_the_page(mixtures):
    svg = svg_of(weights_figure(mixtures))
    assert svg.all("style") == []
    assert svg.all("metadata") == []


def test_a_sign_that_the_picture_s_font_lacks_is_no_warning(rng):
    mixture = random_mixture({"日本語": 0.4, "שלום": 0.6}, "pretrain", rng.normal(size=(2, 4)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        svg = svg_of(weights_figure({"one": mixture}))
    assert {"日本語", "שלום"} <= {node.text for node in svg.all("text")}


@pytest.mark.parametrize(("count", "images"), [(300, 0), (5000, 1)])
def test_many_points_are_one_image(rng, count, images):
    figure = new_figure(5, 5)
    figure.add_subplot().scatter(*rng.normal(size=(2, count)), color=COLORS[0])
    svg = svg_of(figure)
    assert len(svg.all("image")) == images
    assert len(svg.all("use")) >= (0 if images else count)
    if images:
        image = svg.all("image")[0].attributes
        assert image["href"].startswith("data:image/png;base64,")
        assert len(image["href"]) < IMAGE_DPI**2 * 25


def test_points_of_a_line_are_drawn_in_the_colours_of_the_page(rng):
    figure = new_figure(5, 5)
    (line,) = figure.add_subplot().plot(*rng.normal(size=(2, 500)), "ko", rasterized=True)
    svg = svg_of(figure)
    assert svg.all("image") == []
    assert len([n for n in svg.all("use") if "style" not in n.attributes]) >= 500
    assert line.get_rasterized()  # as a PDF of the same figure has it


def test_a_heat_map_is_as_large_as_its_data(rng):
    figure = affinity_figure(np.diag(np.arange(40.0)), [f"d{i}" for i in range(40)])
    image = svg_of(figure).all("image")[0].attributes
    assert "image-rendering:pixelated" in image["style"]
    assert len(image["href"]) < 3000
    assert figure.axes[0].images[0].get_interpolation() == "nearest"


def test_long_runs_of_many_domains_stay_small(rng):
    steps = np.arange(1.0, 5001.0)

    def curve():
        return pd.Series(3 + steps**-0.5 + rng.normal(0, 0.1, len(steps)), steps)

    runs = [RunCurves(n, curve(), {f"d{i}": curve() for i in range(40)}, {}) for n in ("a", "b")]
    page = svg_content(loss_figure(runs), "loss")
    assert len(page) < 700_000
