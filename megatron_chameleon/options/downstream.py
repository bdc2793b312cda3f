"""Options of tools/evaluate.py downstream."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.ranges import Count, Seed
from megatron_chameleon.options.tokenizer import TokenizerChoice

PAPER_TASKS = (
    "arc_easy",
    "copa",
    "hellaswag",
    "lambada_openai",
    "logiqa",
    "multirc",
    "openbookqa",
    "piqa",
    "qqp",
    "race",
    "sciq",
    "social_iqa",
    "winogrande",
)
"""The thirteen tasks of the paper's tables, by lm-eval's names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownstreamOptions:
    """Accuracy on downstream tasks, by lm-eval.

    Each task is asked with each number of shots, and its figure is the mean over them: normalised
    accuracy where the task gives it, else accuracy. The same command again goes on where it was
    stopped, and can be given more tasks and shots.
    """

    checkpoint: Path
    """A run folder (its latest checkpoint) or one checkpoint folder."""
    output: Path
    """The JSON file to write."""
    tasks: tuple[str, ...] = PAPER_TASKS
    """lm-eval's names of tasks; the paper's thirteen unless given."""
    shots: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """How many solved examples stand before each question; one evaluation for each number."""
    limit: Count | None = None
    """Questions of each task, at most, from its beginning; all unless given. For trying things
    out."""
    fewshot_seed: Seed = 1234
    """Of the draw of the shots; lm-eval's own unless given."""
    data_dir: Path | None = None
    """Folder with copies of the tasks' data sets as OWNER/NAME, for machines without a hub; see
    docs/downstream.md."""
    work_dir: Path | None = None
    """Where finished parts are kept, a file for each task and number of shots; --output without
    .json unless given."""
    evaluation_batch_size: Count = 8
    """Sequences of the model's length per forward pass and rank; of shorter ones as many as have
    so many tokens. Does not change the result."""
    evaluation_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in. bfloat16 is faster on a GPU, and changes a few answers."""
    tokenizer: TokenizerChoice = dataclasses.field(default_factory=TokenizerChoice)
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)
