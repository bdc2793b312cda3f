"""HTML as a tree, so that what a user named something can only ever be text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from megatron_chameleon.report.names import printable

Element = ElementTree.Element
DOCTYPE = "<!DOCTYPE html>\n"
# Tags after which a line ends in the file, for those who look at its source.
_BLOCKS = {"head", "meta", "title", "style", "script", "section", "h1", "h2", "p", "li", "tr"}
_BLOCKS |= {"header", "nav", "main", "ol", "ul", "thead", "tbody", "tfoot", "figure", "svg", "g"}


def element(tag: str, *children: Element | str, **attributes: str) -> Element:
    """An element; ``class_`` and ``aria_label`` stand for class and aria-label."""
    made = Element(
        tag,
        {name.rstrip("_").replace("_", "-"): _shown(value) for name, value in attributes.items()},
    )
    if tag in _BLOCKS:
        made.tail = "\n"
    append(made, *children)
    return made


def append(parent: Element, *children: Element | str) -> None:
    """Put ``children``, elements and text, at the end of ``parent``."""
    for child in children:
        if not isinstance(child, str):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + _shown(child)
        else:
            parent.text = (parent.text or "") + _shown(child)


def _shown(text: str) -> str:
    """What XML and HTML can hold of ``text``; white space at its ends separates it from others."""
    return printable(re.sub(r"\s+", " ", text))


def raw(tag: str, text: str, **attributes: str) -> Element:
    """A style or a script of our own, which browsers read without any escapes.

    Raises:
        ValueError: if the text would end the element.
    """
    if tag not in ("style", "script") or f"</{tag}" in text.lower() or "<!--" in text:
        raise ValueError(f"not the content of one {tag} element")
    made = element(tag, **attributes)
    made.text = text
    return made


def document(root: Element) -> str:
    """The page of which ``root`` is the html element."""
    return DOCTYPE + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"
