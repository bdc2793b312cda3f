"""Which questions are asked in which layouts, and where the answers lie. No torch here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_chameleon.evaluation.options import DownstreamOptions
from megatron_chameleon.evaluation.scoring import Prompt, Question
from megatron_chameleon.options.parallel import ParallelOptions

RANKS, SEQUENCES_AT_ONCE = 4, 1
LAYOUTS = {
    "dp4": ParallelOptions(),
    "tp2-dp2": ParallelOptions(tensor_model_parallel_size=2),
    "pp2-dp2": ParallelOptions(pipeline_model_parallel_size=2),
    "tp2-sp-pp2": ParallelOptions(2, 2, sequence_parallel=True),
}


def make_questions() -> list[Question]:
    """Three choices after each context; contexts of all lengths, some alike at their beginnings."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> np.ndarray:
        return rng.integers(0, 400, length).astype(np.int32)

    beginning, questions = draw(90), []
    for length in (1, 2, 13, 60, 150, 251, 300):
        for context in (draw(length), np.concatenate([beginning, draw(length)])):
            questions += [Question(context, draw(each)) for each in (1, 1, 5)]
    return questions


def make_prompts() -> list[Prompt]:
    """More than there are data-parallel ranks, and of several lengths."""
    rng = np.random.default_rng(1)
    lengths = (1, 3, 40, 41, 200, 300)
    return [Prompt(rng.integers(0, 400, n).astype(np.int32), 4 + n % 3, ()) for n in lengths]


def tool_options(root: Path, name: str) -> DownstreamOptions:
    """tools/evaluate.py downstream, in a layout."""
    return DownstreamOptions(
        checkpoint=root / "checkpoint",
        output=root / f"{name}.json",
        tasks=("copa", "race"),
        shots=(0, 1),
        data_dir=root / "data",
        evaluation_batch_size=SEQUENCES_AT_ONCE,
        parallel=LAYOUTS.get(name, ParallelOptions()),
    )


def answers_file(root: Path, name: str) -> Path:
    """Where the answers of a layout lie."""
    return root / f"{name}.npz"
