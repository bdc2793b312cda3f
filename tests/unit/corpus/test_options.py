from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.corpus.options import DomainOptions, PreprocessOptions, SourceOptions
from megatron_chameleon.errors import UserError


def options(**changes):
    return PreprocessOptions(
        SourceOptions((("a.jsonl",),)), Path("corpus"), Path("tokenizer.json"), **changes
    )


def test_shares_of_splits_are_proportions():
    assert options(split="969,30,1").split_shares == (0.969, 0.03, 0.001)
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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rename_domain": (("a=b",),)}, "--rename-domain a=b has no effect"),
        ({"domain_key": "set", "domain_from_path": "(a)"}, "--domain-key and --domain-from-path"),
        ({"domain_from_path": "("}, "not a regular expression"),
        ({"domain_from_path": "(a)(b)"}, "has 2 groups"),
        ({"domain_key": "set", "rename_domain": (("=b",),)}, "OLD=NEW"),
        ({"domain_key": "set", "rename_domain": (("a=b", "a="),)}, "'a' is also renamed to 'b'"),
    ],
)
def test_domain_options_that_contradict_each_other_are_rejected(changes, problem):
    with pytest.raises(UserError, match=problem):
        DomainOptions(**changes)
