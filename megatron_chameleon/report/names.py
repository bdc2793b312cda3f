"""Names that a user chose, made fit for a terminal, for Markdown and for a picture."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

ELLIPSIS = "…"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Backslash escapes of these are understood by every Markdown dialect that has tables.
_MARKDOWN_SIGNS = re.compile(r"([\\`*_\[\]<>|~&#!$])")
SLUG_LIMIT = 60


def one_line(name: str) -> str:
    """``name`` with white space joined, and with nothing that a terminal would obey."""
    return printable(" ".join(name.split()))


def printable(text: str) -> str:
    """``text`` with another sign for each that steers a terminal or the direction of writing."""
    return "".join(sign if sign.isprintable() else REPLACEMENT for sign in text)


def slug(title: str) -> str:
    """``title`` as part of a file's name or an address: small letters, digits and hyphens."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:SLUG_LIMIT].rstrip("-")


def shortened(name: str, limit: int) -> str:
    """At most ``limit`` signs of ``name``.

    The middle is left out, since names of a family differ at their ends.
    """
    name = one_line(name)
    if len(name) <= limit:
        return name
    tail = (limit - 1) // 3
    return name[: limit - 1 - tail] + ELLIPSIS + name[len(name) - tail :]


def unique_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """``labels`` by name, where names whose label is not theirs alone have themselves as labels."""
    found = dict(labels)
    while True:
        count = Counter(found.values())
        shared = {name for name, label in found.items() if count[label] > 1 and label != name}
        if not shared:
            return found
        found |= {name: name for name in shared}


def markdown(text: str) -> str:
    """``text`` escaped so that Markdown shows it as it is, in a table's cell too."""
    return _MARKDOWN_SIGNS.sub(r"\\\1", one_line(text))


def display_width(text: str) -> int:
    """Columns of a terminal that ``text`` takes: two for a wide sign, none for a combining one."""
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        for sign in text
    )
