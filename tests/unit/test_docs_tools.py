"""The page of each tool says what the tool takes: all of --help, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from docs.hooks.tool_options import find_tools, flag_groups
from docs.hooks.tool_pages import examples_of_tools, tool_pages
from megatron_chameleon.cli import parse_options, take_values

ROOT = Path(__file__).resolve().parents[2]
TOOLS = find_tools(ROOT)
PAGES = tool_pages(ROOT)
COMMANDS = [(tool, command) for tool, found in TOOLS.items() for command in found.commands]
EXAMPLES = [
    (tool, line)
    for tool, told in examples_of_tools().items()
    for line in told.get("examples", "").replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


@functools.cache
def helped(tool: str, command: str) -> dict[str, str]:
    """Flag -> what --help says of it; both flags of what can be switched off."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "100")  # no boxes beside each other
        with pytest.raises(SystemExit):
            parse_options(TOOLS[tool].commands[command], ["--help"])
    entries = re.split(r"^[│| ] (?=--?[a-z])", printed.getvalue(), flags=re.MULTILINE)[1:]
    flags = {
        re.match(r"(?:-h, )?(--[a-z0-9-]+)(?:, (--[a-z0-9-]+))?", each): each for each in entries
    }
    told = {name: text for found, text in flags.items() if found for name in found.groups() if name}
    return {name: text for name, text in told.items() if name != "--help"}


def flags_told(options_type) -> set[str]:
    flags = [flag for group in flag_groups(options_type) for flag in group.flags]
    return {name for flag in flags for name in flag.name.split(", ") if name.startswith("--")}


def test_every_tool_has_its_page():
    assert {f"tools/{path.stem}.md" for path in (ROOT / "tools").glob("*.py")} < set(PAGES)
    assert all(f"]({tool}.md)" in PAGES["tools/index.md"] for tool in TOOLS)
    assert set(examples_of_tools()) == set(TOOLS)


@pytest.mark.parametrize(("tool", "command"), COMMANDS)
def test_the_page_has_every_flag_of_help_and_no_other(tool, command):
    flags = set(helped(tool, command))
    assert flags
    assert flags_told(TOOLS[tool].commands[command]) == flags
    page = PAGES[f"tools/{tool}.md"]
    assert all(re.search(rf"^`[^`]*{flag}\b", page, re.MULTILINE) for flag in flags)


@pytest.mark.parametrize(("tool", "command"), COMMANDS)
def test_the_page_knows_which_flags_have_to_be_given(tool, command):
    """What may be given several times, tyro takes to be empty, and the tool asks for."""
    groups = flag_groups(TOOLS[tool].commands[command])
    flags = [flag for group in groups for flag in group.flags if flag.name.startswith("--")]
    required = {flag.name for flag in flags if flag.default is None}
    told = helped(tool, command)
    asked = {name for name, text in told.items() if "(required)" in text}
    assert required - {name for name, text in told.items() if "(repeatable)" in text} == asked


@pytest.mark.parametrize(("tool", "line"), EXAMPLES)
def test_every_example_is_a_command_of_its_tool(tool, line):
    words = shlex.split(line)
    place = words.index(f"tools/{tool}.py")
    assert words[0] in ("python", "torchrun")
    arguments = words[place + 1 :]
    commands = TOOLS[tool].commands
    if "" in commands:
        parse_options(commands[""], arguments)
    elif arguments[0] in commands:
        parse_options(commands[arguments[0]], arguments[1:])
    else:
        chosen, rest = take_values("--method", arguments)
        parse_options(commands[f"--method {chosen[0] if chosen else 'chameleon'}"], rest)


def test_flags_are_told_with_their_values_and_defaults():
    page = PAGES["tools/pretrain_gpt.md"]
    assert re.search(r"^`--train-iters INT`.*default `2000`\n:   Optimizer steps", page, re.M)
    assert re.search(r"^`--run-dir PATH`.*required\n:   Folder of this run", page, re.M)
    assert re.search(r"^`--bf16, --no-bf16`.*default `off`\n", page, re.M)
    assert re.search(r"^`--permutation megatron\|epoch\|feistel`.*default `megatron`", page, re.M)
    assert re.search(r"^`RUN.*required\n", PAGES["tools/make_report.md"], re.M)


def test_a_tool_with_several_commands_tells_of_each():
    page = PAGES["tools/evaluate.md"]
    assert page.index("## evaluate.py perplexity\n") < page.index("## evaluate.py downstream\n")
    methods = re.findall(
        r"^## compute_mixture.py --method ([\w-]+)$", PAGES["tools/compute_mixture.md"], re.M
    )
    assert methods[0] == "chameleon"
    assert {"doremi", "doge", "regmix", "mixing-laws", "uniform"} < set(methods)


def test_anchors_of_flags_are_no_two_alike():
    for page in PAGES.values():
        anchors = re.findall(r"\{ #([\w-]+) \}", page)
        assert len(anchors) == len(set(anchors))
        assert len(anchors) == len(re.findall(r"^:   ", page, re.MULTILINE))
