"""A run folder is of one corpus: what is of another one is refused."""

from __future__ import annotations

from megatron_chameleon.artifacts import Sweep, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.run_folder import BASE, CORPUS, EVALUATION, RunFolder

# A message names so many domains.
MOST_NAMED = 3


def require_own_corpus(folder: RunFolder) -> None:
    """Refuse evaluations, base runs, a sweep and mixtures of another corpus than that in 1-corpus.

    An evaluation has to be on the corpus of its base run too. Without 1-corpus, base runs and the
    sweep are held against the corpus of the evaluations, and mixtures against nothing. A base run
    that was given its data by ``--data-path`` has no corpus to compare with.

    Raises:
        UserError: naming the artifact and what it does not go with.
    """
    _require_evaluations(folder)
    _require_runs(folder)
    _require_sweep(folder)
    _require_mixtures(folder)


def corpus_of_run(run: TrainingRun) -> str | None:
    """Hash of the corpus that a run drew from; None where it drew from files by ``--data-path``."""
    data = run.provenance.options.get("data")
    by_path = isinstance(data, dict) and data.get("data_path") is not None
    return None if by_path else run.provenance.inputs.get("corpus")


def corpus_of_sweep(sweep: Sweep) -> str | None:
    """Hash of the corpus whose mixtures were swept; None where the record does not say it."""
    return sweep.provenance.inputs.get("corpus")


def _require_evaluations(folder: RunFolder) -> None:
    for name, result in folder.evaluations.items():
        where = folder.root / EVALUATION / f"{name}.json"
        if folder.corpus is not None and result.corpus_hash != folder.corpus.hash:
            raise UserError(
                f"{where} was evaluated on another corpus than the one in "
                f"{folder.root / CORPUS}; evaluate with --corpus {folder.root / CORPUS}, or move "
                "the file to a run folder of its corpus"
            )
        trained_on = corpus_of_run(folder.base_runs[name]) if name in folder.base_runs else None
        if trained_on is not None and result.corpus_hash != trained_on:
            raise UserError(
                f"{where} was evaluated on another corpus than {folder.root / BASE / name} was "
                "trained on; evaluate with the --corpus of that run, or move the file to a run "
                "folder of its corpus"
            )


def _require_runs(folder: RunFolder) -> None:
    """Those that were not evaluated are in pictures and tables as well."""
    known = _known_corpus(folder)
    for run in folder.base_runs.values():
        if known is not None and corpus_of_run(run) not in (None, known[0]):
            raise UserError(
                f"{run.root} was trained on another corpus than {known[1]}; "
                "move it to a run folder of its corpus"
            )


def _require_sweep(folder: RunFolder) -> None:
    known, sweep = _known_corpus(folder), folder.sweep
    if known is None or sweep is None:
        return
    if corpus_of_sweep(sweep) not in (None, known[0]):
        raise UserError(
            f"{sweep.root / sweep.FILE_NAME} is of another corpus than {known[1]}; "
            "move the sweep to a run folder of its corpus"
        )


def _known_corpus(folder: RunFolder) -> tuple[str, str] | None:
    """Hash of the corpus that all has to be of, and which that is; None where nothing says it."""
    if folder.corpus is not None:
        return folder.corpus.hash, f"the one in {folder.root / CORPUS}"
    for name, result in folder.evaluations.items():
        return result.corpus_hash, f"that of {folder.root / EVALUATION / name}.json"
    return None


def _require_mixtures(folder: RunFolder) -> None:
    """A mixture may leave domains of the corpus out, but has no others."""
    if folder.corpus is None:
        return
    for name, mixture in folder.mixtures.items():
        others = [domain for domain in mixture.weights if domain not in folder.corpus.domains]
        if others:
            more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            raise UserError(
                f"{folder.mixture_file(name)} has weights for domains that the corpus in "
                f"{folder.root / CORPUS} does not have: {', '.join(others[:MOST_NAMED])}{more}; "
                f"compute it with --corpus {folder.root / CORPUS}, or move the file to a run "
                "folder of its corpus"
            )
