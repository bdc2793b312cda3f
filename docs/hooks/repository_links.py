"""Rewrite links from the documentation into the repository for the site.

On a code host a link leads to the file. The site has a page for each linked file, so that it works
offline.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

DOCS = "docs"
NOTEBOOKS = f"{DOCS}/notebooks"
# Files outside docs/ that the site includes as pages.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# Folders whose pages are generated at build time.
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
# Matches links [text](target#anchor), except for URLs and anchors of the same page.
_LINK = re.compile(r"\]\((?![a-z][a-z0-9+.-]*:|#)([^()\s#]+)(#[^()\s]*)?\)")
_FENCED = re.compile(r"^(```+|~~~+).*?^\1", re.MULTILINE | re.DOTALL)


def markdown_sources(root: Path) -> list[str]:
    """Return the paths of the documentation's Markdown files, relative to ``root``."""
    pages = (path.relative_to(root).as_posix() for path in (root / DOCS).rglob("*.md"))
    return [*PAGES, *sorted(pages)]


def links(markdown: str) -> Iterator[re.Match[str]]:
    """Return the relative links of a text, except those in fenced code."""
    return _LINK.finditer(_FENCED.sub(lambda fenced: " " * len(fenced[0]), markdown))


def target_of(link: re.Match[str], source: str) -> str:
    """Return the target, relative to the root, of a link in ``source``; the file need not exist."""
    return os.path.normpath(os.path.join(os.path.dirname(source), link[1]))


def linked_files(root: Path) -> set[str]:
    """Return every file outside docs/ that a page links to and that is not in ``PAGES``."""
    found = set()
    for source in markdown_sources(root):
        for link in links((root / source).read_text(encoding="utf-8")):
            found.add(target_of(link, source))
    return {name for name in found if page_of(name).startswith(f"{FILES}/")}


def page_of(name: str) -> str:
    """Return the site's page for a file of the repository, or for one of ``FOLDERS``."""
    if name in PAGES or name in FOLDERS:
        return {**PAGES, **FOLDERS}[name]
    # Link to a tool's generated page, since it also describes the flags, which the file does not.
    if os.path.dirname(name) == "tools":
        return f"{name.removesuffix('.py')}.md"
    if name.startswith(f"{DOCS}/"):
        return re.sub(r"\.ipynb$", ".md", name.removeprefix(f"{DOCS}/"))
    return f"{FILES}/{name}.md"


def with_site_links(markdown: str, source: str, page: str) -> str:
    """Return the Markdown of the file ``source`` with links for the site's page ``page``."""
    parts, end = [], 0
    for link in links(markdown):
        target = os.path.relpath(page_of(target_of(link, source)), os.path.dirname(page) or ".")
        parts += [markdown[end : link.start()], f"]({target}{link[2] or ''})"]
        end = link.end()
    return "".join([*parts, markdown[end:]])


def file_page(root: Path, name: str) -> str:
    """Return a page that shows the file ``name`` and is excluded from the search index."""
    text = (root / name).read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    language = LANGUAGES.get(Path(name).suffix, "text")
    head = ["---", "search:", "  exclude: true", "---", "", f"# {name}", ""]
    return "\n".join([*head, f"{fence}{language}", text, fence, ""])
