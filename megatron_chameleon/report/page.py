"""The report of one run folder: tables and pictures, written to its last stage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.artifacts.files import replacing
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import (
    BASELINE_METHOD,
    Comparison,
    compare,
    run_labels,
)
from megatron_chameleon.report.cost_tables import cost_table, mixture_cost_table
from megatron_chameleon.report.curves import run_curves
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.loss_tables import bits_per_byte_table, loss_table
from megatron_chameleon.report.names import markdown
from megatron_chameleon.report.run_folder import REPORT, RunFolder
from megatron_chameleon.report.stability import (
    CAPTION,
    PICTURE,
    StabilityAxis,
    stability_axes,
    stability_table,
)
from megatron_chameleon.report.tables import fine_tuning_tables, mode_of, perplexity_table
from megatron_chameleon.report.text_tables import Table, markdown_table, terminal_table

TABLES_NAME = "tables.md"
MODE_LABELS = {"pretrain": "pretraining", "finetune": "fine-tuning"}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG and what it shows; ``content`` is None where ``missing`` says why it was not drawn."""

    name: str
    caption: str
    content: bytes | None = None
    missing: str = ""


def make_report(run: Path, baseline: str | None = None) -> Path:
    """Write tables and pictures of the run folder ``run`` into its 7-report, and print the tables.

    Everything is read and drawn before the first file is written.

    Args:
        run: the run folder.
        baseline: name of the evaluated base run that the others are compared with; None takes
            the one that was trained with uniform weights.

    Returns:
        The folder 7-report.

    Raises:
        UserError: if an artifact that a table needs is missing or damaged, if evaluations cannot
            be compared, or if matplotlib is not installed.
    """
    figures = load_figures()
    folder = RunFolder.load(run)
    swept = [] if folder.sweep is None else stability_axes(folder.sweep)
    tables = [
        perplexity_table(folder, baseline),
        *_loss_tables(compare(folder, baseline)),
        *fine_tuning_tables(folder),
        *map(stability_table, swept),
        *_cost_tables(folder),
    ]
    pictures = [
        _weights_picture(figures, folder),
        _affinity_picture(figures, folder),
        _loss_picture(figures, folder),
        *([_stability_picture(figures, swept)] if swept else []),
    ]
    report = folder.root / REPORT
    _write(report, markdown_page(folder.root.resolve().name, tables, pictures), pictures)
    print("\n\n\n".join(terminal_table(table) for table in tables), end="\n\n")
    for picture in pictures:
        where = report / picture.name if picture.content else f"not drawn: {picture.missing}"
        print(f"{picture.caption}: {where}")
    print(f"These tables in Markdown: {report / TABLES_NAME}", flush=True)
    return report


def markdown_page(title: str, tables: list[Table], pictures: list[Picture]) -> str:
    """All tables, then the pictures by their file names."""
    shown = [f"![{p.caption}]({p.name})" for p in pictures if p.content is not None]
    parts = [f"# {markdown(title)}", *map(markdown_table, tables), *shown]
    return "\n\n".join(parts) + "\n"


def weight_series(folder: RunFolder) -> dict[str, Mixture]:
    """Label -> mixture for the bar chart: pretraining first, uniform left out."""
    modes = {name: mode_of(name, mixture) for name, mixture in folder.mixtures.items()}
    order = [*MODE_LABELS, None]
    names = sorted(
        (name for name, m in folder.mixtures.items() if m.method != BASELINE_METHOD),
        key=lambda name: order.index(modes[name]) if modes[name] in order else len(order),
    )
    shown = [modes[name] for name in names]
    labels = {
        name: MODE_LABELS.get(mode or "", name) if shown.count(mode) == 1 else name
        for name, mode in zip(names, shown, strict=True)
    }
    return {labels[name]: folder.mixtures[name] for name in names}


def _loss_tables(comparison: Comparison) -> list[Table]:
    by_byte = bits_per_byte_table(comparison)
    return [loss_table(comparison), *([] if by_byte is None else [by_byte])]


def _cost_tables(folder: RunFolder) -> list[Table]:
    ledger = ledger_of(folder)
    tables = [cost_table(ledger)]
    return [*tables, mixture_cost_table(ledger, folder)] if ledger.mixtures else tables


def _weights_picture(figures: ModuleType, folder: RunFolder) -> Picture:
    picture = Picture("weights.png", "Weight of each domain")
    mixtures = weight_series(folder)
    if not mixtures:
        return dataclasses.replace(picture, missing="4-mixture holds no mixture but uniform")
    return dataclasses.replace(picture, content=figures.png(figures.weights_figure(mixtures)))


def _affinity_picture(figures: ModuleType, folder: RunFolder) -> Picture:
    picture = Picture("affinity.png", "Affinity of the domains")
    for label, mixture in weight_series(folder).items():
        if mixture.affinity is not None:
            figure = figures.affinity_figure(_square(label, mixture), list(mixture.weights))
            return dataclasses.replace(picture, content=figures.png(figure))
    return dataclasses.replace(picture, missing="no mixture in 4-mixture has an affinity matrix")


def _square(label: str, mixture: Mixture) -> NDArray[np.float64]:
    """The affinity as an array [k, k]."""
    rows, count = mixture.affinity or [], len(mixture.weights)
    if len(rows) != count or any(len(row) != count for row in rows):
        raise UserError(
            f"the {label} mixture in 4-mixture: field affinity is not {count} x {count}, which its "
            "weights ask for; run tools/compute_mixture.py again"
        )
    return np.array(rows, dtype=np.float64)


def _loss_picture(figures: ModuleType, folder: RunFolder) -> Picture:
    picture = Picture("loss.png", "Training loss")
    labels = run_labels(folder.base_runs, folder.base_runs)
    # Uniform first, as in the tables: a run has one colour throughout.
    names = sorted(
        folder.base_runs, key=lambda n: folder.base_runs[n].mixture_method != BASELINE_METHOD
    )
    runs = [run_curves(labels[name], folder.base_runs[name]) for name in names]
    proxies = [run_curves(f"proxy {name}", run) for name, run in folder.proxies.items()]
    if not any(len(run.total.steps) for run in (*runs, *proxies)):
        return dataclasses.replace(picture, missing="no training run has metrics")
    return dataclasses.replace(picture, content=figures.png(figures.loss_figure(runs, proxies)))


def _stability_picture(figures: ModuleType, swept: list[StabilityAxis]) -> Picture:
    from megatron_chameleon.report.stability_figure import stability_figure

    return Picture(f"{PICTURE}.png", CAPTION, figures.png(stability_figure(swept)))


def _write(report: Path, page: str, pictures: list[Picture]) -> None:
    for picture in pictures:
        if picture.content is None:
            # One of an earlier report would not belong to these tables.
            (report / picture.name).unlink(missing_ok=True)
            continue
        with replacing(report / picture.name) as temporary:
            temporary.write_bytes(picture.content)
    with replacing(report / TABLES_NAME) as temporary:
        temporary.write_text(page, encoding="utf-8")


def load_figures() -> ModuleType:
    """The module that needs matplotlib, which is an extra."""
    try:
        from megatron_chameleon.report import figures
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise UserError(
            "the report's pictures need matplotlib, which is not installed; "
            "pip install 'megatron_chameleon[plots]'"
        ) from error
    return figures
