"""The tables of a report: held-out perplexity and fine-tuning weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import numpy as np

from megatron_chameleon.artifacts import Mixture, Protocol, mean_perplexity_difference
from megatron_chameleon.report.comparison import (
    Comparison,
    Evaluated,
    caveats,
    compare,
    mixture_of,
    same_weights,
)
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.text_tables import MISSING, Cell, Row, Table


@dataclasses.dataclass(frozen=True)
class WeightColumns:
    """Weights, and their intervals where ``mixture`` has them; an empty label is not shown."""

    label: str
    weights: Mapping[str, float]
    mixture: Mixture | None

    @property
    def has_intervals(self) -> bool:
        """Whether a second column is shown."""
        return self.mixture is not None and self.mixture.intervals is not None

    def cells(self, domain: str) -> Row:
        """The weight of ``domain`` and, where known, its interval."""
        weight = Cell(format_weight(self.weights.get(domain, 0.0)))
        interval = (Cell(format_interval(self.mixture, domain)),) if self.has_intervals else ()
        return (weight, *interval)

    def header(self) -> tuple[str, ...]:
        """Headings of the cells."""
        weight = f"{self.label} weight".strip()
        if not self.has_intervals:
            return (weight,)
        return (weight, f"{self.label} {interval_name(self.mixture)}".strip())


def perplexity_table(folder: RunFolder, baseline: str | None = None) -> Table:
    """Per domain: training weight, its interval, and the held-out perplexity of every run.

    The average is over domains, each counting the same, as in the paper's tables.

    Raises:
        UserError: see ``compare``.
    """
    comparison = compare(folder, baseline)
    weighted = _weight_columns(folder, comparison)
    blank = tuple(Cell("") for column in weighted for _ in column.header())
    unigram = comparison.runs[0].result.domains
    rows = [
        (
            Cell(name),
            *(cell for column in weighted for cell in column.cells(name)),
            Cell(format_perplexity(unigram[name].unigram_perplexity)),
            *_marked([run.result.domains[name].perplexity for run in comparison.runs]),
        )
        for name in comparison.domains
    ]
    rows += [
        (
            Cell(name),
            *(cell for column in weighted for cell in column.cells(name)),
            *[Cell()] * (1 + len(comparison.runs)),
        )
        for name in comparison.left_out
    ]
    average_unigram = math.fsum(d.unigram_perplexity for d in unigram.values()) / len(unigram)
    average = (
        Cell("average"),
        *blank,
        Cell(format_perplexity(average_unigram)),
        *_marked([run.result.mean_perplexity for run in comparison.runs]),
    )
    return Table(
        title="Held-out perplexity",
        header=(
            "domain",
            *(name for column in weighted for name in column.header()),
            "unigram perplexity",
            *(f"perplexity {run.label}" for run in comparison.runs),
        ),
        rows=tuple(rows),
        summary=(average, *_domains_better(comparison, (*blank, Cell("")))),
        notes=(
            describe_protocol(comparison.runs[0].result.protocol),
            *_left_out(comparison),
            *caveats(folder, comparison),
            *verdicts(comparison),
        ),
    )


def fine_tuning_tables(folder: RunFolder) -> list[Table]:
    """For each fine-tuning mixture: scores and weights, beside the pretraining weights."""
    return [
        _fine_tuning_table(mixture, _pretraining_partner(folder, name))
        for name, mixture in folder.mixtures.items()
        if mode_of(name, mixture) == "finetune"
    ]


def verdicts(comparison: Comparison) -> list[str]:
    """One sentence per run: its average and its count of better domains against the baseline."""
    baseline = comparison.baseline
    if baseline is None:
        return []
    reference = baseline.result.mean_perplexity
    sentences = []
    for run in comparison.others:
        average = run.result.mean_perplexity
        error = mean_perplexity_difference(run.result, baseline.result).error
        paired = "" if error is None else f", {format_error(average - reference, error, 2)}"
        again = ", trained with the same weights," if _is_another_seed(run, baseline) else ""
        sentences.append(
            f"{run.label}{again} has an average perplexity of {format_perplexity(average)}, "
            f"{baseline.label} of {format_perplexity(reference)} "
            f"({average / reference - 1:+.1%}{paired}); {run.label} is lower in "
            f"{comparison.domains_better(run)} of {len(comparison.domains)} domains."
        )
    return sentences


def _is_another_seed(run: Evaluated, baseline: Evaluated) -> bool:
    """Whether what sets two runs apart is chance: a difference as of a seed, not of a mixture."""
    if run.run is None or baseline.run is None:
        return False
    return same_weights(run.run.mixture, baseline.run.mixture)


def mode_of(name: str, mixture: Mixture) -> str | None:
    """What the mixture is for, "pretrain" or "finetune", by its parameters or by its name."""
    stated = mixture.parameters.get("mode")
    by_name = next((m for m in ("pretrain", "finetune") if name.endswith(m)), None)
    return str(stated) if stated is not None else by_name


def describe_protocol(protocol: Protocol) -> str:
    """The protocol in words, as a note below a table."""
    return f"On {protocol.told()}. Lower is better; the lowest of each row is marked."


def format_weight(weight: float) -> str:
    """A weight, to four places."""
    return f"{weight:.4f}"


def format_score(score: float | None) -> str:
    """A leverage score, which is below 1, to four places or, where that says little, digits."""
    if score is None:
        return MISSING
    return f"{score:.4f}" if score >= 0.01 or score == 0 else f"{score:.3e}"


def format_interval(mixture: Mixture | None, domain: str) -> str:
    """Both ends of the interval of a domain's weight, '-' where there is none."""
    if mixture is None or mixture.intervals is None or domain not in mixture.intervals:
        return MISSING
    low, high = mixture.intervals[domain]
    return f"{format_weight(low)} to {format_weight(high)}"


def interval_name(mixture: Mixture | None) -> str:
    """For example "95% interval"."""
    if mixture is None or mixture.confidence is None:
        return "interval"
    return f"{100 * mixture.confidence:g}% interval"


def format_perplexity(perplexity: float) -> str:
    """A perplexity, to two places while that is short."""
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.3e}"


def format_error(value: float, error: float | None, places: int, sign: str = "+") -> str:
    """A figure with its standard error, like '+1.23 ± 0.04'; without one where it is not known."""
    figure = f"{value:{sign}.{places}f}"
    return figure if error is None else f"{figure} ± {error:.{places}f}"


def format_flops(flops: float) -> str:
    """Floating-point operations like 1.23e+13, '-' for none."""
    return f"{flops:.2e}" if flops else MISSING


def format_seconds(seconds: float) -> str:
    """Seconds to a tenth, '-' for none."""
    return f"{seconds:.1f}" if seconds else MISSING


def _marked(perplexities: list[float]) -> Row:
    """Cells of one row; the lowest is marked if there is something to compare it with."""
    lowest = min(perplexities) if len(perplexities) > 1 else None
    return tuple(Cell(format_perplexity(p), best=p == lowest) for p in perplexities)


def _domains_better(comparison: Comparison, blank: Row) -> tuple[Row, ...]:
    baseline = comparison.baseline
    if baseline is None or not comparison.others:
        return ()
    counts = (
        Cell(f"{comparison.domains_better(run)} of {len(comparison.domains)}")
        for run in comparison.others
    )
    return ((Cell(f"domains better than {baseline.label}"), *blank, Cell(MISSING), *counts),)


def _left_out(comparison: Comparison) -> list[str]:
    """Which domains have no figures, since their split has nothing to predict."""
    names = comparison.left_out
    return [f"Nothing to predict, and not in the average: {', '.join(names)}."] if names else []


def _weight_columns(folder: RunFolder, comparison: Comparison) -> list[WeightColumns]:
    """The distinct mixtures of the runs; the baseline's only where there is no other run."""
    found: list[WeightColumns] = []
    for run in comparison.others or comparison.runs:
        if run.run is None or _is_listed(run, found):
            continue
        file = mixture_of(folder, run)
        found.append(WeightColumns(run.label, run.run.mixture, file[1] if file else None))
    return [dataclasses.replace(found[0], label="")] if len(found) == 1 else found


def _is_listed(run: Evaluated, columns: Iterable[WeightColumns]) -> bool:
    assert run.run is not None
    return any(same_weights(run.run.mixture, column.weights) for column in columns)


def _pretraining_partner(folder: RunFolder, finetune: str) -> Mixture | None:
    """The pretraining mixture made like ``finetune``: by its name, or else the only one there."""
    pretrain = {n: m for n, m in folder.mixtures.items() if mode_of(n, m) == "pretrain"}
    by_name = pretrain.get(finetune.replace("finetune", "pretrain"))
    only_one = next(iter(pretrain.values())) if len(pretrain) == 1 else None
    return by_name or only_one


def _fine_tuning_table(finetune: Mixture, pretrain: Mixture | None) -> Table:
    columns = [
        WeightColumns(label, mixture.weights, mixture)
        for label, mixture in (("pretraining", pretrain), ("fine-tuning", finetune))
        if mixture is not None
    ]
    rows = tuple(
        (
            Cell(name),
            Cell(format_score((finetune.scores or {}).get(name))),
            *(cell for column in columns for cell in column.cells(name)),
        )
        for name in finetune.weights
    )
    return Table(
        title="Weights for pretraining and fine-tuning",
        header=("domain", "leverage score", *(n for c in columns for n in c.header())),
        rows=rows,
        notes=_score_notes(finetune, pretrain),
    )


def _score_notes(finetune: Mixture, pretrain: Mixture | None) -> tuple[str, ...]:
    """A caveat where the two mixtures do not stem from one set of scores."""
    if pretrain is None or not pretrain.scores or not finetune.scores:
        return ()
    both = (pretrain.scores, finetune.scores)
    names = {name for scores in both for name in scores}
    theirs, ours = ([scores.get(name, np.nan) for name in names] for scores in both)
    if np.allclose(theirs, ours, rtol=1e-4):
        return ()
    return ("The pretraining weights come from other scores than those shown.",)
