"""Every format: a mixture that is written and read again is the same, bit for bit."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_chameleon.artifacts import DomainSource, Mixture, MixtureStage
from megatron_chameleon.errors import UserError
from megatron_chameleon.interchange import FORMATS, FormatName, read_mixture, write_mixture

MEGATRON = [name for name in FORMATS if name.startswith("megatron") or name == "automodel"]
# These formats list only the domains that are sampled.
SAMPLED = [*MEGATRON, "olmo-core", "torchtitan", "litgpt"]
# Some of these would be a boolean, a number or a null in YAML.
NAMES = st.sampled_from(["no", "null", "1e5", "2024", "~", "a:b", "weight", " x ", '"', "-", "é\n"])
NAMES |= st.sampled_from(["a\rb", "\x85"])
NAMES |= st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
# Names of files.
SAFE_NAMES = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_.=-]{0,7}", fullmatch=True)
AMOUNTS = st.just(0.0) | st.floats(1e-300, 1.0) | st.integers(1, 1000).map(float)


def shares(draw, names):
    amounts = draw(st.lists(AMOUNTS, min_size=len(names), max_size=len(names)).filter(any))
    total = math.fsum(amounts)
    return {name: amount / total for name, amount in zip(names, amounts, strict=True)}


@st.composite
def mixtures(draw, names=NAMES):
    """Mixtures with limits on repetition, stages and token files."""
    listed = draw(st.lists(names, min_size=1, max_size=5, unique_by=str.lower))
    steps = sorted(draw(st.sets(st.integers(1, 10**6), max_size=3)))
    caps = draw(st.dictionaries(st.sampled_from(listed), st.floats(0.01, 1e6)))
    tokens = draw(st.integers(1, 2**62))
    return Mixture(
        shares(draw, listed),
        stages=[MixtureStage(step, shares(draw, listed)) for step in steps] or None,
        max_repetition=caps or None,
        token_budget=draw(st.none() | st.integers(1, 2**62)),
        sources={
            name: DomainSource({"train": [f"/data/{name}.bin"]}, {"train": tokens})
            for name in listed
        },
    )


@pytest.mark.parametrize("name", get_args(FormatName))
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_written_and_read_again_is_the_same(name, data, tmp_path):
    chosen = FORMATS[name]
    mixture = data.draw(mixtures(SAFE_NAMES if name in MEGATRON else NAMES))
    if name == "regmix":  # where no name may begin with another
        listed = list(mixture.weights)
        assume(not any(a != b and a.startswith(b) for a in listed for b in listed))
    if name == "olmix" and min((mixture.max_repetition or {"": 1.0}).values()) < 1:
        with pytest.raises(UserError, match="below 1"):
            write_mixture(mixture.at_step(0), name)
        mixture = dataclasses.replace(mixture, max_repetition=None)
    if mixture.stages and not chosen.has_stages:
        with pytest.raises(UserError, match=f"at step {mixture.stages[0].step}"):
            write_mixture(mixture, name)
        mixture = mixture.at_step(mixture.stages[-1].step)
    if mixture.max_repetition and not chosen.has_caps:
        with pytest.raises(UserError, match="--drop-max-repetition"):
            write_mixture(mixture, name)
        mixture = dataclasses.replace(mixture, max_repetition=None)
    if not chosen.has_budget:
        mixture = dataclasses.replace(mixture, token_budget=None)
    with warnings.catch_warnings():
        # The files have only training tokens.
        warnings.filterwarnings("ignore", "no (valid|test) tokens")
        text = write_mixture(mixture, name)
        path = tmp_path / "mixture"
        path.write_bytes(text.encode())
        again = read_mixture(path, name)
        assert write_mixture(again, name) == text

    def kept(weights):
        return {n: w for n, w in weights.items() if w > 0} if name in SAMPLED else weights

    assert again.weights == kept(mixture.weights)
    assert again.stages == mixture.stages
    if name != "csv" or not mixture.stages:  # the budget of stages is unknown
        assert again.token_budget == mixture.token_budget
    caps = {n: c for n, c in (mixture.max_repetition or {}).items() if n in again.weights}
    assert (again.max_repetition or {}) == caps
