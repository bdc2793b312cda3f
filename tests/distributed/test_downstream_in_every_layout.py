"""Answers do not depend on the layout, and ranks share the work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_chameleon.artifacts.downstream_result import DownstreamResult
from tests.distributed.downstream_cases import (
    LAYOUTS,
    RANKS,
    answers_file,
    make_prompts,
    make_questions,
    tool_options,
)
from tests.distributed.launch import finish, start, torchrun
from tests.fixtures.task_data import write_task_data
from tests.text_checkpoint import write_text_checkpoint

SECONDS, TOLERANCE = 300.0, 1e-4


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Everything that the ranks did, done."""
    folder: Path = tmp_path_factory.mktemp("downstream")
    write_text_checkpoint(folder)
    write_task_data(folder / "data", 4)
    log = folder / "log"
    script = Path(__file__).with_name("downstream_ranks.py")
    status = finish(start(torchrun(RANKS, script, str(folder)), log), SECONDS)
    assert status == 0, log.read_text()
    return folder


@pytest.fixture(scope="module")
def alone(root):
    """The same on one rank, in this process: answers, generated tokens, and the tool's result."""
    from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
    from megatron_chameleon.checkpoint.convert import find_tokenizer
    from megatron_chameleon.checkpoint.load import open_reader
    from megatron_chameleon.evaluation.downstream import evaluate_downstream
    from megatron_chameleon.evaluation.scoring import Scorer
    from megatron_chameleon.options.parallel import ParallelOptions
    from megatron_chameleon.parallel.layout import distributed

    options = tool_options(root, "alone")
    with distributed(ParallelOptions(), seed=0) as layout:
        record = CheckpointRecord.load(options.checkpoint)
        tokenizer = find_tokenizer(options.tokenizer, record)
        scorer = Scorer(open_reader(record, layout), 4, tokenizer)
        answers, generated = scorer.score(make_questions()), scorer.generate(make_prompts())
    return answers, generated, evaluate_downstream(options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_likelihoods_are_those_of_one_rank(root, alone, name):
    expected = alone[0]
    with np.load(answers_file(root, name)) as found:
        np.testing.assert_allclose(
            found["log_likelihoods"], expected.log_likelihoods, rtol=0, atol=TOLERANCE
        )
        assert found["is_greedy"].tolist() == expected.is_greedy.tolist()
    assert np.std(expected.log_likelihoods) > 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_generated_tokens_are_those_of_one_rank(root, alone, name):
    expected = alone[1]
    with np.load(answers_file(root, name)) as found:
        assert found["generated"].tolist() == [str(tokens) for tokens in expected.tokens]
        assert found["flops_of_generation"] > 0
    assert len({tuple(tokens) for tokens in expected.tokens}) > 3


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tool_gives_what_it_gives_on_one_rank(root, alone, name):
    result, expected = DownstreamResult.load(tool_options(root, name).output), alone[2]
    assert result.tasks == expected.tasks
    assert result.gaps == []
    assert result.cost.num_devices == RANKS
    assert result.cost.device_seconds == pytest.approx(RANKS * result.cost.wall_seconds)
    # Rows are packed alike; how far they are filled up depends on the batches.
    assert result.cost.flops == pytest.approx(expected.cost.flops, rel=0.2)
