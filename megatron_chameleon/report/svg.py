"""A figure as SVG inside a page: text as text, and the page's colours in place of the figure's."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator

import matplotlib
import numpy as np
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from megatron_chameleon.report.figures import COLORS, GRID_COLOR, PROXY_COLOR, REFERENCE_COLOR

# Colours that the page redefines when it is dark; others stay as they are.
PAGE_COLORS = {
    "#ffffff": "var(--paper)",
    "#000000": "var(--ink)",
    GRID_COLOR.lower(): "var(--grid)",
    PROXY_COLOR.lower(): "var(--proxy)",
    REFERENCE_COLOR.lower(): "var(--reference)",
    **{color.lower(): f"var(--series-{i})" for i, color in enumerate(COLORS[:-1])},
}
# More points than these become an image, instead of an element each.
MOST_POINTS = 3000
IMAGE_DPI = 200
_NUMBER = re.compile(r"-?\d+\.\d+")
_STYLE = re.compile(r' style="([^"]*)"')


def svg_content(figure: Figure, name: str) -> str:
    """What is inside the ``<svg>`` element of ``figure``; equal figures give equal text.

    Args:
        figure: with the colours of ``report.figures``. matplotlib escapes its texts.
        name: salts the ids, so that several figures can be in one page.
    """
    stream = io.BytesIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    settings = {"svg.fonttype": "none", "svg.hashsalt": name}
    with _for_a_page(figure), matplotlib.rc_context(settings), warnings.catch_warnings():
        # The reader's browser has more fonts than matplotlib.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(stream, format="svg", dpi=IMAGE_DPI, metadata=no_metadata)
    text = stream.getvalue().decode("utf-8")
    text = text[text.index(">", text.index("<svg")) + 1 : text.rindex("</svg>")]
    # Its style would reach the page; ids of groups repeat in every figure and are never referenced.
    text = re.sub(r"<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"<[a-zA-Z][^>]*>", lambda found: _restyled(found[0]), text)
    text = re.sub(r"(<g[^>]*)>(\s*(?:<use [^>]*/>\s*)+</g>)", _share_style, text)
    return re.sub(r"\n\s*", "\n", text)


def _restyled(tag: str) -> str:
    """The page's colours and font, fewer digits, and no line breaks in attributes."""
    tag = re.sub(r"font-family: [^;\"]*(; |)", "", tag)
    tag = re.sub(r"(?<=: )#[0-9a-f]{6}", lambda found: PAGE_COLORS.get(found[0], found[0]), tag)
    tag = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", tag)
    if "base64" in tag:
        return re.sub(r"\s+", "", tag.replace(" ", "\0")).replace("\0", " ").replace("xlink:", "")
    is_curved = re.search(r' d="[^"]*[A-KN-Ya-kn-y]', tag)
    places = 4 if "matrix" in tag else 1 if " d=" in tag and not is_curved else 2
    tag = _NUMBER.sub(lambda found: f"{float(found[0]):.{places}f}", tag)
    # Points after the first are lines by themselves.
    return re.sub(r"\s+", " ", tag).replace("xlink:href", "href").replace(" L ", " ")


def _share_style(group: re.Match[str]) -> str:
    """Write the common style of all markers once, on their group."""
    styles = set(_STYLE.findall(group[2]))
    if len(styles) != 1:
        return group[0]
    return f'{group[1]} style="{styles.pop()}">{_STYLE.sub("", group[2])}'


@contextlib.contextmanager
def _for_a_page(figure: Figure) -> Iterator[None]:
    """Write images with as many pixels as their data, and few points as elements.

    Browsers scale such images without smoothing; points in an image could not change colour.
    """
    images = [
        image
        for axes in figure.axes
        for image in axes.images
        if image.get_interpolation() == "nearest"
    ]
    points = {
        line: np.size(line.get_xdata())
        for axes in figure.axes
        for line in axes.lines
        if line.get_rasterized()
    } | {
        collection: np.size(collection.get_offsets()) // 2
        for axes in figure.axes
        for collection in axes.collections
        if isinstance(collection, PathCollection)
    }
    before = {artist: artist.get_rasterized() for artist in points}
    for image in images:
        image.set_interpolation("none")
    for artist in points:
        artist.set_rasterized(sum(points.values()) > MOST_POINTS)
    try:
        yield
    finally:
        for image in images:
            image.set_interpolation("nearest")
        for artist, was in before.items():
            artist.set_rasterized(was)
