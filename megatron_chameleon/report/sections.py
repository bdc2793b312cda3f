"""What a report says of a run folder: its sections, in the order in which a reader wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import Comparison, caveats, compare
from megatron_chameleon.report.cost_tables import cost_table, mixture_cost_table
from megatron_chameleon.report.document import Report, Section
from megatron_chameleon.report.downstream_comparison import base_run_of
from megatron_chameleon.report.downstream_tables import downstream_tables
from megatron_chameleon.report.drawn_tables import drawn_tables
from megatron_chameleon.report.ledger import ledger_of
from megatron_chameleon.report.loss_tables import bits_per_byte_table, loss_table
from megatron_chameleon.report.origins import origins_section
from megatron_chameleon.report.own_corpus import require_own_corpus
from megatron_chameleon.report.paper import paper_tables
from megatron_chameleon.report.pictures import (
    affinity_picture,
    loss_picture,
    stability_picture,
    weights_picture,
    windows_picture,
)
from megatron_chameleon.report.run_folder import EVALUATION, RunFolder
from megatron_chameleon.report.seed_table import seed_table
from megatron_chameleon.report.stability import stability_axes, stability_table
from megatron_chameleon.report.tables import (
    perplexity_table,
    standings,
    verdicts,
)
from megatron_chameleon.report.weight_tables import weight_tables

NOT_EVALUATED = (
    f"No perplexity evaluation is in {EVALUATION}: what rests on it is left out. To have it, run "
    "tools/evaluate.py perplexity for each base run, then make the report again."
)


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
        UserError: if an artifact that a table needs is missing or damaged, if evaluations cannot
            be compared, or if ``baseline`` has no result.
    """
    comparison = compare(folder, baseline) if folder.evaluations else None
    if comparison is None:
        require_own_corpus(folder)
        _require_baseline_asked(folder, baseline)
        findings, doubts, evaluated = [], [NOT_EVALUATED], []
    else:
        findings, doubts = _findings(comparison), caveats(folder, comparison)
        evaluated = [
            _result(folder, comparison),
            _losses(comparison),
            _bytes(comparison),
        ]
    sections = [
        *evaluated,
        _weights(folder),
        _downstream(folder, baseline),
        _cost(folder),
        _curves(folder),
        _drawn(folder),
        _affinity(folder),
        _stability(folder),
        _windows(folder),
        _paper(folder, comparison, baseline),
        origins_section(folder, comparison, runs),
    ]
    return Report.of(title, findings, doubts, sections)


def _require_baseline_asked(folder: RunFolder, baseline: str | None) -> None:
    """Refuse a baseline that has no result of downstream tasks, in a folder without others.

    Raises:
        UserError: naming the runs that have one.
    """
    asked = [base_run_of(folder, name) for name in folder.downstream]
    if baseline is None or baseline in asked:
        return
    choices = f"choose from {', '.join(asked)}" if asked else "nothing there can be compared"
    raise UserError(
        f"--baseline {baseline}: {folder.root / EVALUATION} has no result of it; {choices}, or "
        "run tools/evaluate.py perplexity for each base run first"
    )


def _findings(comparison: Comparison) -> list[str]:
    """A sentence for each method, against the baseline or, without one, by itself."""
    return verdicts(comparison) or standings(comparison)


def _result(folder: RunFolder, comparison: Comparison) -> Section:
    beside = f", beside {comparison.baseline.label}" if comparison.baseline else ""
    over_seeds = seed_table(comparison)
    return Section(
        name="result",
        heading="Held-out perplexity",
        introduction=f"What each model makes of text that it was not trained on{beside}. "
        "Lower is better.",
        tables=(
            *([over_seeds] if over_seeds else []),
            perplexity_table(folder, comparison),
        ),
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
    return Section(
        name="weights",
        heading="Weights",
        introduction="How much of its training text a model takes from each domain.",
        tables=tuple(weight_tables(folder)),
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


def _paper(folder: RunFolder, comparison: Comparison | None, baseline: str | None) -> Section:
    return Section(
        name="paper",
        heading="The paper's numbers",
        introduction="What the paper prints of these domains, beside what was found here.",
        tables=tuple(paper_tables(folder, comparison, baseline)),
    )
