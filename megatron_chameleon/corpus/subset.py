"""Subsets of a number of tokens: the budget of each domain, and the shards that fill it.

A domain of a subset is the beginning of the same domain without ``--max-tokens``: it ends with the
document that reaches its budget of train tokens. A shard is a function of its budgets, and whether
a shard is needed depends on the shards before it alone. So the subset does not depend on the order
in which shards are made, nor on interruptions.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_chameleon.artifacts import Domain, Mixture
from megatron_chameleon.corpus.join import examine, is_written
from megatron_chameleon.corpus.options import PreprocessOptions
from megatron_chameleon.corpus.shards import Shard, domain_number, is_limited
from megatron_chameleon.corpus.sources import Source
from megatron_chameleon.corpus.staging import ShardPlan
from megatron_chameleon.errors import UserError, quoted


def token_budgets(options: PreprocessOptions, sources: Sequence[Source]) -> dict[str, int] | None:
    """Domain -> train tokens of the subset; None without ``--max-tokens``.

    Raises:
        UserError: if the mixture cannot be read or has other domains.
    """
    if options.max_tokens is None:
        return None
    names = list(dict.fromkeys(s.domain for s in sources if s.split != "held_out"))
    known = [name for name in names if name is not None]
    if options.mixture not in (None, "uniform"):
        mixture = Mixture.load(Path(str(options.mixture)))
        if len(known) == len(names):
            held_out = {source.domain or "" for source in sources} - {*known}
            weights = dict(zip(known, mixture.weights_for(known, "--input", held_out), strict=True))
        else:  # documents name their domains
            weights = mixture.weights
    elif len(known) < len(names):
        raise UserError(
            "--max-tokens with --domain-key needs --mixture FILE, whose domains and weights decide "
            "what is read"
        )
    else:
        weights = Mixture.uniform(known).weights
    left_out = [name for name, weight in weights.items() if weight == 0]
    if left_out and len(known) == len(names):  # warn_left_out counts documents that name theirs
        warnings.warn(
            f"--mixture {options.mixture} leaves out {quoted(left_out)}, whose weight is 0",
            stacklevel=2,
        )
    return {
        name: max(1, round(options.max_tokens * weight))
        for name, weight in weights.items()
        if weight > 0
    }


def next_shards(
    plan: ShardPlan,
    budgets: Mapping[str, int],
    finished: Mapping[int, Shard],
    scratch: Path,
    drop_duplicates: bool,
    subset_shares: tuple[float, float, float] | None,
) -> tuple[list[int], dict[int, dict[str, int]]]:
    """Find the shards that are used, and those that have to be made for them.

    A shard is made again, with larger budgets, if it stopped before its domain was filled, because
    texts were left out of the corpus.

    Args:
        plan: plan of the shards.
        budgets: domain -> train tokens.
        finished: number -> finished shard.
        scratch: temporary file.
        drop_duplicates: whether repeated texts in a domain are left out.
        subset_shares: as in :func:`examine`.

    Returns:
        The numbers of the used shards, complete if no shard has to be made; the number and the
        budgets of each shard to make.
    """
    # Text that is not limited is always read: it is removed from the train splits.
    domains = [
        {plan.sources[c.source].domain for c in chunks if is_limited(plan.sources[c.source])}
        for chunks in plan.shards
    ]
    unlimited = [
        number
        for number, chunks in enumerate(plan.shards)
        if not all(is_limited(plan.sources[chunk.source]) for chunk in chunks)
    ]
    used = set(unlimited)
    if to_make := [number for number in unlimited if number not in finished]:
        return sorted(used), {number: dict(budgets) for number in to_make}
    tokens = _train_tokens(finished, budgets, scratch, drop_duplicates, subset_shares)
    missing: dict[int, dict[str, int]] = {}
    filled: set[str] = set()
    for name, budget in budgets.items():
        numbers = [n for n, of_shard in enumerate(domains) if not of_shard.isdisjoint((name, None))]
        found = 0
        for position, number in enumerate(numbers):
            used.add(number)
            shard = finished.get(number)
            if shard is None:
                # The shards so far show how many more are probably needed.
                count = int((budget - found) * position / found) if found else position
                to_make += numbers[position : position + max(1, count)]
                break
            found += tokens.get((number, name), 0)
            if found >= budget:
                filled.add(name)
                break
            if name in shard.stopped:
                again = missing.setdefault(number, dict(shard.budgets or budgets))
                again[name] = max(2 * again[name], budget)
                break
    new = {name: 0 if name in filled else budget for name, budget in budgets.items()}
    missing |= {number: new for number in to_make if number not in finished}
    return sorted(used), missing


def _train_tokens(
    shards: Mapping[int, Shard],
    budgets: Mapping[str, int],
    scratch: Path,
    drop_duplicates: bool,
    subset_shares: tuple[float, float, float] | None,
) -> dict[tuple[int, str], int]:
    """(shard, domain) -> train tokens that the corpus would have of them."""
    in_order = sorted(shards)
    numbers: dict[str, int] = {}
    for name in [*budgets, *(name for n in in_order for name in shards[n].domains)]:
        domain_number(numbers, name)
    names = list(numbers)
    tokens: dict[tuple[int, str], int] = {}
    read = [shards[number] for number in in_order]
    examined = examine(read, numbers, scratch, drop_duplicates, None, subset_shares)
    for number, blocks in zip(in_order, examined, strict=True):
        for documents, domains, reasons in blocks:
            train = is_written(reasons, drop_duplicates) & (documents["split"] == 0)
            for domain in set(domains[train].tolist()):
                here = int(documents["tokens"][train & (domains == domain)].sum(dtype="int64"))
                key = number, names[domain]
                tokens[key] = tokens.get(key, 0) + here
    return tokens


def warn_left_out(shards: Iterable[Shard], mixture: str | None) -> None:
    """Warn about the documents of domains without a weight, which ``shards`` do not have."""
    counts = Counter[str]()
    for shard in shards:
        counts.update(shard.left_out)
    if counts:
        warnings.warn(
            f"--mixture {mixture} leaves out {quoted(sorted(counts))}, which have no weight: "
            f"{counts.total():,} of the documents that were read",
            stacklevel=2,
        )


def warn_short_domains(domains: Mapping[str, Domain], budgets: Mapping[str, int]) -> None:
    """Warn about domains with fewer train tokens than their budgets.

    Raises:
        UserError: if a domain has no documents at all.
    """
    if absent := [name for name in budgets if name not in domains]:
        raise UserError(
            f"--mixture has a weight for {quoted(absent)}, of which --input has no documents; "
            "remove it from the weights, or correct --domain-key"
        )
    for name, budget in budgets.items():
        if (found := domains[name].train.tokens) < budget:
            total = sum(domain.train.tokens for domain in domains.values())
            warnings.warn(
                f"domain '{name}' has {found:,} train tokens, not {budget:,}: all of its text is "
                f"in the subset, where its share is {found / max(1, total):.3f} instead of "
                f"{budget / sum(budgets.values()):.3f}",
                stacklevel=2,
            )
