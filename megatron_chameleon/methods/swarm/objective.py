"""The target of a fit: the share of each measured loss in what the mixture minimizes."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import Target, check_text_options, parse_target
from megatron_chameleon.errors import UserError, format_names
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, matched
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.methods.swarm import FitOptions
from megatron_chameleon.mixture.checks import Array

# Warn about a target whose metrics differ in magnitude by more than this factor, since they may not
# all be losses: the losses of a model on several domains differ by a smaller factor.
MAX_METRIC_RATIO = 5.0
# A domain needs this many held-out tokens: one to predict, and one as its context.
MIN_HELD_OUT_TOKENS = 2


def parse_objective(options: FitOptions, value: str | None, names: Sequence[str]) -> Target | None:
    """Parse ``--target``, or its default; None stands for the mean of all losses.

    Args:
        options: options of the method.
        value: the target, or its default.
        names: losses that may be named, in any spelling.

    Raises:
        UserError: for an invalid target.
    """
    if value is None:
        return None
    source = SourceOptions((), text_key=options.target_text_key)
    target = parse_target(value, names, source, lambda name: matched([name], names).get(name))
    check_text_options(options, target)
    return target


def target_shares(
    target: Target | None, metrics: Sequence[str], held_out: Container[str] = ()
) -> Array:
    """Return the share [m] of each metric in the target.

    Without a target, all metrics but the losses of ``held_out`` domains have equal shares. The
    shares sum to 1.

    Raises:
        UserError: if a name of the target is not measured, or nothing but held-out domains is
            measured and there is no target.
    """
    if target is None:
        measured = np.array([metric not in held_out for metric in metrics], np.float64)
        if not measured.any():
            raise UserError(f"the losses are those of held-out domains; pass --target {metrics[0]}")
        return measured / measured.sum()
    if missing := target.shares.keys() - set(metrics):
        raise UserError(
            f"--target {target.value}: no run is measured on '{min(missing)}'; choose from "
            f"{format_names(metrics)}"
        )
    return np.array([target.shares.get(metric, 0.0) for metric in metrics])


def check_target(target: Target | None, corpus: Corpus, tasks: Sequence[str]) -> None:
    """Raise UserError for a task with a domain's name, or a target without held-out text."""
    if both := [task for task in tasks if task in corpus.all_domains]:
        raise UserError(
            f"--tasks {both[0]}: {corpus.root} has a domain of that name; leave the task out, or "
            "rename the domain"
        )
    names = [*corpus.all_domains, *tasks]
    shares = by_name(names, target_shares(target, names, corpus.held_out))
    measured = [
        name
        for name, domain in corpus.all_domains.items()
        if domain.valid.tokens >= MIN_HELD_OUT_TOKENS
    ]
    wanted = [name for name in corpus.all_domains if shares[name]]
    unmeasured = [name for name in wanted if name not in measured]
    if not measured or (unmeasured and (target is not None or unmeasured == wanted)):
        first, others = [*unmeasured, *corpus.names][0], format_names([*measured, *tasks])
        raise UserError(
            f"'{first}' of {corpus.root} has no held-out text to measure proxies on; "
            f"preprocess it again with --split, or choose --target from {others}"
        )


def warn_mixed_scales(target: str | None, shares: Array, table: MixtureRuns, where: str) -> None:
    """Warn about a target that averages metrics of very different scales, such as accuracies.

    There is no warning if the user sets the shares [m].
    """
    if target is not None and "=" in target:
        return
    used = np.flatnonzero(shares)
    scales = np.median(np.abs(table.losses[:, used]), axis=0)
    if scales.max() > MAX_METRIC_RATIO * scales.min():
        small, large = (table.metrics[used[at]] for at in (scales.argmin(), scales.argmax()))
        warn(
            f"{where}: the target averages metrics of very different scales, {small} and "
            f"{large}; all metrics are minimized, even accuracies; select metrics with --target "
            "a,b or a=2,b=1"
        )
