"""The tables of a report: held-out perplexity and fine-tuning weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megatron_chameleon.artifacts import Mixture, mean_perplexity_difference
from megatron_chameleon.report.comparison import (
    Comparison,
    Evaluated,
    caveats,
    mixture_of,
    same_weights,
)
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.seeds import SeedGroup, Spread, seed_groups
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
        """The weight of ``domain`` and, where known, its interval; '-' where it has none."""
        known = self.weights.get(domain)
        weight = Cell() if known is None else Cell(format_weight(known))
        interval = (Cell(format_interval(self.mixture, domain)),) if self.has_intervals else ()
        return (weight, *interval)

    def header(self) -> tuple[str, ...]:
        """Headings of the cells."""
        weight = f"{self.label} weight".strip()
        if not self.has_intervals:
            return (weight,)
        return (weight, f"{self.label} {interval_name(self.mixture)}".strip())


def perplexity_table(folder: RunFolder, comparison: Comparison) -> Table:
    """Per domain: training weight, its interval, and the held-out perplexity of every run.

    The average is over domains, each counting the same, as in the paper's tables.
    """
    weighted = _weight_columns(folder, comparison)
    blank = tuple(Cell("") for column in weighted for _ in column.header())
    return Table(
        title="Held-out perplexity",
        header=(
            "domain",
            *(name for column in weighted for name in column.header()),
            "unigram perplexity",
            *(f"perplexity {run.label}" for run in comparison.runs),
        ),
        rows=_perplexity_rows(comparison, weighted),
        summary=(_average(comparison, blank), *_domains_better(comparison, (*blank, Cell("")))),
        notes=(
            describe_protocol(comparison),
            *_left_out(comparison),
            *caveats(folder, comparison),
            *verdicts(comparison),
        ),
    )


@dataclasses.dataclass(frozen=True)
class FineTuning:
    """A mixture for fine-tuning and the one for pretraining that it stands beside.

    Attributes:
        name: of the mixture for fine-tuning.
        partner: name of the other; None where there is none, or several and none is called like it.
        is_by_name: whether the two are called alike, and not merely the only ones.
    """

    name: str
    partner: str | None
    is_by_name: bool


def fine_tuning_pairs(folder: RunFolder) -> list[FineTuning]:
    """Each mixture for fine-tuning, with the one for pretraining called like it or alone there."""
    modes = {name: mode_of(name, mixture) for name, mixture in folder.mixtures.items()}
    pretrain = [name for name, mode in modes.items() if mode == "pretrain"]
    pairs = []
    for name in (name for name, mode in modes.items() if mode == "finetune"):
        like = name.replace("finetune", "pretrain")
        only = pretrain[0] if len(pretrain) == 1 else None
        pairs.append(FineTuning(name, like if like in pretrain else only, like in pretrain))
    return pairs


def fine_tuning_tables(folder: RunFolder) -> list[Table]:
    """For each fine-tuning mixture: scores and weights, beside the pretraining weights."""
    pairs = fine_tuning_pairs(folder)
    return [_fine_tuning_table(folder, pair, is_alone=len(pairs) == 1) for pair in pairs]


def verdicts(comparison: Comparison) -> list[str]:
    """A sentence for each method: its average and its count of better domains, by the baseline's.

    A method with several seeds, or beside a baseline with several, is told by the mean over seeds;
    a run by itself is compared with the baseline's run. Nothing without a baseline.
    """
    baseline = comparison.baseline
    if baseline is None:
        return []
    reference, *groups = seed_groups(comparison)
    if not groups and len(reference.runs) > 1:
        return [f"{_spread_told(reference)}; ± is the standard deviation over seeds."]
    return [
        _run_verdict(comparison, group.runs[0], baseline)
        if len(group.runs) == 1
        else _seeds_verdict(comparison, group, reference)
        for group in groups
    ]


def standings(comparison: Comparison) -> list[str]:
    """A sentence for each method by itself, where there is no baseline."""
    over = f"over {len(comparison.domains)} domains"
    return [
        f"{_spread_told(group)}, {over}; ± is the standard deviation over seeds."
        if len(group.runs) > 1
        else f"{group.label} has an average perplexity of "
        f"{format_perplexity(group.perplexity.mean)} {over}."
        for group in seed_groups(comparison)
    ]


def _run_verdict(comparison: Comparison, run: Evaluated, baseline: Evaluated) -> str:
    average, reference = run.result.mean_perplexity, baseline.result.mean_perplexity
    error = mean_perplexity_difference(run.result, baseline.result).error
    paired = "" if error is None else format_error(average - reference, error, 2)
    again = ", trained with the same weights," if _is_another_seed(run, baseline) else ""
    return (
        f"{run.label}{again} has an average perplexity of {format_perplexity(average)}, "
        f"{baseline.label} of {format_perplexity(reference)}"
        f"{_change(average, reference, paired)}; {run.label} is lower in "
        f"{comparison.domains_better(run)} of {len(comparison.domains)} domains."
    )


def _seeds_verdict(comparison: Comparison, group: SeedGroup, reference: SeedGroup) -> str:
    theirs = reference.perplexity
    difference = group.less(reference)
    paired = ""
    if difference is not None and difference.count > 1:
        paired = (
            f"{format_error(difference.mean, difference.deviation, 2)} by pairs of the "
            f"{difference.count} seeds that both have"
        )
    return (
        f"{_spread_told(group)}, {reference.label} of {_spread(theirs)}"
        f"{_change(group.perplexity.mean, theirs.mean, paired)}; the mean of {group.label} is "
        f"lower in {group.domains_better(reference)} of {len(comparison.domains)} domains. "
        "± is the standard deviation over seeds."
    )


def _spread_told(group: SeedGroup) -> str:
    return f"{group.label} has an average perplexity of {_spread(group.perplexity)}"


def _spread(found: Spread) -> str:
    """For example '20.12 ± 0.31 over 3 seeds'."""
    seeds = "1 seed" if found.count == 1 else f"{found.count} seeds"
    return f"{format_spread(found)} over {seeds}"


def _change(average: float, reference: float, paired: str) -> str:
    """In brackets the ratio and what else is known of it; nothing of infinite averages."""
    if not (math.isfinite(average) and math.isfinite(reference)):
        return ""
    return f" ({average / reference - 1:+.1%}{', ' if paired else ''}{paired})"


def _is_another_seed(run: Evaluated, baseline: Evaluated) -> bool:
    """Whether what sets two runs apart is chance: a difference as of a seed, not of a mixture."""
    if run.run is None or baseline.run is None:
        return False
    return same_weights(run.run.mixture, baseline.run.mixture)


def mode_of(name: str, mixture: Mixture) -> str | None:
    """What the mixture is for, "pretrain" or "finetune", by its parameters.

    Where these do not say it, the name does, of a mixture of Chameleon's or of no known method.
    """
    stated = mixture.parameters.get("mode")
    if stated is not None:
        return str(stated)
    if mixture.method and not mixture.method.startswith("chameleon"):
        return None
    return next((mode for mode in ("pretrain", "finetune") if name.endswith(mode)), None)


def describe_protocol(comparison: Comparison) -> str:
    """The protocol in words, as a note below a table."""
    marked = "; the lowest of each row is marked" if len(comparison.runs) > 1 else ""
    return f"On {comparison.runs[0].result.protocol.told()}. Lower is better{marked}."


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


def format_spread(found: Spread) -> str:
    """A mean perplexity and its deviation over seeds, where that is known: '20.12 ± 0.31'."""
    error = "" if found.deviation is None else f" ± {format_perplexity(found.deviation)}"
    return f"{format_perplexity(found.mean)}{error}"


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
    """Cells of one row; the lowest is marked if it is finite and has something beside it."""
    finite = [p for p in perplexities if math.isfinite(p)]
    lowest = min(finite) if finite and len(perplexities) > 1 else None
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


def _perplexity_rows(comparison: Comparison, weighted: Sequence[WeightColumns]) -> tuple[Row, ...]:
    """Of the domains with figures, and then of those that have nothing to predict."""
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
    return tuple(rows)


def _average(comparison: Comparison, blank: Row) -> Row:
    unigram = comparison.runs[0].result.domains.values()
    mean = math.fsum(domain.unigram_perplexity for domain in unigram) / len(unigram)
    return (
        Cell("average"),
        *blank,
        Cell(format_perplexity(mean)),
        *_marked([run.result.mean_perplexity for run in comparison.runs]),
    )


def _fine_tuning_table(folder: RunFolder, pair: FineTuning, is_alone: bool) -> Table:
    finetune = folder.mixtures[pair.name]
    pretrain = None if pair.partner is None else folder.mixtures[pair.partner]
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
    by_chance = pair.partner is not None and not pair.is_by_name
    partner = f"The pretraining weights are those of {pair.partner}, the only ones here."
    return Table(
        title="Weights for pretraining and fine-tuning" + ("" if is_alone else f": {pair.name}"),
        header=("domain", "leverage score", *(n for c in columns for n in c.header())),
        rows=rows,
        notes=(*([partner] if by_chance else []), *_score_notes(finetune, pretrain)),
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
