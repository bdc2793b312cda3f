"""Tables of formatted figures, and their terminal, Markdown and CSV forms."""

from __future__ import annotations

import dataclasses
import io
import math
import re
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

MISSING = "-"
UNKNOWN = "unknown"
ELLIPSIS = "…"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
NOTE_WIDTH, NAME_WIDTH = 80, 60
SECONDS_PER_HOUR = 3600.0
# Backslash escapes of these work in every Markdown dialect that has tables.
_MARKDOWN_SIGNS = re.compile(r"([\\`*_\[\]<>|~&#!$])")
# Spreadsheets evaluate a cell that starts like this, unless it is a number.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?%?|[+-]?inf|nan", re.IGNORECASE)
# Separator of the two figures of a cell -> suffixes of their CSV headings.
_PAIRS = {" ± ": ("", " ±"), " to ": (" from", " to")}


class Best(str):
    """Text of a cell that is the best of its row."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A titled table.

    Attributes:
        title: also names the table's CSV file.
        cells: texts, dtype object; the first column names the rows. ``Best`` cells are marked.
        num_summary: how many of the last rows summarize the others (averages, counts, sums).
        notes: sentences below the table.
    """

    title: str
    cells: pd.DataFrame
    num_summary: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        title: str,
        header: Iterable[str],
        rows: Iterable[Sequence[str]],
        summary: Iterable[Sequence[str]] = (),
        notes: Iterable[str] = (),
    ) -> Table:
        """A table from rows of texts as long as ``header``."""
        last = list(summary)
        cells = pd.DataFrame([*rows, *last], columns=list(header), dtype=object)
        return cls(title, cells, len(last), tuple(notes))

    @property
    def header(self) -> tuple[str, ...]:
        """Column headings, that of the row names first."""
        return tuple(self.cells.columns)

    @property
    def rows(self) -> list[list[str]]:
        """The rows without the summary."""
        return self.cells.iloc[: len(self.cells) - self.num_summary].to_numpy().tolist()

    @property
    def summary(self) -> list[list[str]]:
        """The summary rows."""
        return self.cells.iloc[len(self.cells) - self.num_summary :].to_numpy().tolist()

    @property
    def marked(self) -> list[bool]:
        """Which columns have a ``Best`` cell."""
        return self.cells.map(is_best).to_numpy(bool).any(axis=0).tolist()


def is_best(text: object) -> bool:
    """Whether a cell is marked as the best of its row."""
    return isinstance(text, Best)


def cells_of(
    values: Iterable[float | None],
    form: Callable[[float], str],
    best: Callable[[list[float]], float] | None = None,
    errors: Iterable[float | None] = (),
) -> list[str]:
    """Format one row.

    Args:
        values: the figures; None becomes '-'.
        form: formats a figure; errors are formatted alike, without a plus sign.
        best: ``min`` or ``max``, marks the best finite figure where there are at least two figures.
        errors: one per figure, shown after ' ± ' where it is known.
    """
    found, deviations = list(values), list(errors)
    known = [value for value in found if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    chosen = best(finite) if best and len(known) > 1 and finite else None
    texts = []
    for i, value in enumerate(found):
        error = deviations[i] if deviations else None
        text = MISSING if value is None else form(value)
        text += "" if value is None or error is None else f" ± {form(error).lstrip('+')}"
        texts.append(Best(text) if value is not None and value == chosen else text)
    return texts


def terminal_table(table: Table) -> str:
    """Aligned columns under a title; '*' after the best of a row. Very long names are shortened."""
    marked = table.marked
    body = [
        [
            shortened(text, NAME_WIDTH)
            if i == 0
            else one_line(text)
            # The blank keeps the digits of cells without a mark aligned.
            + ("*" if is_best(text) else " " if marked[i] else "")
            for i, text in enumerate(row)
        ]
        for row in (*table.rows, *table.summary)
    ]
    columns = list(zip(*body, strict=True)) if body else [()] * len(table.header)
    headings = []
    for title, column in zip(map(one_line, table.header), columns, strict=True):
        room = max(map(display_width, (*column, *title.split())), default=1)
        headings.append(textwrap.wrap(title, max(room, 1), break_long_words=False) or [""])
    height = max(map(len, headings))
    head = list(zip(*([""] * (height - len(lines)) + lines for lines in headings), strict=True))
    widths = [max(map(display_width, c)) for c in zip(*head, *body, strict=True)]
    lines = []
    for row in (*head, *body):
        blanks = [" " * (width - display_width(t)) for t, width in zip(row, widths, strict=True)]
        others = [blank + text for text, blank in zip(row[1:], blanks[1:], strict=True)]
        lines.append("  ".join([row[0] + blanks[0], *others]).rstrip())
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    lines.insert(height, rule)
    if table.num_summary:
        lines.insert(len(lines) - table.num_summary, rule)
    notes = [textwrap.fill(one_line(note), max(len(rule), NOTE_WIDTH)) for note in table.notes]
    return "\n".join([one_line(table.title), "", *lines, *([""] if notes else []), *notes])


def markdown_table(table: Table, level: int = 2) -> str:
    """A heading of ``level`` and a GitHub-flavoured Markdown table; the best of a row is bold."""
    lines = [
        [markdown(title) for title in table.header],
        ["---", *["---:"] * (len(table.header) - 1)],
        *(
            [f"**{markdown(text)}**" if is_best(text) else markdown(text) for text in row]
            for row in (*table.rows, *table.summary)
        ),
    ]
    body = [f"| {' | '.join(texts)} |" for texts in lines]
    notes = [line for note in table.notes for line in ("", markdown(note))]
    return "\n".join([f"{'#' * level} {markdown(table.title)}", "", *body, *notes])


def csv_table(table: Table) -> str:
    """All rows of ``table``.

    Cells like '1.20 ± 0.03' and '0.1 to 0.2' take two columns; thousands have no comma, and missing
    values are empty.
    """
    columns: list[tuple[str, list[str]]] = []
    for i, (title, texts) in enumerate(zip(table.header, table.cells.to_numpy().T, strict=True)):
        title, texts = one_line(title), [one_line(text) for text in texts]
        columns += [(title, texts)] if i == 0 else _figure_columns(title, texts)
    frame = pd.DataFrame(list(zip(*(texts for _, texts in columns), strict=True)), dtype=object)
    return csv_text(frame.set_axis([title for title, _ in columns], axis=1))


def csv_text(frame: pd.DataFrame) -> str:
    """``frame`` as CSV; a "'" is put before text that a spreadsheet would run as a formula."""
    stream = io.StringIO()
    harmless = frame.map(_harmless).set_axis(list(map(_harmless, frame.columns)), axis=1)
    harmless.to_csv(stream, index=False, lineterminator="\n")
    return stream.getvalue()


def _figure_columns(title: str, texts: list[str]) -> list[tuple[str, list[str]]]:
    """One column, or two where the cells hold two figures."""
    for sign, endings in _PAIRS.items():
        split = [text.split(sign) for text in texts]
        pairs = [parts for parts in split if len(parts) == 2]
        if pairs and all(_NUMBER.fullmatch(part) for parts in pairs for part in parts):
            if sign == " to ":  # a single figure is both ends of its range
                split = [parts * (3 - len(parts)) for parts in split]
            return [
                (title + ending, [_plain(parts[i]) if i < len(parts) else "" for parts in split])
                for i, ending in enumerate(endings)
            ]
    return [(title, list(map(_plain, texts)))]


def _plain(text: str) -> str:
    if text == MISSING:
        return ""
    return text.replace(",", "") if _NUMBER.fullmatch(text) else text


def _harmless(cell: object) -> object:
    if isinstance(cell, str) and _FORMULA.match(cell) and not _NUMBER.fullmatch(cell):
        return f"'{cell}"
    return cell


def format_weight(weight: float) -> str:
    """A weight, to four places."""
    return f"{weight:.4f}"


def format_score(score: float) -> str:
    """A leverage score (below 1): four places, or four digits below 0.01."""
    return f"{score:.4f}" if score >= 0.01 or score == 0 else f"{score:.3e}"


def format_perplexity(perplexity: float) -> str:
    """A perplexity, to two places below 10,000."""
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.3e}"


def format_flops(flops: float) -> str:
    """Floating-point operations like 1.23e+13, '-' for 0."""
    return f"{flops:.2e}" if flops else MISSING


def format_seconds(seconds: float) -> str:
    """Seconds to a tenth, '-' for 0."""
    return f"{seconds:.1f}" if seconds else MISSING


def format_hours(seconds: float) -> str:
    """Device-seconds as hours, to three digits, '-' for 0."""
    hours = seconds / SECONDS_PER_HOUR
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours else MISSING


def format_ratio(cost: float, reference: float) -> str:
    """A ratio like '11.6x', '-' where either is 0."""
    if not cost or not reference:
        return MISSING
    ratio = cost / reference
    return f"{ratio:.2g}x" if ratio < 0.995 else f"{ratio:.1f}x"


def one_line(name: str) -> str:
    """``name`` with white space collapsed and unprintable characters replaced."""
    return printable(" ".join(name.split()))


def printable(text: str) -> str:
    """Replace control and bidirectional formatting characters, which steer a terminal or page."""
    return "".join(sign if sign.isprintable() else REPLACEMENT for sign in text)


def slug(title: str) -> str:
    """``title`` for file names and anchors: lower case, digits and hyphens, 60 at most."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z0-9]+", "-", plain).strip("-")[:60].rstrip("-")


def shortened(name: str, limit: int) -> str:
    """At most ``limit`` characters of ``name``: its ends, where names differ most."""
    name = one_line(name)
    if len(name) <= limit:
        return name
    tail = (limit - 1) // 3
    return name[: limit - 1 - tail] + ELLIPSIS + name[len(name) - tail :]


def unique_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """``labels`` by name; where two names share a label, both are labelled by their names."""
    found = dict(labels)
    while True:
        count = Counter(found.values())
        shared = {name for name, label in found.items() if count[label] > 1 and label != name}
        if not shared:
            return found
        found |= {name: name for name in shared}


def markdown(text: str) -> str:
    """``text`` escaped for Markdown, table cells included."""
    return _MARKDOWN_SIGNS.sub(r"\\\1", one_line(text))


def display_width(text: str) -> int:
    """Terminal columns of ``text``: two for a wide character, none for a combining one."""
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        for sign in text
    )


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last
