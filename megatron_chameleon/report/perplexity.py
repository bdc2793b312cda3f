"""Tables of held-out perplexity, loss and bits per byte."""

from __future__ import annotations

import math

from megatron_chameleon.artifacts import DomainLoss, loss_difference
from megatron_chameleon.report.comparison import (
    Comparison,
    caveats,
    mixture_of,
    same_weights,
    seed_groups,
    verdicts,
)
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.tables import MISSING, Table, cells_of, format_perplexity
from megatron_chameleon.report.weights import WeightColumns

# Loss differences beyond this many standard errors are unlikely to be due to the sampled documents.
SURE = 2.0


def perplexity_table(folder: RunFolder, comparison: Comparison) -> Table:
    """Per domain: training weight, its interval, and the held-out perplexity of every run.

    The average gives each domain the same weight, as in the paper's tables.
    """
    runs, baseline, domains = comparison.runs, comparison.baseline, comparison.domains
    weighted = _weight_columns(folder, comparison)
    header = [name for column in weighted for name in column.header()]
    blank = [""] * len(header)
    unigram = {name: loss.unigram_perplexity for name, loss in runs[0].result.domains.items()}
    rows = [
        [
            name,
            *(cell for column in weighted for cell in column.cells(name)),
            format_perplexity(unigram[name]),
            *cells_of(comparison.perplexity.loc[name], format_perplexity, min),
        ]
        for name in domains
    ]
    rows += [
        [
            name,
            *(cell for column in weighted for cell in column.cells(name)),
            *[MISSING] * (1 + len(runs)),
        ]
        for name in comparison.left_out
    ]
    mean_unigram = math.fsum(unigram.values()) / len(unigram)
    averages = [run.result.mean_perplexity for run in runs]
    summary = [
        [
            "average",
            *blank,
            format_perplexity(mean_unigram),
            *cells_of(averages, format_perplexity, min),
        ]
    ]
    if baseline is not None and comparison.others:
        counts = [f"{comparison.domains_better(r)} of {len(domains)}" for r in comparison.others]
        label = f"domains better than {baseline.label}"
        summary.append([label, *blank, "", MISSING, *counts])
    marked = "; the lowest of each row is marked" if len(runs) > 1 else ""
    notes = [f"On {runs[0].result.protocol.describe()}. Lower is better{marked}."]
    if comparison.left_out:
        empty = ", ".join(comparison.left_out)
        notes.append(f"Nothing to predict, and not in the average: {empty}.")
    notes += [*caveats(folder, comparison), *verdicts(comparison)]
    columns = ["domain", *header, "unigram perplexity", *(f"perplexity {r.label}" for r in runs)]
    return Table.of("Held-out perplexity", columns, rows, summary, notes)


def seed_table(comparison: Comparison) -> Table | None:
    """Per domain the mean over seeds of every method, ± their standard deviation.

    None where no method has several seeds.
    """
    groups = seed_groups(comparison)
    if all(len(group.runs) == 1 for group in groups):
        return None

    def row(name: str, domain: str | None) -> list[str]:
        found = [g.perplexity if domain is None else g.perplexity_of(domain) for g in groups]
        means, errors = [spread.mean for spread in found], [spread.deviation for spread in found]
        return [name, *cells_of(means, format_perplexity, min, errors)]

    rows = [row(name, name) for name in comparison.domains]
    rows += [[name, *[MISSING] * len(groups)] for name in comparison.left_out]
    summary = [row("average", None)]
    if comparison.baseline is not None and len(groups) > 1:
        reference, count = groups[0], len(comparison.domains)
        better = [f"{group.domains_better(reference)} of {count}" for group in groups[1:]]
        summary.append([f"domains better than {reference.label}", MISSING, *better])
    seeds = ", ".join(f"{group.label} {len(group.runs)}" for group in groups)
    return Table.of(
        "Held-out perplexity over seeds",
        ["domain", *(f"perplexity {group.label}" for group in groups)],
        rows,
        summary,
        [f"Means over seeds ± the standard deviation across seeds; seeds: {seeds}."],
    )


def loss_table(comparison: Comparison) -> Table:
    """Per domain: predicted tokens, the loss of every run, and the others' minus the baseline's."""
    runs, baseline = comparison.runs, comparison.baseline
    others = comparison.others if baseline else ()
    first = runs[0].result.domains
    rows = []
    beyond: dict[tuple[str, int], list[bool]] = {
        (run.name, sign): [] for run in others for sign in (-1, 1)
    }
    for name in comparison.domains:
        losses = [run.result.domains[name] for run in runs]
        differences = []
        for run in others:
            assert baseline is not None
            found = loss_difference(run.result.domains[name], baseline.result.domains[name])
            differences += cells_of([found.value], "{:+.4f}".format, errors=[found.error])
            if found.error is not None:
                for sign in (-1, 1):
                    beyond[run.name, sign].append(sign * found.value > SURE * found.error)
        means, errors = [each.loss for each in losses], [each.loss_error for each in losses]
        shown = cells_of(means, "{:.4f}".format, errors=errors)
        rows.append([name, f"{first[name].tokens:,}", *shown, *differences])
    columns = 1 + len(runs) + len(others)
    rows += [[name, *[MISSING] * columns] for name in comparison.left_out]
    summary = []
    for label, sign in (("surely lower", -1), ("surely higher", 1)) if others else ():
        known = [beyond[run.name, sign] for run in others]
        counts = [f"{sum(each)} of {len(each)}" if each else MISSING for each in known]
        summary.append([label, *[""] * (1 + len(runs)), *counts])
    notes = [
        "Nats per token ± the standard error over documents: that of another sample of held-out "
        "text, not of another training run."
    ]
    label = baseline.label if baseline else ""
    if others:
        notes.append(
            f"Differences to {label} are paired: both models predict the same tokens. The last "
            f"rows count those beyond {SURE:g} standard errors."
        )
    header = ["domain", "tokens", *(f"loss {run.label}" for run in runs)]
    header += [f"{run.label} minus {label}" for run in others]
    return Table.of("Held-out loss", header, rows, summary, notes)


def bits_per_byte_table(comparison: Comparison) -> Table | None:
    """Per domain: bytes of text and bits per byte of every run; None where no bytes are known."""
    runs = comparison.runs
    first = runs[0].result.domains
    if not any(domain.text_bytes for domain in first.values()):
        return None

    def row(name: str, losses: list[DomainLoss]) -> list[str]:
        size = first[name].text_bytes
        bits = [each.bits_per_byte for each in losses]
        errors = [each.bits_per_byte_error for each in losses]
        cells = cells_of(bits, "{:.4f}".format, min, errors)
        return [name, MISSING if size is None else f"{size:,}", *cells]

    rows = [row(name, [run.result.domains[name] for run in runs]) for name in comparison.domains]
    rows += [[name, *[MISSING] * (1 + len(runs))] for name in comparison.left_out]
    return Table.of(
        "Bits per byte",
        ["domain", "bytes of text", *(run.label for run in runs)],
        rows,
        notes=[
            "Bits of loss per UTF-8 byte of the predicted text, comparable across tokenizers; ± "
            "the standard error over documents."
        ],
    )


def _weight_columns(folder: RunFolder, comparison: Comparison) -> list[WeightColumns]:
    """The distinct mixtures of the runs; the baseline's only where there is no other run."""
    found: list[WeightColumns] = []
    for run in comparison.others or comparison.runs:
        if run.run is None or any(same_weights(run.run.mixture, c.weights) for c in found):
            continue
        file = mixture_of(folder, run)
        found.append(WeightColumns(run.label, run.run.mixture, file[1] if file else None))
    return [WeightColumns("", found[0].weights, found[0].mixture)] if len(found) == 1 else found
