"""What torchrun starts on four ranks: downstream tasks in every layout, one after the other."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.convert import find_tokenizer
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.evaluation.downstream import evaluate_downstream
from megatron_chameleon.evaluation.scoring import Scorer
from megatron_chameleon.parallel.layout import distributed
from tests.distributed.downstream_cases import (
    LAYOUTS,
    SEQUENCES_AT_ONCE,
    answers_file,
    make_prompts,
    make_questions,
    tool_options,
)


def answer(root: Path, name: str) -> None:
    """Ask on the first rank, while the others serve; what it is told goes to a file."""
    options = tool_options(root, name)
    with distributed(LAYOUTS[name], seed=0) as layout:
        record = CheckpointRecord.load(options.checkpoint)
        tokenizer = find_tokenizer(options.tokenizer, record)
        scorer = Scorer(open_reader(record, layout), SEQUENCES_AT_ONCE, tokenizer)
        if not layout.is_main:
            scorer.serve()
            return
        answers = scorer.score(make_questions())
        generated = scorer.generate(make_prompts())
        scorer.stop()
        np.savez(
            answers_file(root, name),
            log_likelihoods=answers.log_likelihoods,
            is_greedy=answers.is_greedy,
            flops=answers.flops,
            generated=np.array([str(tokens) for tokens in generated.tokens]),
            flops_of_generation=generated.flops,
        )


if __name__ == "__main__":
    for layout_name in LAYOUTS:
        answer(Path(sys.argv[1]), layout_name)
        evaluate_downstream(tool_options(Path(sys.argv[1]), layout_name))
