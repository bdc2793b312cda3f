"""Sample the mixtures of a swarm: at random, then in rounds by the losses of earlier members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange.mixture_runs import MixtureRuns
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.methods.swarm import FitOptions, GenerateOptions, MixtureSamplingOptions
from megatron_chameleon.methods.swarm.space import SearchSpace
from megatron_chameleon.mixture.acquisition import next_mixtures
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.regmix import SamplingRule, sample_mixtures
from megatron_chameleon.mixture.surrogate import FEWEST_RUNS, fit_surrogate

# Warn about a domain if fewer runs than this sample it: its effect on the losses is uncertain.
MIN_RUNS_PER_DOMAIN = 5
# A round chooses its mixtures among this many sampled mixtures, in addition to one per proxy.
MAX_CANDIDATES = 1024
# Mixtures whose weights are equal to this number of decimal places count as the same mixture.
NUM_DIGITS = 9


def mixtures_to_train(options: FitOptions | GenerateOptions, space: SearchSpace) -> Array:
    """Sample the proxies' mixtures [n, k] of the k domains of the corpus, within ``space``.

    Warn about domains that few mixtures contain.

    Raises:
        UserError: if the sampling options do not allow n distinct mixtures.
    """
    count, shares = options.num_proxies, space.token_shares
    try:
        mixtures = sampled(options.sampling, shares, count)
    except ValueError as error:
        raise UserError(f"--num-proxies {count} and the mixture sampling flags: {error}") from error
    present = np.flatnonzero(shares)
    warn_rare_domains(
        [space.names[position] for position in present],
        mixtures[:, present],
        f"the mixtures of {count} proxies",
        "; lower --smallest-weight, or raise --max-upweighting or --num-proxies",
    )
    return space.expand(mixtures)


def sampled(sampling: MixtureSamplingOptions, shares: Array, count: int) -> Array:
    """Sample ``count`` mixtures [count, k] around the domains' token ``shares`` [k].

    Raises:
        ValueError: if the options do not allow that many distinct mixtures.
    """
    rule = dict(vars(sampling))
    seed = rule.pop("mixture_seed")
    return sample_mixtures(shares, count, seed, SamplingRule(**rule))


def round_ends(options: FitOptions) -> list[int]:
    """Return the number of members after each of ``--rounds``."""
    rounds = options.swarm.rounds
    return [options.num_proxies * number // rounds for number in range(1, rounds + 1)]


def started_rounds(options: FitOptions, corpus: Corpus, mixtures: Array, folder: Path) -> Array:
    """Return the mixtures [members, k] of the rounds that have started.

    Args:
        options: options of the method, with more than one round.
        corpus: the corpus.
        mixtures: [n, k] sampled mixtures, of which the first round uses the first.
        folder: folder of the swarm, which records the mixtures of later rounds, if any.

    Raises:
        UserError: if the first round has too few members for a surrogate.
    """
    first = round_ends(options)[0]
    if first < FEWEST_RUNS:
        raise UserError(
            f"--rounds {options.swarm.rounds} of --num-proxies {options.num_proxies}: the first "
            f"round has {first} proxies, but a surrogate needs {FEWEST_RUNS}; use fewer rounds or "
            "more proxies"
        )
    mixtures = mixtures[:first]
    if SwarmRecord.exists(folder):
        record = SwarmRecord.load(folder)
        if record.domains == corpus.names:
            recorded = np.array(record.mixtures[first : options.num_proxies])
            mixtures = np.concatenate([mixtures, recorded.reshape(-1, len(corpus.names))])
    return mixtures


def next_round(
    options: FitOptions,
    space: SearchSpace,
    mixtures: Array,
    table: MixtureRuns,
    shares: Array,
    within_limits: Callable[[Array], tuple[Array, Array]],
) -> Array:
    """Append the mixtures of the next round to ``mixtures`` [n, domains of the corpus].

    The choice depends on the options and on the losses of the finished members only.

    Args:
        options: options of the method, with more than one round.
        space: the k domains of the search.
        mixtures: [n, domains of the corpus] mixtures of the finished members.
        table: mixtures [., k] and losses [., m] of those that did not diverge.
        shares: [m] share of each loss in the target.
        within_limits: mixtures [., k] -> the nearest ones that may be the result of the fit, and
            their penalties [.] in its search.

    Raises:
        UserError: if too few members did not diverge, or too few mixtures are possible.
    """
    if len(table.keys) < FEWEST_RUNS:
        raise UserError(
            f"only {len(table.keys)} of {len(mixtures)} proxies did not diverge, but the "
            f"surrogate of --rounds needs {FEWEST_RUNS}; lower --lr, and choose another "
            "--work-dir"
        )
    count = min(end for end in round_ends(options) if end > len(mixtures)) - len(mixtures)
    candidates, penalties = new_candidates(options, space, mixtures, within_limits)
    used, seed = np.flatnonzero(shares), options.sampling.mixture_seed
    surrogate = fit_surrogate(table.mixtures, table.losses[:, used], seed)
    try:
        chosen = next_mixtures(
            surrogate, shares[used], candidates, count, seed + len(mixtures), penalties
        )
    except ValueError as error:
        raise UserError(
            f"--rounds {options.swarm.rounds}: {error}, or loosen the limits"
        ) from error
    return np.concatenate([mixtures, space.expand(candidates[chosen])])


def new_candidates(
    options: FitOptions,
    space: SearchSpace,
    mixtures: Array,
    within_limits: Callable[[Array], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """Sample the candidates [c, k] of the next round, and their penalties [c].

    None of them is equal to another, or to one of ``mixtures`` [n, domains of the corpus].

    Raises:
        ValueError: if the options do not allow as many mixtures as proxies.
    """
    extra = MAX_CANDIDATES
    while True:
        # If the options do not allow this many distinct mixtures, use fewer candidates.
        try:
            candidates = sampled(options.sampling, space.token_shares, options.num_proxies + extra)
            break
        except ValueError:
            if not extra:
                raise
            extra //= 2
    candidates, penalties = within_limits(candidates)
    # Moving a mixture into the limits may round its weights.
    earlier = space.of_runs([str(number) for number in range(len(mixtures))], mixtures)
    rounded = np.round(np.concatenate([earlier, candidates]), NUM_DIGITS)
    _, first = np.unique(rounded, axis=0, return_index=True)
    new = np.sort(first[first >= len(mixtures)]) - len(mixtures)
    return candidates[new], penalties[new]


def warn_rare_domains(
    domains: Sequence[str], mixtures: Array, where: str, remedy: str = ""
) -> None:
    """Warn about domains that no run or only few runs sample.

    Args:
        domains: names of the k domains.
        mixtures: [n, k] mixtures of the runs.
        where: source of the runs, for the message.
        remedy: end of the message.
    """
    counts = by_name(domains, (mixtures > 0).sum(axis=0))
    few = min(MIN_RUNS_PER_DOMAIN, len(mixtures))
    problems = []
    if without := [name for name, count in counts.items() if not count]:
        problems.append(f"no run samples {format_names(without)}, so the fit gives them weight 0")
    if scarce := [name for name, count in counts.items() if 0 < count < few]:
        problems.append(f"fewer than {few} runs sample {format_names(scarce)}")
    if problems:
        warn(f"{where}: {'; '.join(problems)}{remedy}")


def require_lightgbm(flag: str) -> None:
    """Raise UserError if LightGBM, which ``flag`` needs, cannot be imported."""
    try:
        import lightgbm  # noqa: F401
    except (ImportError, OSError) as error:
        raise UserError(
            f"{flag} needs LightGBM ({error}): pip install lightgbm; if it cannot load libgomp, "
            "apt-get install libgomp1"
        ) from error
