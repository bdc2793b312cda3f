"""The way of every method that fits losses: runs, trained or a person's -> a fit -> the mixture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from megatron_chameleon.artifacts import Corpus, Stopwatch
from megatron_chameleon.artifacts.mixture import KIND
from megatron_chameleon.artifacts.mixture_runs import MixtureRuns
from megatron_chameleon.artifacts.output_path import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.work_dir import work_dir_of
from megatron_chameleon.methods.fits.judgement import judged
from megatron_chameleon.methods.fits.outcome import Fitted, FoundMixture, write_found
from megatron_chameleon.methods.fits.runs import (
    FittedRuns,
    check_options,
    given_runs,
    is_first_process,
    refuse_idle,
)
from megatron_chameleon.methods.fits.target import check_target, target_shares, tell_of_scales
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import fit_linear, held_out_predictions
from megatron_chameleon.options.fits import FitOptions
from megatron_chameleon.progress import progress_bar

SECONDS_WITHOUT_BAR = 2.0
Options = TypeVar("Options", bound=FitOptions)


@dataclasses.dataclass(frozen=True)
class FitMethod(Generic[Options]):
    """What differs between the methods.

    Attributes:
        name: what ``--method`` takes.
        check: raises UserError for options of the method's own by which nothing can be fitted.
        check_number_of_runs: raises UserError for too few runs.
        train: the runs of a swarm; None if it was asked to stop. Every rank calls it.
        fit: the mixture for shares [m] of the losses of the runs.
        folds: of so many runs, the positions that are left out together to judge the fit.
    """

    name: str
    check: Callable[[Options], None]
    check_number_of_runs: Callable[[Options, int], None]
    train: Callable[[Options, Corpus], FittedRuns | None]
    fit: Callable[[Options, Corpus, MixtureRuns, Array], Fitted]
    folds: Callable[[Options, int], list[Array]]


def compute_fit(method: FitMethod[Options], options: Options) -> bool:
    """Train or read the runs, fit them, write the mixture. Every rank calls this.

    Returns:
        Whether there is a mixture, the same on every rank; there is none if the swarm was asked to
        stop.

    Raises:
        UserError: for a mistake in the options or in what they name.
    """
    corpus = Corpus.load(options.corpus)
    check_fit(method, options, corpus)
    if options.ratios is None or options.metrics is None:
        fitted = method.train(options, corpus)
        if fitted is None:
            return False
    elif is_first_process():
        fitted = given_runs(options.ratios, options.metrics, corpus)
        tell_of_scales(options.target, fitted.runs, str(options.metrics))
    else:
        return True
    if is_first_process():
        fit_and_write(method, options, corpus, fitted)
    return True


def check_fit(method: FitMethod[Options], options: Options, corpus: Corpus) -> None:
    """Raises UserError for what could only fail after the proxies have been trained."""
    if len(corpus.names) < 2:
        raise UserError(
            f"{corpus.root}: there is one domain, and nothing to weigh; add another one"
        )
    check_options(options)
    method.check(options)
    limit_of(options, corpus, corpus.names).check()
    check_output(options.output, KIND)
    if options.ratios is not None:
        refuse_idle(options)
        return
    work_dir_of(options.output, options.work_dir)
    check_target(options.target, corpus)
    method.check_number_of_runs(options, options.num_proxies)


def fit_and_write(
    method: FitMethod[Options], options: Options, corpus: Corpus, given: FittedRuns
) -> None:
    """Fit the runs, judge the fit by runs that are left out, and write the mixture, on one rank."""
    stopwatch, runs = Stopwatch(), given.runs
    method.check_number_of_runs(options, len(runs.keys))
    shares = target_shares(options.target, runs.metrics)
    fitted = method.fit(options, corpus, runs, shares)
    folds = method.folds(options, len(runs.keys))
    held_out = _held_out(fitted, runs, folds)
    linear = held_out_predictions(fit_linear, runs.mixtures, runs.losses, folds)
    alone = len(folds) == len(runs.keys)
    measured_by = "leave one out" if alone else f"{len(folds)}-fold cross-validation"
    judgement = judged(held_out, linear, runs.losses, shares, measured_by)
    found = FoundMixture(method.name, fitted, shares, judgement)
    write_found(found, options, corpus, given, stopwatch.cost())


def _held_out(fitted: Fitted, runs: MixtureRuns, folds: Sequence[Array]) -> Array:
    """[n, m] what is predicted for each run by fits to the others."""
    total = len(folds) * len(runs.metrics)
    with progress_bar(total, " fits", "measuring the fit", delay=SECONDS_WITHOUT_BAR) as bar:
        return held_out_predictions(
            lambda mixtures, losses: fitted.refit(mixtures, losses, bar.update),
            runs.mixtures,
            runs.losses,
            list(folds),
        )
