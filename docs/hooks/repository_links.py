"""Links from the documentation into the repository: which there are, and what they become.

On a code host a link leads to the file itself. The site has a page for each file that is linked, so
that it is whole by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = "docs"
# Files of the repository that are pages by themselves.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Folders whose page is made at build time.
FOLDERS = {"tools": "tools/index.md", "benchmarks/results": "performance.md"}
FILES = "files"
LANGUAGES = {
    ".json": "json",
    ".md": "markdown",
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".toml": "toml",
    ".yml": "yaml",
}
# [text](target#anchor) of a target that is no address and no anchor of the same page.
_LINK = re.compile(r"\]\((?![a-z][a-z0-9+.-]*:|#)([^()\s#]+)(#[^()\s]*)?\)")
_FENCED = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)


def markdown_sources(root: Path) -> list[str]:
    """The Markdown of the repository that people read, as paths below ``root``."""
    pages = (path.relative_to(root).as_posix() for path in (root / DOCS).rglob("*.md"))
    return [*PAGES, *sorted(pages)]


def links(markdown: str) -> Iterator[re.Match[str]]:
    """The relative links of a text, code in fences left out."""
    return _LINK.finditer(_FENCED.sub(lambda fenced: " " * len(fenced[0]), markdown))


def target_of(link: re.Match[str], source: str) -> str:
    """What below the root a link in the file ``source`` leads to, there or not."""
    return os.path.normpath(os.path.join(os.path.dirname(source), link[1]))


def linked_files(root: Path) -> set[str]:
    """Every file outside of docs/ that a page links to, and that is no page by itself."""
    found = set()
    for source in markdown_sources(root):
        for link in links((root / source).read_text(encoding="utf-8")):
            found.add(target_of(link, source))
    return {name for name in found if page_of(name).startswith(f"{FILES}/")}


def page_of(name: str) -> str:
    """Where a file of the repository, or one of FOLDERS, stands among the pages of the site."""
    if name in PAGES or name in FOLDERS:
        return {**PAGES, **FOLDERS}[name]
    if os.path.dirname(name) == "tools":  # the page of a tool says more than its file
        return f"{name.removesuffix('.py')}.md"
    if name.startswith(f"{DOCS}/"):
        return name.removeprefix(f"{DOCS}/")
    return f"{FILES}/{name}.md"


def with_site_links(markdown: str, source: str, page: str) -> str:
    """``markdown`` of the file ``source`` as it is on ``page``: links lead to pages of the site."""
    parts, end = [], 0
    for link in links(markdown):
        target = os.path.relpath(page_of(target_of(link, source)), os.path.dirname(page) or ".")
        parts += [markdown[end : link.start()], f"]({target}{link[2] or ''})"]
        end = link.end()
    return "".join([*parts, markdown[end:]])


def file_page(root: Path, name: str) -> str:
    """A page that shows the file ``name``; the search leaves it out."""
    text = (root / name).read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    language = LANGUAGES.get(Path(name).suffix, "text")
    head = ["---", "search:", "  exclude: true", "---", "", f"# {name}", ""]
    return "\n".join([*head, f"{fence}{language}", text, fence, ""])
