"""Generate a page for each tool: its options, examples and exit statuses."""

from __future__ import annotations

import functools
import html
import re
import tomllib
from pathlib import Path
from typing import Any

from docs.hooks.tool_options import Flag, FlagGroup, Tool, find_tools, flag_groups
from megatron_chameleon.cli import INTERRUPTED_STATUS, USER_ERROR_STATUS

EXAMPLES = Path(__file__).with_name("tool_examples.toml")
STATUSES = {
    "0": "done; also after `--help`",
    str(
        USER_ERROR_STATUS
    ): "a user error: one line `error: ...` with the problem, its location and the fix; no "
    "partial output is left",
    str(INTERRUPTED_STATUS): "interrupted by Ctrl-C or SIGTERM",
    "1": "a bug, reported with a traceback; under torchrun, the failure of any rank",
}
# Matches flags, file names and documentation pages, which become code or links.
_NAMED = re.compile(
    r"(?<![\w`-])--[a-z0-9][a-z0-9-]*[a-z0-9]|(?<![\w/`])(?:tools|examples|docs)/[\w./]+\w"
)


@functools.cache
def tool_pages() -> dict[str, str]:
    """Return the Markdown of each page: tools/NAME.md for every command, and tools/index.md."""
    tools = find_tools()
    notes = examples_of_tools()
    pages = {f"tools/{name}.md": _page(tool, notes.get(name, {})) for name, tool in tools.items()}
    return {"tools/index.md": _index(tools), **pages}


def examples_of_tools() -> dict[str, Any]:
    """Read each tool's examples, related pages and exit statuses from tool_examples.toml."""
    return tomllib.loads(EXAMPLES.read_text(encoding="utf-8"))


def _index(tools: dict[str, Tool]) -> str:
    rows = [
        f"| [`{name}`]({name}.md) | {_escaped(_summary(tool)[0])} |" for name, tool in tools.items()
    ]
    return "\n".join(
        [
            "# Commands",
            "",
            "Each stage is a command. Its page, like `--help`, is generated from its options when",
            "the site is built. If a flag is repeated, the last value is used.",
            "`megatron-chameleon COMMAND` and `python -m megatron_chameleon COMMAND` start one",
            "rank, and `torchrun --nproc-per-node N -m megatron_chameleon COMMAND` starts N ranks.",
            "From a checkout, `python tools/COMMAND.py` and `torchrun tools/COMMAND.py` do the",
            "same.",
            "",
            "| Command | |",
            "|---|---|",
            *rows,
            "",
            "## Exit status",
            "",
            *_statuses({}),
            "",
            "torchrun turns every nonzero status of a rank into 1, and prints its own summary",
            "below the error message.",
            "",
        ]
    )


def _page(tool: Tool, notes: dict[str, Any]) -> str:
    summary, details = _summary(tool)
    parts = [f"# {tool.name}", "", *_paragraphs(summary), details, ""]
    if "about" in notes:
        parts += [notes["about"].strip(), ""]
    if "examples" in notes:
        parts += ["## Examples", "", "```bash", notes["examples"].strip(), "```", ""]
    for command, options_type in tool.commands.items():
        title = f"{tool.name} {command}" if command else "Options"
        parts += [f"## {title}", "", *_options(options_type, f"{tool.name} {command}")]
    parts += ["## Exit status", "", *_statuses(notes.get("statuses", {})), ""]
    if "see" in notes:
        links = ", ".join(f"[{title}](../{page})" for page, title in notes["see"].items())
        parts += [f"See also: {links}.", ""]
    return "\n".join(parts)


def _summary(tool: Tool) -> tuple[str, str]:
    """Return the first line of the command's docstring, and the other lines."""
    first, _, others = tool.summary.partition("\n")
    return first, others.strip("\n")


def _options(options_type: type[Any], where: str) -> list[str]:
    """Format the flags of one command: its own flags first, then those of each group."""
    own, *groups = flag_groups(options_type)
    parts = [*_paragraphs(own.text), *_definitions(own, where)]
    for group in groups:
        title = f"### {group.name.capitalize()} options"
        parts += [title, "", *_paragraphs(group.text), *_definitions(group, where)]
    return parts


def _paragraphs(text: str) -> list[str]:
    """Convert a docstring to Markdown: a line per paragraph, each followed by an empty line."""
    flowing = (" ".join(each.split()) for each in text.split("\n\n"))
    return [line for each in flowing for line in (_escaped(each), "")]


def _definitions(group: FlagGroup, where: str) -> list[str]:
    return [line for flag in group.flags for line in _definition(flag, where)]


def _definition(flag: Flag, where: str) -> list[str]:
    """Format a term and its definition, with an anchor made from the command and the flag."""
    anchor = re.sub(r"[^a-z0-9]+", "-", f"{where} {flag.name.split(',')[0]}".lower()).strip("-")
    written = f"{flag.name} {flag.values}".strip()
    default = "required" if flag.default is None else flag.default and f"default `{flag.default}`"
    paragraphs = [_escaped(each) for each in flag.help.split("\n\n")]
    return [
        f"`{written}`{{ #{anchor} }}" + (f" &nbsp; {default}" if default else ""),
        f":   {paragraphs[0]}",
        *(line for each in paragraphs[1:] for line in ("", f"    {each}")),
        "",
    ]


def _statuses(own: dict[str, str]) -> list[str]:
    rows = [
        f"| {status} | {meaning} |"
        for status, meaning in sorted({**STATUSES, **own}.items(), key=_number)
    ]
    return ["| Status | When |", "|---|---|", *rows]


def _number(row: tuple[str, str]) -> int:
    return int(row[0])


def _escaped(text: str) -> str:
    """Convert plain text to Markdown: escaped, with flags and files as code, and pages as links."""
    parts, end = [], 0
    for found in _NAMED.finditer(text):
        page = found[0].removeprefix("docs/")
        code = f"`{found[0]}`"
        parts += [_plain(text[end : found.start()])]
        parts += [code if page == found[0] else f"[{code}](../{page})"]
        end = found.end()
    return "".join([*parts, _plain(text[end:])])


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_\[\]{}$|#])", r"\\\1", html.escape(text, quote=False))
