"""Convert the LaTeX of pages to MathML at build time, so that browsers need no script."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# Matches the output of pymdownx.arithmatex for $...$ and $$...$$.
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def with_mathml(page: str) -> str:
    """Return the HTML of a page with its equations converted to MathML.

    Raises:
        Exception: from latex2mathml, for LaTeX that it cannot parse.
    """
    return _EQUATION.sub(_mathml, page)


def _mathml(equation: re.Match[str]) -> str:
    latex = html.unescape(equation[2]).strip()
    return str(convert(latex, display="block" if equation[1] == "div" else "inline"))
