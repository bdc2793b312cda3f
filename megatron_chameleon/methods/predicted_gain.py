"""Predict what a mixture can gain before proxies are trained, and write the prior if no gain is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Corpus, Mixture, Stopwatch, provenance
from megatron_chameleon.corpus.target import Target
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import TaskOptions
from megatron_chameleon.methods.limits import epoch_limit, prior_weights
from megatron_chameleon.methods.mixmin import (
    EstimateOptions,
    ExpertOptions,
    MixminOptions,
    TargetTaskOptions,
)
from megatron_chameleon.methods.mixmin.compute import MOST_SAMPLED_TOKENS, SAMPLE_TOKENS
from megatron_chameleon.methods.mixmin.headroom import measure_headroom, parse_noise
from megatron_chameleon.methods.options import TrainingMethodOptions
from megatron_chameleon.methods.output import cost_totals, write_and_print


def write_prior_without_gain(
    method: str,
    options: TrainingMethodOptions,
    runs: Sequence[Path],
    target: Target | None,
    measured: Path,
    *,
    tasks: TaskOptions | None = None,
    domains: Sequence[str] | None = None,
    min_weight: str | None = None,
    max_weight: str | None = None,
) -> bool:
    """Print what a mixture can gain for the target; write the prior if no gain over it is certain.

    The method is also to train if one of ``runs`` has started, as in a resumed command, or if the
    gain cannot be measured. One line then gives the reason. Called on one rank.

    Args:
        method: name of the method.
        options: options of the method.
        runs: folders of the proxies that the method trains.
        target: the target; None stands for the average over the domains.
        measured: folder of the corpus in which the texts of the target are held-out domains.
        tasks: tasks that the target may name.
        domains: domains to weigh; default: all.
        min_weight: value of ``--min-weight``.
        max_weight: value of ``--max-weight``.

    Returns:
        Whether the prior was written.

    Raises:
        UserError: for an invalid ``--prior`` or ``--seed-noise``.
    """
    if started := next(filter(Path.exists, runs), None):
        print(f"no gain is predicted, since {started} exists; the proxies are trained", flush=True)
        return False
    stopwatch, corpus, fallback = Stopwatch(), Corpus.load(options.corpus), options.fallback
    names = list(domains or corpus.names)
    parse_noise(options.seed_noise, target)
    sizes = {name: corpus.train_tokens[name] for name in names}
    prior_weights(fallback.prior, sizes, str(corpus.root), corpus.held_out)
    value: str | None = None
    named: tuple[str, ...] = ()
    if target is not None:
        value = ",".join(f"{name}={share}" for name, share in target.shares.items())
        named = tuple(name for name in tasks.tasks if name in target.shares) if tasks else ()
    downstream = TargetTaskOptions()
    if tasks and named:
        downstream = TargetTaskOptions(**{**vars(tasks), "tasks": named})
    try:
        if target is not None and 0 < len(named) < len(target.shares):
            raise UserError(
                f"the target mixes tasks, such as '{named[0]}', and text, whose losses have other "
                "units"
            )
        headroom = measure_headroom(
            MixminOptions(
                corpus=measured,
                output=options.output,
                token_budget=options.token_budget,
                max_epochs=options.max_epochs,
                domains=None if domains is None else ",".join(domains),
                target=value,
                downstream=downstream,
                models=ExpertOptions(
                    sample_tokens=min(SAMPLE_TOKENS, -(-MOST_SAMPLED_TOKENS // len(names)))
                ),
                estimate=EstimateOptions(
                    prior=fallback.prior,
                    min_weight=min_weight,
                    max_weight=max_weight,
                ),
            ),
            options.seed_noise,
        )
    except UserError as error:
        print(f"predicted gain: not measured, since {error}; the proxies are trained", flush=True)
        return False
    print("\n".join(headroom.lines), flush=True)
    reason = headroom.reason_for_prior
    if reason is None:
        print(f"a gain over '{fallback.prior}' is predicted; the proxies are trained", flush=True)
        return False
    plan, cost = headroom.plan, stopwatch.cost()
    inputs = {"corpus": corpus.hash}
    if target and target.texts:
        inputs["target text"] = target.texts_hash
    parameters: dict[str, Any] = {
        "target": dataclasses.asdict((target or plan.target).record),
        "written": "prior",
        "headroom": headroom.parameters,
        "total_cost": cost_totals(cost),
        "paper_flops": 0.0,
    }
    mixture = Mixture(
        **epoch_limit(options, corpus, names).mixture_fields(
            plan.without_epochs.placed_prior, plan.limits.placed_prior
        ),
        method=method,
        parameters=parameters,
        provenance=provenance(options, inputs),
        cost=cost,
    )
    write_and_print(
        mixture,
        options,
        corpus,
        f"written: the prior '{fallback.prior}' within the limits, since {reason}; no proxy was "
        "trained: --accept-uncertain trains the proxies",
    )
    return True
