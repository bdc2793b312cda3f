"""A report as one Markdown page."""

from __future__ import annotations

from megatron_chameleon.report.document import Picture, Report, Section
from megatron_chameleon.report.names import markdown
from megatron_chameleon.report.text_tables import markdown_table


def markdown_page(report: Report) -> str:
    """The sections with their tables, and their pictures by the names of their PNG files."""
    found = [f"- {markdown(sentence)}" for sentence in (*report.findings, *report.caveats)]
    parts = [f"# {markdown(report.title)}", *(["\n".join(found)] if found else [])]
    parts += [part for section in report.sections for part in _section(section)]
    return "\n\n".join(parts) + "\n"


def markdown_picture(picture: Picture) -> str:
    """The PNG beside the page."""
    return f"![{markdown(picture.title)}]({picture.name}.png)"


def _section(section: Section) -> list[str]:
    facts = [f"- {markdown(what)}: {markdown(which)}" for what, which in section.facts]
    return [
        f"## {markdown(section.heading)}",
        markdown(section.introduction),
        *map(markdown_picture, section.drawn),
        *(markdown_table(table, level=3) for table in section.tables),
        *(["\n".join(facts)] if facts else []),
    ]
