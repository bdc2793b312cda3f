"""A report as content: titled sections of tables and pictures, which renderers turn into files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from megatron_chameleon.report.names import slug
from megatron_chameleon.report.text_tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """A figure and what it shows; ``figure`` is None where ``missing`` says why.

    Attributes:
        name: of its files, without suffix.
        title: a few words.
        caption: how the figure is to be read, in sentences.
        description: what it shows with the main figures, for those who do not see it.
    """

    name: str
    title: str
    caption: str = ""
    description: str = ""
    figure: Figure | None = None
    missing: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Section:
    """A heading, a sentence of introduction, and what is shown.

    ``name`` is the section's address in the page; ``facts`` are pairs of what and which.
    """

    name: str
    heading: str
    introduction: str
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def drawn(self) -> tuple[Picture, ...]:
        """The pictures that there are."""
        return tuple(picture for picture in self.pictures if picture.figure is not None)

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing to show."""
        return not (self.tables or self.drawn or self.facts)


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """All that a report says, in the order in which it is read.

    Attributes:
        title: of the page.
        findings: what came out, a sentence each.
        caveats: what makes that less certain than it looks, a sentence each.
        sections: those with something to show.
        absent: the pictures that could not be drawn.
    """

    title: str
    findings: tuple[str, ...]
    caveats: tuple[str, ...]
    sections: tuple[Section, ...]
    absent: tuple[Picture, ...]

    @classmethod
    def of(
        cls, title: str, findings: Iterable[str], caveats: Iterable[str], sections: list[Section]
    ) -> Report:
        """Sections without content are left out, and what they lack is kept."""
        return cls(
            title=title,
            findings=tuple(findings),
            caveats=tuple(caveats),
            sections=tuple(section for section in sections if not section.is_empty),
            absent=tuple(p for section in sections for p in section.pictures if p.figure is None),
        )

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Of all sections, those that there are."""
        return tuple(picture for section in self.sections for picture in section.drawn)

    @property
    def tables(self) -> tuple[Table, ...]:
        """Of all sections."""
        return tuple(table for section in self.sections for table in section.tables)

    def named_tables(self) -> Iterator[tuple[str, Table]]:
        """Every table with a name of its own, made of its title, for files and addresses."""
        return zip(distinct_names(table.title for table in self.tables), self.tables, strict=True)


def distinct_names(titles: Iterable[str]) -> list[str]:
    """A slug for each of ``titles``; a second one of the same name is ``name-2``."""
    names: list[str] = []
    for title in titles:
        name = stem = slug(title) or "table"
        number = 1
        while name in names:
            number += 1
            name = f"{stem}-{number}"
        names.append(name)
    return names
