"""Which checkpoints are evaluated into which files, as the command line of the tool says."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.cli import parse_options
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.options import PerplexityOptions, PerplexityToolOptions


def given(line: str) -> list[PerplexityOptions]:
    return parse_options(PerplexityToolOptions, ["--corpus", "c", *line.split()]).one_by_one()


def test_one_checkpoint_is_written_to_one_file():
    (found,) = given("--checkpoint run --output r.json --split valid --max-tokens 7")
    expected = PerplexityOptions(
        corpus=Path("c"),
        checkpoint=Path("run"),
        output=Path("r.json"),
        split="valid",
        max_tokens=7,
    )
    assert found == expected


@pytest.mark.parametrize(
    "line",
    [
        "--checkpoint a --output a.json --checkpoint b --output b.json",
        "--checkpoint a b --output a.json b.json",
        "--output a.json --checkpoint a b --output b.json",
    ],
)
def test_several_checkpoints_have_a_file_each_in_their_order(line):
    found = given(f"{line} --evaluation-batch-size 3 --tensor-model-parallel-size 2")
    assert [(str(o.checkpoint), str(o.output)) for o in found] == [("a", "a.json"), ("b", "b.json")]
    assert {o.evaluation_batch_size for o in found} == {3}
    assert {o.parallel.tensor_model_parallel_size for o in found} == {2}


def test_the_protocol_is_the_same_for_all_checkpoints():
    found = given(
        "--checkpoint a b --output a.json b.json --packing documents --overlap 16 "
        "--first-token not-scored --no-score-end-of-document --window-length 64"
    )
    assert {(o.packing, o.overlap, o.first_token, o.window_length) for o in found} == {
        ("documents", 16, "not-scored", 64)
    }
    assert not any(o.score_end_of_document for o in found)


def test_packed_windows_as_in_training_are_the_default():
    (found,) = given("--checkpoint a --output a.json")
    assert (found.packing, found.overlap, found.score_end_of_document) == ("packed", 0, True)
    assert found.first_token is None
    assert found.max_tokens is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--output a.json", "--checkpoint is missing: pass a run folder"),
        ("--checkpoint a", "1 --checkpoint but 0 --output: pass one output file"),
        ("--checkpoint a b --output a.json", "2 --checkpoint but 1 --output"),
        ("--checkpoint a --output a.json b.json", "1 --checkpoint but 2 --output"),
        ("--checkpoint a b --output x.json x.json", r"--output x\.json is given twice"),
    ],
)
def test_a_mistake_is_told(line, problem):
    with pytest.raises(UserError, match=problem):
        given(line)
