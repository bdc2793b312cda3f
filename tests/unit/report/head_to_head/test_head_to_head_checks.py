"""What examples/compare_methods.sh asks for before there is a table to refuse."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.head_to_head import Selection, require_choice, require_evaluations
from tests.unit.report.head_to_head.samples import SEEDS, write_head_to_head

METHODS = ("uniform", "doremi", "regmix")
SELECTION = Selection(names=("uniform", "doremi"), seeds=SEEDS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seeds": (1, 2)}, "--seeds 1 2: "),
        ({"names": ("uniform",)}, "--mixtures uniform: "),
        ({"names": ("regmix", "doremi")}, "--baseline uniform is not among --mixtures"),
        ({"reference": "chamelon"}, "--reference chamelon is not among --mixtures"),
        ({"names": ("uniform", "mine")}, r"--mixtures mine: unknown method, and there is"),
        ({"names": ("uniform", "regmix-2k")}, "--mixtures regmix-2k: unknown method"),
    ],
)
def test_a_choice_that_no_table_would_take_is_refused(tmp_path, changes, told):
    with pytest.raises(UserError, match=told):
        require_choice(tmp_path / "run", dataclasses.replace(SELECTION, **changes), METHODS)


def test_a_choice_needs_nothing_that_is_made_later(tmp_path):
    run = tmp_path / "run"
    names = (*METHODS, "doremi-2k")
    require_choice(run, dataclasses.replace(SELECTION, names=names), METHODS)
    (run / "4-mixture").mkdir(parents=True)
    Mixture(weights={"code": 1.0}).save(run / "4-mixture/mine.json")
    require_choice(run, dataclasses.replace(SELECTION, names=("uniform", "mine")), METHODS)


def one(name: str) -> Selection:
    return Selection(names=(name,), seeds=SEEDS)


def test_evaluations_are_there_and_of_the_last_weights(tmp_path):
    root: Path = write_head_to_head(tmp_path / "run")
    for name in ("uniform", "doremi"):
        require_evaluations(root, one(name))
    shutil.copy(root / "6-evaluation/uniform-seed2.json", root / "6-evaluation/doremi-seed2.json")
    with pytest.raises(UserError, match=r"doremi-seed2\.json is of other weights than"):
        require_evaluations(root, one("doremi"))
    require_evaluations(root, one("uniform"))
    (root / "6-evaluation/uniform-seed3.json").unlink()
    with pytest.raises(UserError, match=r"uniform-seed3\.json"):
        require_evaluations(root, one("uniform"))
