"""Several checkpoints in one start, results that are there from before, and where results go."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from megatron_chameleon.artifacts import EvaluationResult, find_checkpoint
from megatron_chameleon.checkpoint.reader import open_reader
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.perplexity import (
    evaluate_perplexities,
    evaluate_perplexity,
    scored_text,
)
from tests.small_corpus import write_small_corpus
from tests.unit.poison import poison_checkpoint


@pytest.fixture
def two_checkpoints(perplexity_options, finished_run, tmp_path):
    """The evaluation of an earlier checkpoint of the finished run, and that of its last one."""
    earlier = dataclasses.replace(
        perplexity_options,
        checkpoint=finished_run / "checkpoints" / "step-00000003",
        output=tmp_path / "earlier.json",
    )
    return [earlier, perplexity_options]


def test_several_checkpoints_get_what_each_gets_alone(two_checkpoints, capsys):
    found = evaluate_perplexities(two_checkpoints)
    said = capsys.readouterr().out
    assert [result.step for result in found] == [3, 6]
    for options, result in zip(two_checkpoints, found, strict=True):
        assert EvaluationResult.load(options.output) == result
        assert f"written to {options.output}; " in said
        alone = evaluate_perplexity(options)
        assert result.domains == alone.domains
        assert result.provenance.options == alone.provenance.options
        assert result.provenance.inputs == alone.provenance.inputs
        assert result.cost.flops == alone.cost.flops


@pytest.fixture
def calls(monkeypatch):
    """The steps of the checkpoints whose models are opened from here on."""
    opened: list[int] = []

    def open_and_note(record, layout):
        opened.append(record.step)
        return open_reader(record, layout)

    monkeypatch.setattr("megatron_chameleon.evaluation.perplexity.open_reader", open_and_note)
    return opened


def test_an_interrupted_command_goes_on_with_what_is_missing(two_checkpoints, calls, capsys):
    going_on = [dataclasses.replace(options, overwrite=False) for options in two_checkpoints]
    first = evaluate_perplexity(going_on[0])
    again = evaluate_perplexities(going_on)
    assert calls == [3, 6]
    assert again[0] == first
    assert f"{going_on[0].output} was there already; --overwrite" in capsys.readouterr().out
    evaluate_perplexities(two_checkpoints)
    assert calls == [3, 6, 3, 6]


@pytest.mark.parametrize(
    "changes",
    [{"split": "valid"}, {"max_tokens": 64}, {"checkpoint": "earlier"}, {"corpus": "other"}],
)
def test_a_result_of_something_else_is_replaced(evaluate, finished_run, tmp_path, calls, changes):
    evaluate()
    places = {
        "earlier": finished_run / "checkpoints" / "step-00000003",
        "other": write_small_corpus(tmp_path / "other", seed=1).root,
    }
    changes = {key: places.get(value, value) for key, value in changes.items()}
    found = evaluate(overwrite=False, **changes)
    assert len(calls) == 2
    assert EvaluationResult.load(tmp_path / "result.json") == found


def test_a_damaged_result_is_replaced(evaluate, tmp_path):
    (tmp_path / "result.json").write_text('{"kind": "evaluation", "format_version": 1}')
    found = evaluate(overwrite=False)
    assert EvaluationResult.load(tmp_path / "result.json") == found


def test_checkpoints_of_one_corpus_share_what_is_known_of_its_text(two_checkpoints, monkeypatch):
    read: list[str] = []

    def note(corpus, name, *more):
        read.append(name)
        return scored_text(corpus, name, *more)

    monkeypatch.setattr("megatron_chameleon.evaluation.perplexity.scored_text", note)
    evaluate_perplexities(two_checkpoints)
    assert read == ["news", "code", "poems"]


def test_what_was_evaluated_before_a_model_that_has_diverged_is_kept(
    two_checkpoints, trained_run, tmp_path
):
    broken = find_checkpoint(trained_run)
    poison_checkpoint(broken, "decoder.layers.1.mlp.linear_fc2.bias")
    first, last = two_checkpoints
    with pytest.raises(UserError, match=rf"{re.escape(str(broken))}: the loss on domain 'news' is"):
        evaluate_perplexities([first, dataclasses.replace(last, checkpoint=trained_run)])
    assert EvaluationResult.load(first.output).step == 3
    assert not last.output.exists()


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("folder", "folder is a folder; give the name of a file"),
        ("mixture.json", r"mixture\.json .*'mixture'"),
        ("mixture.json/result.json", r"mixture\.json cannot be written to; choose another folder"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_first_is_evaluated(
    two_checkpoints, tmp_path, calls, output, problem
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "mixture.json").write_text(json.dumps({"kind": "mixture"}))
    first, last = two_checkpoints
    with pytest.raises(UserError, match=problem):
        evaluate_perplexities([first, dataclasses.replace(last, output=tmp_path / output)])
    assert calls == []
    assert json.loads((tmp_path / "mixture.json").read_text()) == {"kind": "mixture"}
