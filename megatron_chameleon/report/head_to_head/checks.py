"""Checks of a head-to-head that examples/compare_methods.sh asks for before there is a table."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from megatron_chameleon.artifacts import EvaluationResult, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.head_to_head.compare import Selection
from megatron_chameleon.report.head_to_head.runs import require_of_last_checkpoint
from megatron_chameleon.report.run_folder import BASE, EVALUATION, MIXTURE

# Of these methods there are mixtures by proxies of fewer steps, with the same name and this suffix.
SHORTER_PROXIES, SHORTER_SUFFIX = ("doremi", "doge"), "-2k"


def require_choice(run: Path, selection: Selection, methods: Collection[str]) -> None:
    """What ``selection`` names can be compared once it has been made.

    Args:
        run: the run folder, there or not.
        selection: the mixtures and seeds.
        methods: names of the methods there are.

    Raises:
        UserError: if it cannot; for a mixture that is there no method is needed.
    """
    selection.check()
    known = {*methods, *(f"{name}{SHORTER_SUFFIX}" for name in SHORTER_PROXIES)}
    for name in selection.names:
        path = run / MIXTURE / f"{name}.json"
        if name not in known and not path.is_file():
            raise UserError(
                f"--mixtures {name}: no method has that name, and there is no {path}; "
                f"choose from {', '.join(sorted(known))}"
            )


def require_evaluations(run: Path, selection: Selection) -> None:
    """The base runs of ``selection`` have been evaluated, each at its last checkpoint.

    Raises:
        UserError: naming the first evaluation that is missing, or of other weights.
    """
    for name in selection.names:
        for base in selection.run_names(name):
            path = run / EVALUATION / f"{base}.json"
            result = EvaluationResult.load(path)
            require_of_last_checkpoint(path, result, TrainingRun.load(run / BASE / base))
