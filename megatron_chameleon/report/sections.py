"""What a report says of a run folder: its sections, in the order in which a reader wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.report.comparison import Comparison, caveats, compare
from megatron_chameleon.report.cost_tables import cost_table, mixture_cost_table
from megatron_chameleon.report.document import Report, Section
from megatron_chameleon.report.downstream_tables import downstream_tables
from megatron_chameleon.report.drawn_tables import drawn_tables
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.loss_tables import bits_per_byte_table, loss_table
from megatron_chameleon.report.origins import origins_section
from megatron_chameleon.report.paper import paper_tables
from megatron_chameleon.report.pictures import (
    affinity_picture,
    loss_picture,
    stability_picture,
    weights_picture,
    windows_picture,
)
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.stability import stability_axes, stability_table
from megatron_chameleon.report.tables import (
    fine_tuning_tables,
    format_perplexity,
    perplexity_table,
    verdicts,
)
from megatron_chameleon.report.weight_tables import weights_table


def report_of(
    folder: RunFolder, runs: Sequence[Path], title: str, baseline: str | None = None
) -> Report:
    """All there is to say of ``folder``.

    Args:
        folder: of one run, or of several put together.
        runs: the folders that it was read from, for the record.
        title: of the page.
        baseline: name of the evaluated run that the others are compared with; None takes the one
            that was trained with uniform weights.

    Raises:
        UserError: if an artifact that a table needs is missing or damaged, or if evaluations
            cannot be compared.
    """
    comparison = compare(folder, baseline)
    sections = [
        _result(folder, comparison, baseline),
        _losses(comparison),
        _bytes(comparison),
        _weights(folder),
        _downstream(folder, baseline),
        _cost(folder),
        _curves(folder),
        _drawn(folder),
        _affinity(folder),
        _stability(folder),
        _windows(folder),
        _paper(folder, comparison),
        origins_section(folder, comparison, runs),
    ]
    return Report.of(title, _findings(comparison), caveats(folder, comparison), sections)


def _findings(comparison: Comparison) -> list[str]:
    """A sentence for each run, against the baseline or, without one, by itself."""
    return verdicts(comparison) or [
        f"{run.label} has an average perplexity of {format_perplexity(run.result.mean_perplexity)} "
        f"over {len(comparison.domains)} domains."
        for run in comparison.runs
    ]


def _result(folder: RunFolder, comparison: Comparison, baseline: str | None) -> Section:
    beside = f", beside {comparison.baseline.label}" if comparison.baseline else ""
    return Section(
        name="result",
        heading="Held-out perplexity",
        introduction=f"What each model makes of text that it was not trained on{beside}. "
        "Lower is better.",
        tables=(perplexity_table(folder, baseline),),
    )


def _losses(comparison: Comparison) -> Section:
    return Section(
        name="loss",
        heading="Held-out loss",
        introduction="The same as mean losses, with how sure they are for text of this kind.",
        tables=(loss_table(comparison),),
    )


def _bytes(comparison: Comparison) -> Section:
    table = bits_per_byte_table(comparison)
    return Section(
        name="bits-per-byte",
        heading="Bits per byte",
        introduction="The same by byte of text, for comparison with models of other tokenizers.",
        tables=() if table is None else (table,),
    )


def _weights(folder: RunFolder) -> Section:
    table = weights_table(folder)
    tables = fine_tuning_tables(folder)
    # Two mixtures that stand beside each other in full need no third table.
    if table is not None and not (tables and len(folder.mixtures) <= len(tables) + 1):
        tables.insert(0, table)
    return Section(
        name="weights",
        heading="Weights",
        introduction="How much of its training text a model takes from each domain.",
        tables=tuple(tables),
        pictures=(weights_picture(folder),),
    )


def _downstream(folder: RunFolder, baseline: str | None) -> Section:
    return Section(
        name="downstream",
        heading="Downstream tasks",
        introduction="How often each model is right on tasks that it was not trained for.",
        tables=tuple(downstream_tables(folder, baseline)),
    )


def _cost(folder: RunFolder) -> Section:
    ledger = ledger_of(folder)
    tables = [cost_table(ledger)]
    if ledger.mixtures:
        tables.insert(0, mixture_cost_table(ledger, folder))
    return Section(
        name="cost",
        heading="Cost",
        introduction="What it took to obtain each mixture, and what every stage took.",
        tables=tuple(tables),
    )


def _curves(folder: RunFolder) -> Section:
    return Section(
        name="curves",
        heading="Loss curves",
        introduction="The loss during training, of all domains and of each.",
        pictures=(loss_picture(folder),),
    )


def _drawn(folder: RunFolder) -> Section:
    return Section(
        name="drawn",
        heading="Tokens asked and got",
        introduction="What the weights asked of each domain, and what training drew of it.",
        tables=tuple(drawn_tables(folder)),
    )


def _affinity(folder: RunFolder) -> Section:
    return Section(
        name="affinity",
        heading="Affinity",
        introduction="How alike the domains are to the model whose embeddings gave the weights.",
        pictures=(affinity_picture(folder),),
    )


def _stability(folder: RunFolder) -> Section:
    swept = [] if folder.sweep is None else stability_axes(folder.sweep)
    return Section(
        name="stability",
        heading="Stability",
        introduction="How far the weights move with the settings that they were found by.",
        tables=tuple(map(stability_table, swept)),
        pictures=(stability_picture(swept),) if swept else (),
    )


def _windows(folder: RunFolder) -> Section:
    return Section(
        name="windows",
        heading="Map of windows",
        introduction="How the windows of text lie whose embeddings gave the weights.",
        pictures=(windows_picture(folder),),
    )


def _paper(folder: RunFolder, comparison: Comparison) -> Section:
    return Section(
        name="paper",
        heading="The paper's numbers",
        introduction="What the paper prints of these domains, beside what was found here.",
        tables=tuple(paper_tables(folder, comparison)),
    )
