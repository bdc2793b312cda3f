"""The documentation against the code: artifact fields, messages, links, flags, examples, costs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from docs.hooks import repository_links
from docs.hooks.tool_options import find_tools, flag_groups
from docs.hooks.tool_pages import examples_of_tools, tool_pages
from megatron_chameleon import artifacts
from megatron_chameleon.artifacts.record import Record
from megatron_chameleon.cli import parse_options, take_values

ROOT = Path(__file__).resolve().parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


# Artifacts


def kinds_of_record(base: type[Record]) -> list[type[Record]]:
    """The subclasses of ``base`` that have none themselves."""
    return [kind for each in base.__subclasses__() for kind in kinds_of_record(each)] or [base]


def records() -> dict[str, Any]:
    """The records on disk and the dataclasses in their fields, by name."""
    for module in pkgutil.iter_modules(artifacts.__path__):
        importlib.import_module(f"{artifacts.__name__}.{module.name}")
    waiting: list[Any] = kinds_of_record(Record)
    found: dict[str, Any] = {}
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        is_record = dataclasses.is_dataclass(hint) and isinstance(hint, type)
        is_record = is_record and hint.__module__.startswith(artifacts.__name__)
        if is_record and hint.__name__ not in found:
            found[hint.__name__] = hint
            waiting += get_type_hints(hint).values()
    return found


def test_artifacts_page_has_every_record_field_and_format_version():
    documented = {}
    for section in re.split(r"^#+ ", page("artifacts.md"), flags=re.MULTILINE):
        if name := re.match(r"`(\w+)`\n", section):
            cells = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
            documented[name[1]] = sorted(re.findall(r"`(\w+)`", " ".join(cells)))
    expected = {
        name: sorted({field.name for field in dataclasses.fields(record)} - {"root"})
        for name, record in records().items()
    }
    assert documented == expected
    versions = dict(re.findall(r"`(\w+)`,?\s+format\s+version (\d+)", page("artifacts.md")))
    for name, version in versions.items():
        assert int(version) == records()[name].FORMAT_VERSION, name
    assert {"Corpus", "TrainingRun", "Mixture", "EvaluationResult"} <= set(versions)


# Links


def anchors_of(markdown: str) -> set[str]:
    """The anchors of a page's headings, as mkdocs and code hosts make them."""
    text = re.sub(r"^(```+).*?^\1", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


def test_links_are_not_broken_and_readme_leads_to_every_page():
    broken, targets = [], {"README.md": set[str]()}
    sources = repository_links.markdown_sources(ROOT)
    for source in sources:
        text = (ROOT / source).read_text(encoding="utf-8")
        targets[source] = set()
        for link in repository_links.links(text):
            name = repository_links.target_of(link, source)
            target, anchor = ROOT / name, (link[2] or "").removeprefix("#")
            targets[source].add(name)
            exists = target.exists() and ROOT in target.parents
            if not exists or (anchor and anchor not in anchors_of(target.read_text("utf-8"))):
                broken.append((source, link[0]))
    assert broken == []
    reached = {"README.md"}
    while new := set().union(*(targets.get(source, set()) for source in reached)) - reached:
        reached |= new
    assert {name for name in sources if name.startswith("docs/")} <= reached


def test_links_become_links_between_pages_of_the_site():
    text = (
        "[a](../examples/a.sh) [b](mixtures.md#x) [c](https://x.y) `[d](e)` [f](../tools/g.py)\n"
        "```\n[h](../examples/a.sh)\n```\n"
    )
    assert repository_links.with_site_links(text, "docs/page.md", "page.md") == (
        "[a](files/examples/a.sh.md) [b](mixtures.md#x) [c](https://x.y) `[d](e)` [f](tools/g.md)\n"
        "```\n[h](../examples/a.sh)\n```\n"
    )
    nested = repository_links.with_site_links("[a](../../LICENSE)", "docs/m/p.md", "m/p.md")
    assert nested == "[a](../files/LICENSE.md)"
    assert "examples/pretrain_684m.sh" in repository_links.linked_files(ROOT)
    shown = repository_links.file_page(ROOT, "examples/pretrain_684m.sh")
    assert (ROOT / "examples/pretrain_684m.sh").read_text() in shown


# Pages of the tools

TOOLS = find_tools(ROOT)
COMMANDS = [(tool, command) for tool, found in TOOLS.items() for command in found.commands]


@functools.cache
def pages() -> dict[str, str]:
    return tool_pages(ROOT)


def help_flags(tool: str, command: str) -> dict[str, str]:
    """Flag -> its text in --help; includes --no-... flags."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "100")  # no boxes next to each other
        with pytest.raises(SystemExit):
            parse_options(TOOLS[tool].commands[command], ["--help"])
    entries = re.split(r"^[│| ] (?=--?[a-z])", printed.getvalue(), flags=re.MULTILINE)[1:]
    flags: dict[str, str] = {}
    for entry in entries:
        if found := re.match(r"(?:-h, )?(--[a-z0-9-]+)(?:, (--[a-z0-9-]+))?", entry):
            flags |= {name: entry for name in found.groups() if name and name != "--help"}
    return flags


@pytest.mark.parametrize(("tool", "command"), COMMANDS)
def test_tool_page_has_every_flag_of_help(tool, command):
    in_help = help_flags(tool, command)
    flags = [f for g in flag_groups(TOOLS[tool].commands[command]) for f in g.flags]
    flags = [flag for flag in flags if flag.name.startswith("--")]
    assert {name for flag in flags for name in flag.name.split(", ")} == set(in_help)
    text = pages()[f"tools/{tool}.md"]
    assert all(re.search(rf"^`[^`]*{flag}\b", text, re.MULTILINE) for flag in in_help)
    required = {flag.name for flag in flags if flag.default is None}
    # tyro takes repeatable flags to be empty; the tool requires them.
    repeatable = {name for name, entry in in_help.items() if "(repeatable)" in entry}
    assert required - repeatable == {n for n, entry in in_help.items() if "(required)" in entry}


def test_every_tool_has_a_page_with_valid_examples():
    assert {f"tools/{path.stem}.md" for path in (ROOT / "tools").glob("*.py")} < set(pages())
    assert set(examples_of_tools()) == set(TOOLS)
    for tool, example in examples_of_tools().items():
        for line in example.get("examples", "").replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            words = shlex.split(line)
            arguments = words[words.index(f"tools/{tool}.py") + 1 :]
            commands = TOOLS[tool].commands
            if "" in commands:
                parse_options(commands[""], arguments)
            elif arguments[0] in commands:
                parse_options(commands[arguments[0]], arguments[1:])
            else:
                chosen, rest = take_values("--method", arguments)
                parse_options(commands[f"--method {chosen[0] if chosen else 'chameleon'}"], rest)
