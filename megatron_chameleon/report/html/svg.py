"""A figure as SVG inside a page: real text, the page's colours, and a text alternative."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from megatron_chameleon.report.figures import COLORS, GRID_COLOR, PROXY_COLOR, REFERENCE_COLOR
from megatron_chameleon.report.html.elements import Element, element

# What the page has another colour for when it is dark; any other colour stays as it is.
PAGE_COLORS = {
    "#ffffff": "var(--paper)",
    "#000000": "var(--ink)",
    GRID_COLOR.lower(): "var(--grid)",
    PROXY_COLOR.lower(): "var(--proxy)",
    REFERENCE_COLOR.lower(): "var(--reference)",
    **{color.lower(): f"var(--series-{i})" for i, color in enumerate(COLORS[:-1])},
}
# More points than these are an image: each would be an element of its own.
MOST_POINTS = 3000
IMAGE_DPI = 200
POINTS_PER_INCH = 72
# What is less than a tenth of a point is not seen in a path, and a hundredth nowhere.
_NUMBER = re.compile(r"-?\d+\.\d+")
_NO_ROTATION = re.compile(r"rotate\(-?0 [^)]*\)")
_CURVED = re.compile("[A-KN-Ya-kn-y]")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_HREF = "{http://www.w3.org/1999/xlink}href"


def svg_element(figure: Figure, name: str, title: str, description: str) -> Element:
    """``figure`` as an svg element; equal figures give equal elements.

    Args:
        figure: drawn with the colours of report/figures.py.
        name: goes before every id, so that several figures can be in one page.
        title: what the figure is.
        description: what it shows, for those who do not see it.
    """
    root = _plain(ElementTree.fromstring(_rendered(figure, name)))
    _remove(root, {"metadata", "style"})
    _rename_ids(root, name)
    for node in root.iter():
        _restyle(node)
        _shorten(node)
    for node in root.iter("g"):
        _share_style(node)
    _unwrap(root)
    svg = element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-description"),
        *root,
        role="img",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-description",
        viewBox=root.attrib["viewBox"],
    )
    svg.attrib["style"] = f"--width: {figure.get_figwidth():g}"
    return svg


def _rendered(figure: Figure, name: str) -> bytes:
    stream = io.BytesIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": name}
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _for_a_page(figure), matplotlib.rc_context(settings), warnings.catch_warnings():
        # The reader's browser has more fonts than the one that the figure was laid out with.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(stream, format="svg", dpi=IMAGE_DPI, metadata=nothing)
    return stream.getvalue()


@contextlib.contextmanager
def _for_a_page(figure: Figure) -> Iterator[None]:
    """A block in which images have as many points as their data, and few points are no image.

    Browsers draw each point of such an image as a square; and points in an image could not change
    their colours with the page.
    """
    images = [
        image
        for axes in figure.axes
        for image in axes.images
        if image.get_interpolation() == "nearest"
    ]
    clouds: dict[Artist, int] = {}
    for axes in figure.axes:
        clouds |= {line: np.size(line.get_xdata()) for line in axes.lines if line.get_rasterized()}
        scattered = (c for c in axes.collections if isinstance(c, PathCollection))
        clouds |= {collection: np.size(collection.get_offsets()) // 2 for collection in scattered}
    before = {cloud: cloud.get_rasterized() for cloud in clouds}
    for image in images:
        image.set_interpolation("none")
    for cloud in clouds:
        cloud.set_rasterized(sum(clouds.values()) > MOST_POINTS)
    try:
        yield
    finally:
        for image in images:
            image.set_interpolation("nearest")
        for cloud, was in before.items():
            cloud.set_rasterized(was)


def _plain(root: Element) -> Element:
    """Tags and links without the namespaces that HTML knows by itself."""
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.tail = "\n" if node.tag == "g" else None
        if node.tag not in ("text", "tspan"):
            node.text = None
        if _HREF in node.attrib:
            node.attrib["href"] = node.attrib.pop(_HREF)
    return root


def _remove(root: Element, tags: set[str]) -> None:
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in tags]:
            parent.remove(child)


def _rename_ids(root: Element, name: str) -> None:
    """Ids that nothing points to go; the others are ``name`` and a number."""
    values = [value for node in root.iter() for value in node.attrib.values()]
    used = {value[1:] for value in values if value.startswith("#")}
    used |= {found for value in values for found in _REFERENCE.findall(value)}
    ids = [node.attrib.pop("id", "") for node in root.iter()]
    short = {old: f"{name}-{i}" for i, old in enumerate(old for old in ids if old in used)}
    for node, old in zip(root.iter(), ids, strict=True):
        for attribute, value in node.attrib.items():
            if attribute == "href" and value.startswith("#"):
                node.attrib[attribute] = f"#{short[value[1:]]}"
            else:
                node.attrib[attribute] = _REFERENCE.sub(lambda f: f"url(#{short[f[1]]})", value)
        if old in used:
            node.attrib["id"] = short[old]


def _restyle(node: Element) -> None:
    """The page's colours and font in place of the figure's."""
    parts = (part.partition(":") for part in node.attrib.pop("style", "").split(";"))
    style = {key.strip(): value.strip() for key, _, value in parts if value}
    style.pop("font-family", None)
    for key in ("fill", "stroke"):
        if key in style:
            style[key] = PAGE_COLORS.get(style[key].lower(), style[key])
    if style:
        node.attrib["style"] = ";".join(f"{key}:{value}" for key, value in style.items())


def _shorten(node: Element) -> None:
    """Fewer digits, no turns by nothing, and lines without a letter for each of their points."""
    for key in ("x", "y", "transform", "width", "height"):
        if key in node.attrib:
            places = 4 if "matrix" in node.attrib[key] else 2
            node.attrib[key] = _NO_ROTATION.sub("", _rounded(node.attrib[key], places)).strip()
    if not node.attrib.get("transform", "-"):
        del node.attrib["transform"]
    if "d" in node.attrib:
        path, is_curved = node.attrib["d"], _CURVED.search(node.attrib["d"])
        path = " ".join(_rounded(path, 2 if is_curved else 1).split())
        # What follows a beginning is a line by itself.
        node.attrib["d"] = path if is_curved else path.replace(" L ", " ")


def _rounded(numbers: str, places: int) -> str:
    return _NUMBER.sub(lambda found: f"{float(found[0]):.{places}f}", numbers)


def _share_style(group: Element) -> None:
    """What all markers of a line have in common is said once."""
    styles = {child.attrib.get("style", "") for child in group}
    if len(group) > 1 and len(styles) == 1 and {child.tag for child in group} == {"use"}:
        group.attrib["style"] = styles.pop()
        for child in group:
            child.attrib.pop("style", None)


def _unwrap(parent: Element) -> None:
    """Groups that say nothing go, and what is in them stays."""
    for child in list(parent):
        _unwrap(child)
        if child.tag == "g" and not child.attrib:
            place = list(parent).index(child)
            parent.remove(child)
            for i, inner in enumerate(child):
                parent.insert(place + i, inner)
