from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.errors import UserError


def options(**changes):
    return PreprocessOptions(
        SourceOptions((("a.jsonl",),)), Path("corpus"), Path("tokenizer.json"), **changes
    )


def test_shares_of_splits_are_proportions():
    assert options(split=" 1, 1 ,2").split_shares == (0.25, 0.25, 0.5)


@pytest.mark.parametrize(
    "changes",
    [
        *({"split": given} for given in ("", "90,10", "1,2,3,4", "a,b,c", "100,0,0", "nan,1,1")),
        *({"shard": given} for given in ("", "3", "0/3", "4/3", "-1/3", "1/3/5")),
        {"workers": 0},
    ],
)
def test_values_out_of_range_are_rejected(changes):
    (name,) = changes
    with pytest.raises(UserError, match=f"--{name}"):
        options(**changes)
