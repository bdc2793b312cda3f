"""What a fit's mixture is to make small: ``--target`` as shares of the losses that are fitted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from megatron_chameleon.artifacts import Corpus, MixtureWarning
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.artifacts.run_columns import matched
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.named_share import name_and_share
from megatron_chameleon.methods.common.table import listed
from megatron_chameleon.mixture.checks import Array

# Of losses of one model on several domains the largest is not so many times the smallest.
OTHER_SCALE = 5.0
# Of held-out text: one to predict, and one before it.
LEAST_TOKENS = 2


def target_shares(given: str | None, metrics: Sequence[str]) -> Array:
    """The share [m] of each of ``metrics`` in the target, summing to 1; alike without a target.

    Raises:
        UserError: for a name that is none of them or is there twice, or a share that is not a
            number above 0.
    """
    if given is None:
        return np.full(len(metrics), 1.0 / len(metrics))
    shares = np.zeros(len(metrics))
    for part in filter(None, map(str.strip, given.split(","))):
        asked, share = name_and_share(part, given, metrics)
        name = matched([asked], metrics).get(asked)
        if name is None:
            raise UserError(
                f"--target {given}: no loss is called '{asked}'; there are {listed(list(metrics))}"
            )
        if shares[metrics.index(name)]:
            raise UserError(f"--target {given}: '{name}' is there twice; name it once")
        shares[metrics.index(name)] = share
    if not shares.any():
        raise UserError(f"--target {given}: it names nothing; there are {listed(list(metrics))}")
    return shares / shares.sum()


def check_target(given: str | None, corpus: Corpus) -> None:
    """Refuse a target that no proxy will be measured on, before proxies are trained.

    Raises:
        UserError: for a target that is none of the corpus's domains or has no held-out text, and
            where no domain has any.
    """
    measured = [n for n, domain in corpus.domains.items() if domain.valid.tokens >= LEAST_TOKENS]
    if not measured:
        raise UserError(
            f"{corpus.root} has nothing in its valid split to measure proxies on; preprocess again "
            "with a share for it (--split)"
        )
    shares = target_shares(given, corpus.names)
    unmeasured = [
        name
        for name, share in zip(corpus.names, shares, strict=True)
        if share and name not in measured
    ]
    if given is not None and unmeasured:
        raise UserError(
            f"--target {given}: '{unmeasured[0]}' of {corpus.root} has no held-out text, so its "
            f"loss is not measured; name others ({listed(measured)}), or preprocess again with a "
            "share for its valid split (--split)"
        )


def tell_of_scales(given: str | None, runs: MixtureRuns, where: str) -> None:
    """Warn of a target whose metrics differ so much in size that the largest decide alone.

    Losses beside accuracies are such, which are to be large besides. Shares that were given say
    what is meant.

    Args:
        given: ``--target``.
        runs: with the metrics.
        where: they were read from.
    """
    if given is not None and "=" in given:
        return
    wanted = np.flatnonzero(target_shares(given, runs.metrics))
    sizes = np.median(np.abs(runs.losses[:, wanted]), axis=0)
    small, large = int(sizes.argmin()), int(sizes.argmax())
    if sizes[large] < OTHER_SCALE * sizes[small] or not sizes[large]:
        return
    low, high = (f"{runs.metrics[wanted[at]]} (about {sizes[at]:.3g})" for at in (small, large))
    warnings.warn(
        f"{where}: the target is a mean of metrics of very different sizes, from {low} to {high}, "
        "which the large ones decide, and all of them are made small, accuracies too; say what is "
        "meant by --target, as a,b or with shares a=2,b=1",
        MixtureWarning,
        stacklevel=3,
    )
