"""Every record with every field dropped, retyped, deepened or out of range."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_chameleon.artifacts import MixtureWarning
from megatron_chameleon.artifacts.record import write_record
from megatron_chameleon.errors import UserError
from tests.unit.artifacts.artifact_samples import Sample, write_samples

# What Python's own writer of JSON would not write is put in as text, in place of a string.
RAW = {
    "<deep>": "[" * 100_000 + "]" * 100_000,
    "<nested>": "[" * 100 + "]" * 100,
    "<digits>": "9" * 5000,
    "<huge>": "1e999",
    "<nan>": "NaN",
    "<surrogate>": '"\\ud800"',
    "<twice>": '{"a": 1, "a": 2}',
}
VALUES: list[Any] = [
    *RAW,
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        1.5,
        -0.5,
        2.0,
        10**30,
        "",
        "12",
        "../x",
        "/x",
        "a\0b",
        "x" * 300,
    ),
    *([], {}, [1], [[1.0]], {"a": 1}, {"../x": {}}, {"a": {"a": "b"}}),
]
EVERY = 11
"""Of all mutations, the share that runs: one in so many, the same ones each time."""


def places(body: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where each value of ``body`` is."""
    items = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in items:
        yield (*place, key)
        if isinstance(value, dict | list):
            yield from places(value, (*place, key))


def mutations(text: str) -> Iterator[tuple[str, str]]:
    """What was changed, and the file's text then."""
    for place in list(places(json.loads(text))):
        for change in ("<drop>", "<retype>", "<wrap>", *VALUES):
            body = json.loads(text)
            holder = body
            for key in place[:-1]:
                holder = holder[key]
            value = holder.pop(place[-1])
            if change != "<drop>":
                new = {"<retype>": str(value), "<wrap>": [value]}.get(str(change), change)
                if isinstance(holder, list):
                    holder.insert(int(place[-1]), new)
                else:
                    holder[place[-1]] = new
            changed = json.dumps(body)
            for placeholder, raw in RAW.items():
                changed = changed.replace(json.dumps(placeholder), raw)
            yield f"{place} {str(change)[:20]!r}", changed


def agrees(said: Any, meant: Any) -> bool:
    """Whether a file that says ``said`` may be read as ``meant``: no value is converted."""
    if isinstance(said, dict) and isinstance(meant, dict):
        return all(agrees(said[key], meant[key]) for key in said.keys() & meant.keys())
    if isinstance(said, list) and isinstance(meant, list):
        return len(said) == len(meant) and all(map(agrees, said, meant))
    if isinstance(said, bool) or isinstance(meant, bool):
        return said is meant
    if isinstance(said, int) and isinstance(meant, float):
        return float(said) == meant
    return bool(said == meant)


def load_or_message(sample: Sample) -> Any:
    """The record, or the message by which it is refused."""
    try:
        return sample.load()
    except UserError as error:
        return str(error)


def check_mutation(sample: Sample, what: str, text: str, scratch: Path) -> bool:
    """Whether the mutated file is accepted."""
    sample.file.write_text(text, encoding="utf-8")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        read = load_or_message(sample)
    if isinstance(read, str):
        assert "\n" not in read, what
        return False
    scratch.unlink(missing_ok=True)
    write_record(scratch, read, kind=sample.kind, version=1)
    said, meant = json.loads(text), json.loads(scratch.read_text(encoding="utf-8"))
    ignored = ["kind", "format_version", "root"]
    ignored += ["weights" for warning in warned if warning.category is MixtureWarning]
    for name in ignored:
        said.pop(name, None)
    assert agrees(said, meant), what
    return True


KINDS = (
    *("corpus", "training run", "checkpoint", "embedding store", "mixture", "evaluation", "sweep"),
    *("swarm", "swarm-member", "discovered domains"),
    *("downstream evaluation", "downstream evaluation's part"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_record_is_read_as_it_says_or_refused(tmp_path, kind):
    samples = write_samples(tmp_path)
    assert set(samples) == set(KINDS)
    sample, scratch = samples[kind], tmp_path / "scratch.json"
    assert sample.load() == sample.written
    body = json.loads(sample.file.read_text(encoding="utf-8"))
    body.pop("checksum", None)  # or every mutation would be found by it
    text = json.dumps(body)
    all_mutations = list(mutations(text))[::EVERY]
    accepted = sum(check_mutation(sample, *mutation, scratch) for mutation in all_mutations)
    assert 0 < accepted < len(all_mutations)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_without_a_point_is_read_as_a_float(tmp_path, kind):
    sample = write_samples(tmp_path)[kind]
    body = json.loads(sample.file.read_text(encoding="utf-8"), parse_float=lambda _: 0)
    body.pop("checksum", None)
    if kind == "mixture":
        body["weights"] = dict.fromkeys(body["weights"], 0) | {next(iter(body["weights"])): 1}
    sample.file.write_text(json.dumps(body), encoding="utf-8")
    loaded = sample.load()
    cost = getattr(loaded, "cost", None)
    assert cost is None or dataclasses.astuple(cost)[:3] == (0.0, 0.0, 0.0)
