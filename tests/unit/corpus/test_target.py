"""Parsing of --target."""

from __future__ import annotations

import fsspec
import pytest

from megatron_chameleon.corpus.options import SourceOptions
from megatron_chameleon.corpus.target import parse_target
from megatron_chameleon.errors import UserError

NAMES = ["a", "b", "x=1"]
SOURCE = SourceOptions(())


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "words"}\n')
    return path


@pytest.mark.parametrize(
    ("value", "shares"),
    [
        ("a", {"a": 1}),
        ("a,b", {"a": 0.5, "b": 0.5}),
        ("a=3, b=1", {"a": 0.75, "b": 0.25}),
        ("x=1", {"x=1": 1}),
        ("x=1=3,a", {"x=1": 0.75, "a": 0.25}),
        ("mine={path}", {"mine": 1}),
        ("mine={path}=3,a", {"mine": 0.75, "a": 0.25}),
    ],
)
def test_values_give_shares(text, value, shares):
    target = parse_target(value.format(path=text), NAMES, SOURCE)
    assert dict(target.shares) == shares
    assert set(target.texts) == set(shares) - set(NAMES)
    for sources in target.texts.values():
        assert [source.path for source in sources] == [str(text)]


def test_the_value_of_a_parameter_of_a_url_is_no_share():
    fsspec.filesystem("memory").pipe("/text?page=2/a.jsonl", b'{"text": "words"}\n')
    for value, share in (("mine=memory://text?page=2", 0.5), ("mine=memory://text?page=2=3", 0.75)):
        target = parse_target(f"{value},a", NAMES, SOURCE)
        assert target.shares["mine"] == share
        assert [source.path for source in target.texts["mine"]] == ["memory:///text?page=2/a.jsonl"]
    fsspec.filesystem("memory").pipe("/part-1.jsonl", b'{"text": "words"}\n')
    assert parse_target("mine=memory://part-?.jsonl=3,a", NAMES, SOURCE).shares["mine"] == 0.75


@pytest.mark.parametrize(
    "value", ["", "c", "a=0", "a=nan", "a=-1", "a,a", "a={path}", "mine=missing.jsonl"]
)
def test_invalid_values_are_errors(text, value):
    with pytest.raises(UserError):
        parse_target(value.format(path=text), NAMES, SOURCE)
