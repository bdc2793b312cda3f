"""Convert LaTeX in pages to MathML at build time, so that no script renders it in the browser."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

# The output of pymdownx.arithmatex for $...$ and $$...$$.
_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def with_mathml(page: str) -> str:
    """The HTML of a page with its equations as MathML.

    Raises:
        Exception: of latex2mathml, for LaTeX that it cannot parse.
    """
    return _EQUATION.sub(_mathml, page)


def _mathml(equation: re.Match[str]) -> str:
    latex = html.unescape(equation[2]).strip()
    return str(convert(latex, display="block" if equation[1] == "div" else "inline"))
