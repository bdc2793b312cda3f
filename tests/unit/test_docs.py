"""Test links and API names in the documentation, and example commands on the tools' pages."""

from __future__ import annotations

import pydoc
import re
import shlex
from pathlib import Path

from docs.hooks import repository_links
from docs.hooks.tool_options import find_tools
from docs.hooks.tool_pages import examples_of_tools, tool_pages
from megatron_chameleon.cli import parse_options, take_values
from megatron_chameleon.commands import command_names

ROOT = Path(__file__).resolve().parents[2]


def anchors_of(markdown: str) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and code hosts form them."""
    text = re.sub(r"^(```+).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


def test_links_are_not_broken():
    for source in repository_links.markdown_sources(ROOT):
        for link in repository_links.links((ROOT / source).read_text(encoding="utf-8")):
            target = ROOT / repository_links.target_of(link, source)
            anchor = (link[2] or "").removeprefix("#")
            assert target.exists(), (source, link[0])
            assert not anchor or anchor in anchors_of(target.read_text("utf-8")), (source, link[0])


def test_names_on_the_api_page_can_be_imported():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(megatron_chameleon[.\w]+)", page))
    for module, names in re.findall(r"from (megatron_chameleon[.\w]*) import (.+)", page):
        documented |= {f"{module}.{name}" for name in names.split(", ")}
    module = "megatron_chameleon"
    for cell in re.findall(r"^\| (.*?) ?\|", page, re.MULTILINE):
        names = re.findall(r"`([.\w]+)", cell)
        if not names or names[0].startswith("megatron_chameleon"):
            module = names[0] if names else "megatron_chameleon"
        else:
            documented |= {f"{module}.{name}" for name in names}
    assert len(documented) > 20
    assert not {name for name in documented if pydoc.locate(name) is None}


TOOLS = find_tools()


def test_every_tool_has_a_page_with_valid_examples():
    assert {f"tools/{name}.md" for name in command_names()} < set(tool_pages())
    assert set(examples_of_tools()) == set(TOOLS)
    for tool, example in examples_of_tools().items():
        for line in example.get("examples", "").replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            words = shlex.split(line)
            start = words.index(tool)
            assert words[start - 1] in ("megatron-chameleon", "megatron_chameleon")
            arguments = [*words[start + 1 :], ">"]
            arguments = arguments[: arguments.index(">")]
            commands = TOOLS[tool].commands
            if "" in commands:
                parse_options(commands[""], arguments)
            elif arguments[0] in commands:
                parse_options(commands[arguments[0]], arguments[1:])
            else:
                chosen, rest = take_values("--method", arguments)
                parse_options(commands[f"--method {chosen[0] if chosen else 'chameleon'}"], rest)
