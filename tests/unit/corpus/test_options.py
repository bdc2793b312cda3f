from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.corpus.options import (
    DomainOptions,
    PreprocessOptions,
    SourceOptions,
)
from megatron_chameleon.errors import UserError

SOURCE = SourceOptions((("a.jsonl",),))


def options(**changes):
    return PreprocessOptions(SOURCE, Path("corpus"), Path("tokenizer.json"), **changes)


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ("90,5,5", (0.9, 0.05, 0.05)),
        ("969,30,1", (0.969, 0.03, 0.001)),
        (" 1, 1 ,2", (0.25, 0.25, 0.5)),
    ],
)
def test_shares_of_splits_are_proportions(given, shares):
    assert options(split=given).split_shares == shares


@pytest.mark.parametrize(
    "changes",
    [
        *({"split": given} for given in ("", "90", "90,10", "1,2,3,4", "a,b,c", "90;5;5")),
        *({"split": given} for given in ("100,0,0", "0,50,50", "90,-5,15", "nan,1,1", "inf,1,1")),
        *({"shard": given} for given in ("", "3", "0/3", "4/3", "1/0", "-1/3", "1/3/5", "1 /3")),
        {"workers": 0},
        {"shard_bytes": 0},
        {"min_tokens_per_split": -1},
    ],
)
def test_values_out_of_range_are_rejected(changes):
    (name,) = changes
    with pytest.raises(UserError, match=f"--{name.replace('_', '-')}"):
        options(**changes)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rename_domain": ["a=b"]}, "--rename-domain a=b has no effect"),
        ({"domain_key": "set", "domain_from_path": "(a)"}, "--domain-key and --domain-from-path"),
        ({"domain_from_path": "("}, "not a regular expression"),
        ({"domain_from_path": "a"}, "has 0 groups"),
        ({"domain_from_path": "(a)(b)"}, "has 2 groups"),
        ({"domain_key": "set", "rename_domain": ["a"]}, "OLD=NEW"),
        ({"domain_key": "set", "rename_domain": ["=b"]}, "OLD=NEW"),
        ({"domain_key": "set", "rename_domain": ["a=" + "b" * 81]}, "at most 80"),
        ({"domain_key": "set", "rename_domain": ["a=b", "a="]}, "'a' is also renamed to 'b'"),
    ],
)
def test_domain_options_that_contradict_each_other_are_rejected(changes, problem):
    if "rename_domain" in changes:
        changes = {**changes, "rename_domain": (tuple(changes["rename_domain"]),)}
    with pytest.raises(UserError, match=problem):
        DomainOptions(**changes)
