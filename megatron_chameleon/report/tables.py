"""Tables of formatted figures, and their terminal, Markdown and CSV forms."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import pandas as pd

from megatron_chameleon.console import align_columns, display_width

MISSING = "-"
four_decimals = "{:.4f}".format
UNKNOWN = "unknown"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
METHOD_LABELS = {
    "uniform": "Uniform",
    "natural": "Natural",
    "human": "Human",
    "unimax": "UniMax",
    "chameleon": "Chameleon",
    "chameleon-pretrain": "Chameleon (pretraining)",
    "chameleon-finetune": "Chameleon (fine-tuning)",
    "chameleon-target-pretrain": "Chameleon for the target (pretraining)",
    "chameleon-target-finetune": "Chameleon for the target (fine-tuning)",
    "doremi": "DoReMi",
    "doge": "DoGE",
    "regmix": "RegMix",
    "mixing-laws": "Mixing laws",
    "mixmin": "MixMin",
    "mixmin-experts": "MixMin (trained models)",
    "surrogate": "Surrogate",
    "odm": "ODM (online)",
    "ado": "ADO (online)",
    "aioli": "Aioli (online)",
}
NOTE_WIDTH, NAME_WIDTH = 80, 60
SECONDS_PER_HOUR = 3600.0
# Characters whose backslash escapes work in every Markdown dialect that has tables.
_MARKDOWN_SIGNS = re.compile(r"([\\`*_\[\]<>|~&#!$])")
# Spreadsheets evaluate a cell that starts like this, unless it is a number.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?%?|[+-]?inf|nan", re.IGNORECASE)


class Best(str):
    """Text of a cell with the best figure of its row."""

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
        """Build a table from headings and rows of formatted cells.

        If a summary row has too few cells, blank cells follow its name.
        """
        columns = list(header)
        last = [[name, *[""] * (len(columns) - 1 - len(texts)), *texts] for name, *texts in summary]
        cells = pd.DataFrame([*rows, *last], columns=columns, dtype=object)
        return cls(title, cells, len(last), tuple(notes))

    @classmethod
    def by_row(
        cls,
        title: str,
        heading: str,
        texts: pd.DataFrame,
        summary: Iterable[Sequence[str]] = (),
        notes: Iterable[str] = (),
    ) -> Table:
        """Build a table from a frame of formatted cells that is indexed by the row names.

        ``heading`` is the heading of the row names. Missing cells become '-'.
        """
        shown = texts.astype(object).where(texts.notna(), MISSING)
        rows = [[name, *row] for name, row in zip(shown.index, shown.to_numpy(), strict=True)]
        return cls.of(title, [heading, *shown.columns], rows, summary, notes)

    @property
    def header(self) -> tuple[str, ...]:
        """Column headings; the first is the heading of the row names."""
        return tuple(self.cells.columns)

    @property
    def rows(self) -> list[list[str]]:
        """All rows except the summary rows."""
        return self.cells.to_numpy().tolist()[: len(self.cells) - self.num_summary]

    @property
    def summary(self) -> list[list[str]]:
        """The summary rows."""
        return self.cells.to_numpy().tolist()[len(self.cells) - self.num_summary :]

    @property
    def marked(self) -> list[bool]:
        """Whether each column has a ``Best`` cell."""
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
        form: formats a figure; it also formats the errors, whose plus sign is removed.
        best: ``min`` or ``max``; marks the best finite figure if there are at least two figures.
        errors: one per figure, shown after ' ± ' unless it is None or NaN.
    """
    found = list(values)
    known = [value for value in found if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    chosen = best(finite) if best and len(known) > 1 and finite else None
    texts = []
    for value, error in zip(found, list(errors) or [None] * len(found), strict=True):
        text = MISSING if value is None else form(value)
        if value is not None and error is not None and not math.isnan(error):
            text += f" ± {form(error).lstrip('+')}"
        texts.append(Best(text) if value is not None and value == chosen else text)
    return texts


def formatted(
    values: pd.DataFrame,
    form: Callable[[float], str],
    best: Callable[[list[float]], float] | None = None,
    errors: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Format each row of a frame as :func:`cells_of` does; ``errors`` has the shape of ``values``.

    None and NaN become '-'.
    """
    known = values.astype(object).where(values.notna(), None).to_numpy()
    errors = pd.DataFrame(index=values.index, columns=values.columns) if errors is None else errors
    rows = [
        cells_of(row, form, best, row_errors)
        for row, row_errors in zip(known, errors.to_numpy(float), strict=True)
    ]
    return pd.DataFrame(rows, values.index, values.columns, dtype=object)


def counts_better(
    values: pd.DataFrame, reference: str | None, best: Callable[[list[float]], float]
) -> list[str]:
    """Count, for each column, the rows where it is better than the column ``reference``.

    Cells have the form 'n of k'. The cell of ``reference`` is '-'. If
    ``reference`` is None, all cells are '-'.
    """
    if reference is None:
        return [MISSING] * len(values.columns)
    is_better = values.lt if best is min else values.gt
    counts = is_better(values[reference], axis=0).sum()
    return [MISSING if c == reference else f"{n} of {len(values)}" for c, n in counts.items()]


def terminal_table(table: Table) -> str:
    """Format as aligned text; '*' marks the best of a row, and very long names are shortened."""
    marked = table.marked
    body = [
        # A blank in place of the mark keeps the digits of unmarked cells aligned.
        [shortened(name, NAME_WIDTH)]
        + [
            printable(text) + ("*" if is_best(text) else " " if mark else "")
            for text, mark in zip(texts, marked[1:], strict=True)
        ]
        for name, *texts in (*table.rows, *table.summary)
    ]
    headings = []
    for i, title in enumerate(map(printable, table.header)):
        room = max(map(display_width, (*(row[i] for row in body), *title.split())), default=1)
        headings.append(textwrap.wrap(title, max(room, 1), break_long_words=False) or [""])
    height = max(map(len, headings))
    head = list(zip(*([""] * (height - len(lines)) + lines for lines in headings), strict=True))
    aligned = align_columns([*head, *body])
    rule = "-" * display_width(aligned[0])
    lines = [line.rstrip() for line in aligned]
    lines.insert(height, rule)
    if table.num_summary:
        lines.insert(len(lines) - table.num_summary, rule)
    notes = [textwrap.fill(printable(note), max(len(rule), NOTE_WIDTH)) for note in table.notes]
    return "\n".join([printable(table.title), "", *lines, *([""] if notes else []), *notes])


def markdown_table(table: Table, level: int = 2) -> str:
    """Format as GitHub-flavoured Markdown under a heading of ``level``; bold marks the best."""
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
    """Format ``table`` as CSV.

    Cells like '1.20 ± 0.03' and '0.1 to 0.2' take two columns; thousands have no comma, and missing
    values are empty.
    """
    frame = table.cells.map(printable)
    titles, texts = [printable(table.header[0])], [list(frame.iloc[:, 0])]
    for i, title in enumerate(map(printable, table.header[1:]), start=1):
        column = ["" if text == MISSING else text for text in frame.iloc[:, i]]
        columns = {title: column}
        for sign, (first, second) in {" ± ": ("", " ±"), " to ": (" from", " to")}.items():
            pairs = [text.partition(sign) for text in column]
            if any(b and _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b) for a, _, b in pairs):
                # A figure without a range is both its lower and its upper end.
                lasts = [b or (a if sign == " to " else "") for a, _, b in pairs]
                columns = {title + first: [a for a, *_ in pairs], title + second: lasts}
        for heading, cells in columns.items():
            texts.append([t.replace(",", "") if _NUMBER.fullmatch(t) else t for t in cells])
            titles.append(heading)
    return csv_text(pd.DataFrame(dict(enumerate(texts)), dtype=object).set_axis(titles, axis=1))


def csv_text(frame: pd.DataFrame) -> str:
    """Format as CSV; text that a spreadsheet would run as a formula is prefixed with "'"."""

    def harmless(cell: object) -> object:
        is_text = isinstance(cell, str) and not _NUMBER.fullmatch(cell)
        return f"'{cell}" if is_text and _FORMULA.match(str(cell)) else cell

    named = frame.map(harmless).set_axis(list(map(harmless, frame.columns)), axis=1)
    return named.to_csv(index=False, lineterminator="\n")


def format_perplexity(perplexity: float) -> str:
    """Format a perplexity with two decimals, or like 1.234e+04 from 10,000 on."""
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.3e}"


def format_flops(flops: float) -> str:
    """Format floating-point operations like 1.23e+13, and 0 as '-'."""
    return f"{flops:.2e}" if flops else MISSING


def format_hours(seconds: float) -> str:
    """Format device-seconds as hours, with three significant digits below 100, and 0 as '-'."""
    hours = seconds / SECONDS_PER_HOUR
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}" if hours else MISSING


def format_epochs(epochs: float) -> str:
    """Epochs, to three digits."""
    return f"{epochs:,.0f}" if epochs >= 1000 else f"{epochs:.3g}"


def printable(text: str) -> str:
    """Collapse white space, and replace control and bidirectional formatting characters.

    Such characters affect a terminal or page.
    """
    return "".join(sign if sign.isprintable() else REPLACEMENT for sign in " ".join(text.split()))


def shortened(name: str, limit: int) -> str:
    """Shorten ``name`` to ``limit`` characters; both ends, where names differ most, are kept."""
    name, tail = printable(name), (limit - 1) // 3
    return name if len(name) <= limit else f"{name[: limit - 1 - tail]}…{name[-tail:]}"


def unique_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Make ``labels`` (name -> label) unique: names that share a label are labelled by name."""
    found = dict(labels)
    while True:
        count = Counter(found.values())
        shared = {name for name, label in found.items() if count[label] > 1 and label != name}
        if not shared:
            return found
        found |= {name: name for name in shared}


def markdown(text: str) -> str:
    """Escape ``text`` for Markdown, also within table cells."""
    return _MARKDOWN_SIGNS.sub(r"\\\1", printable(text))


def listed(parts: Sequence[str]) -> str:
    """Join ``parts`` as 'a', 'a and b', or 'a, b and c'."""
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last
