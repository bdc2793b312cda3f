"""The sentences below a head-to-head: what was measured, what is told apart, what is counted."""

from __future__ import annotations

import itertools

from megatron_chameleon.report.head_to_head.compare import HeadToHead
from megatron_chameleon.report.head_to_head.statistics import LEAST_RATIO

COST_WORDS = (
    "To obtain a mixture is counted in full, each as if it were the only one: every proxy that is "
    "trained for it (Chameleon's, DoReMi's reference too, all members of a swarm), passes over "
    "held-out text, embeddings, and the algebra or fit at the end. FLOPs are counted from the "
    "models' shapes; device-seconds are seconds times the devices (GPUs or CPU processes) held, "
    "without the start of processes."
)

DOUBT_WORDS = (
    "Each interval is for one pair by itself: none is made wider for the number of pairs, so that "
    "of twenty mixtures that do nothing about one would seem told apart. The domains in which a "
    "mixture is better are those with the lower mean over seeds, however little lower: a mixture "
    "that does nothing would be better in about half of them."
)


def notes(compared: HeadToHead) -> tuple[str, ...]:
    """All of them, in the order in which they are shown."""
    return (
        measured_words(compared),
        spread_words(compared),
        *from_baseline_words(compared),
        *neighbours_words(compared),
        DOUBT_WORDS,
        *twin_words(compared),
        COST_WORDS,
        *unknown_cost_words(compared),
    )


def measured_words(compared: HeadToHead) -> str:
    """Which models were trained, and how they were evaluated."""
    first = compared.contestants[0]
    run, protocol = first.runs[0], first.results[0].protocol
    seeds = [str(seed) for seed in compared.selection.seeds]
    most = f", at most {protocol.max_tokens:,} tokens a domain" if protocol.max_tokens else ""
    return (
        f"Each mixture was found once and trains models of {run.parameters:,} parameters for "
        f"{run.step:,} steps ({run.tokens:,} tokens) with the seeds {', '.join(seeds[:-1])} and "
        f"{seeds[-1]}; with the same seed all of them start from the same weights and draw with "
        f"the same seed. Perplexity on the {protocol.split} split, in {protocol.packing} windows "
        f"of {protocol.window_length} tokens{most}, averaged over domains, each counting the same."
    )


def spread_words(compared: HeadToHead) -> str:
    """The ratio of the two spreads, how it is defined, and what follows."""
    found, by_chance = compared.spread, len(compared.selection.seeds) ** -0.5
    if found is None:
        return (
            "All of these mixtures have the same weights and show the same models: there is no "
            "spread between mixtures, and nothing to tell apart."
        )
    verdict = (
        "the mixtures can be told apart"
        if found.is_told_apart
        else "the mixtures cannot be told apart: train the base models for longer, or more of them"
    )
    return (
        f"Spread between mixtures over spread between seeds: {found.mixtures:.2f} / "
        f"{found.seeds:.2f} = {found.ratio:.1f}; {LEAST_RATIO:g} is asked for, so {verdict}. The "
        "first is the standard deviation of the mixtures' means over seeds, the second that of "
        "single models once the means of their mixture and of their seed are taken out; without "
        f"any effect of the mixture the ratio is around {by_chance:.1f}."
    )


def from_baseline_words(compared: HeadToHead) -> tuple[str, ...]:
    """Which mixtures cannot be told from the baseline."""
    baseline = compared.baseline
    unclear = [
        c.label
        for c in compared
        if c.models != baseline.models and not compared.difference(c, baseline).is_clear
    ]
    if not unclear:
        return ()
    return (
        f"Not told apart from {baseline.label} (the 95% interval of the paired difference, by "
        f"Student's t over {len(compared.selection.seeds)} seeds, holds 0): {', '.join(unclear)}.",
    )


def neighbours_words(compared: HeadToHead) -> tuple[str, ...]:
    """Which neighbours in the order of perplexity cannot be told from each other."""
    if len(compared.own) < 2:
        return ()
    means = dict(zip(compared.selection.names, compared.averages.mean(axis=1), strict=True))
    ranked = sorted(compared.own, key=lambda c: means[c.name])
    unclear = [
        f"{better.label} and {worse.label}"
        for better, worse in itertools.pairwise(ranked)
        if not compared.difference(worse, better).is_clear
    ]
    order = " < ".join(c.label for c in ranked)
    doubt = f" Neighbours that are not told apart: {', '.join(unclear)}." if unclear else ""
    return (f"In the order of average perplexity: {order}.{doubt}",)


def twin_words(compared: HeadToHead) -> tuple[str, ...]:
    """Which columns show the same models."""
    return tuple(
        f"{c.label} has the weights of {c.twin_of}: the same models are shown."
        for c in compared
        if c.twin_of is not None
    )


def unknown_cost_words(compared: HeadToHead) -> tuple[str, ...]:
    """What of the mixtures' costs nobody wrote down."""
    return tuple(
        f"What {c.label} took is unknown, since this is not there or has no cost: "
        f"{', '.join(c.paid.missing)}."
        for c in compared
        if c.cost is None
    )
