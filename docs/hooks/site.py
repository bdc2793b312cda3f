"""Define the MkDocs hooks: generate pages, rewrite links into the repository, convert equations."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Make docs.hooks importable, since MkDocs loads this file by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.hooks.equations import with_mathml
from docs.hooks.measurements import measurements_page
from docs.hooks.notebooks import notebook_page
from docs.hooks.repository_links import (
    DOCS,
    NOTEBOOKS,
    PAGES,
    file_page,
    linked_files,
    links,
    page_of,
    target_of,
    with_site_links,
)
from docs.hooks.tool_pages import tool_pages

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "Tools"
# Code that is a single flag; browsers would break the line after the flag's dashes.
FLAG = re.compile(r"<code>(?=--[a-z0-9-]+</code>)")
# Cross-references in docstrings are written in Sphinx's syntax, :meth:`name`.
ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")
# With --strict, a warning of this logger fails the build.
LOG = logging.getLogger("mkdocs.hooks.site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the tools' pages to the navigation."""
    pages: list[Any] = [name for name in tool_pages() if name != "tools/index.md"]
    for entry in config.nav or []:
        if TOOLS in entry:
            entry[TOOLS].extend({Path(page).stem: page} for page in pages)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    generated = {**tool_pages(), "performance.md": measurements_page(ROOT)}
    for name, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            generated[page] = with_site_links((ROOT / name).read_text(encoding="utf-8"), name, page)
    for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        name = path.relative_to(ROOT).as_posix()
        generated[page_of(name)] = with_site_links(notebook_page(path), name, page_of(name))
    for name in sorted(linked_files(ROOT)):
        if (ROOT / name).is_file():
            generated[page_of(name)] = file_page(ROOT, name)
    for page, content in generated.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links into the repository to the pages of its files."""
    if page.file.generated_by is not None:
        return markdown
    source = f"{DOCS}/{page.file.src_uri}"
    for link in links(markdown):
        target = target_of(link, source)
        if not (ROOT / target).exists():
            LOG.warning("%s: the link %s has no target in the repository", source, link[1])
    return with_site_links(markdown, source, page.file.src_uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert equations to MathML, keep flags on one line, and show references as code."""
    return ROLE.sub("", FLAG.sub('<code class="flag">', with_mathml(html)))
