"""Options of evaluate perplexity and downstream. Importing this module loads no torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.errors import UserError
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.ranges import CheckedOptions, Count, LargeCount, Seed

PAPER_TASKS = (
    "arc_easy",
    "copa",
    "hellaswag",
    "lambada_standard",
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
"""The thirteen tasks of the paper's tables, named as in lm-eval.

The paper prints "Lambada". lambada_standard is the variant among RegMix's thirteen tasks, which are
the same; lambada_openai has another preparation of the text.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutOptions(CheckedOptions):
    """Held-out perplexity per domain; by default over packed windows, as in training.

    Raises:
        UserError: for a number out of range, or ``first_token`` without ``packing="documents"``.
    """

    corpus: Path
    """Folder written by preprocess_data."""
    split: Literal["valid", "test"] = "test"
    """The held-out split."""
    packing: Literal["packed", "documents"] = "packed"
    """With packed, documents are concatenated and windows cross document boundaries, as in
    training. With documents, each document is scored separately, a long document in several
    windows."""
    window_length: Count | None = None
    """Maximum tokens predicted per window; default: the model's sequence length."""
    overlap: int = 0
    """Number of tokens of the previous window that each window repeats as context without scoring
    them again. A larger overlap gives the first scored tokens more context, and needs more
    windows."""
    first_token: Literal["after-eod", "not-scored"] | None = None
    """With --packing documents: predict the first token of each document from an end-of-document
    token (after-eod, the default), or do not score it. With --packing packed, only the first token
    of the split has no context, and it is never scored."""
    score_end_of_document: bool = True
    """Also score the predictions of end-of-document tokens."""
    max_tokens: LargeCount | None = None
    """Maximum number of predicted tokens per domain, in windows spread over the split; default:
    all."""
    target: str | None = None
    """What the mixture is for: domains, also held-out ones, with shares, as in a,b or a=2,b=1; or
    text that is not in the corpus, as NAME=PATH or NAME=PATH=SHARE. Its loss is the sum of shares
    times losses. Default: the target that the run of the checkpoint records, if it has domains of
    this corpus only."""
    target_text_key: str = "text"
    """Key, or column, of the text in the files of --target."""
    evaluation_batch_size: Count = 32
    """Number of windows of length --window-length per forward pass and rank; shorter windows are
    batched up to the same number of tokens. The batch size does not change the result."""
    overwrite: bool = False
    """Repeat the evaluation even if --output exists. By default, an existing result of the same
    weights, corpus and protocol is kept, so that an interrupted command resumes."""
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        """Check the values that do not depend on the model, which is not loaded yet."""
        super().__post_init__()
        if self.target is None:
            self.reject_changed(["target_text_key"], "has no effect without --target")
        if self.first_token is not None and self.packing != "documents":
            raise UserError(
                f"--first-token {self.first_token} is for --packing documents; remove it"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityOptions(HeldOutOptions):
    """Options of the perplexity evaluation of one checkpoint."""

    checkpoint: Path
    """A run folder (its latest checkpoint), a checkpoint folder (also of Megatron-LM), or a Hugging
    Face folder or hub name (OWNER/MODEL)."""
    output: Path
    """The JSON file to write."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityToolOptions(HeldOutOptions):
    """Held-out perplexity per domain; by default over packed windows, as in training.

    Several checkpoints are evaluated one after the other in one process.
    """

    checkpoint: Annotated[tuple[tuple[Path, ...], ...], tyro.conf.UseAppendAction] = ()
    """A run folder (its latest checkpoint), a checkpoint folder (also of Megatron-LM), or a Hugging
    Face folder or hub name (OWNER/MODEL). Repeat the flag, or list several."""
    output: Annotated[tuple[tuple[Path, ...], ...], tyro.conf.UseAppendAction] = ()
    """The JSON file to write; one per checkpoint, in the same order."""

    def one_by_one(self) -> list[PerplexityOptions]:
        """Return the options of each checkpoint's evaluation.

        Raises:
            UserError: unless every checkpoint has its own output.
        """
        checkpoints, outputs = sum(self.checkpoint, ()), sum(self.output, ())
        if not checkpoints or len(outputs) != len(checkpoints):
            raise UserError(
                f"{len(checkpoints)} --checkpoint and {len(outputs)} --output: pass checkpoints, "
                "and one output file for each in the same order"
            )
        if len(set(outputs)) < len(outputs):
            raise UserError(f"--output {' '.join(map(str, outputs))}: a file is repeated")
        common = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(HeldOutOptions)
        }
        return [
            PerplexityOptions(checkpoint=checkpoint, output=output, **common)
            for checkpoint, output in zip(checkpoints, outputs, strict=True)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions(CheckedOptions):
    """Downstream tasks whose gold answers are scored in bits per byte, by lm-eval.

    Raises:
        UserError: for a number out of range, no shots, repeated tasks or shots, or options without
            tasks.
    """

    tasks: tuple[str, ...] = ()
    """lm-eval tasks that each proxy is evaluated on after its last step; their bits per byte of
    gold answers become losses. Default: none."""
    shots: tuple[int, ...] = (0,)
    """Numbers of few-shot examples; each task is evaluated once with each number."""
    limit: Count | None = None
    """Evaluate only the first LIMIT questions of each task, as a smoke test; default: all."""
    fewshot_seed: Seed = 1234
    """Random seed for sampling the few-shot examples; default: lm-eval's seed."""
    data_dir: Path | None = None
    """Folder with copies of the tasks' data sets as OWNER/NAME, for machines that cannot reach the
    hub; see docs/downstream.md."""

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        for flag, values in (("--tasks", self.tasks), ("--shots", self.shots)):
            if len(set(values)) < len(values):
                raise UserError(f"{flag} {' '.join(map(str, values))}: a value is repeated")
        if not self.shots:
            raise UserError("--shots is empty; pass at least one")
        if not self.tasks:
            fields = [field.name for field in dataclasses.fields(TaskOptions)]
            self.reject_changed(fields, "has no effect without --tasks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DownstreamOptions(TaskOptions):
    """Accuracy and bits per byte of gold answers on downstream tasks, by lm-eval.

    Each task is evaluated with each number of shots, and its result is the mean over them: the
    normalised accuracy (acc_norm) if the task defines it, otherwise the accuracy (acc). Where a
    task defines both, acc is also stored. The same command resumes an interrupted evaluation; tasks
    and shots can be added to a finished one.

    Raises:
        UserError: for a number out of range, empty or repeated tasks or shots, or an output without
            .json and no ``work_dir``.
    """

    checkpoint: Path
    """A run folder (its latest checkpoint), a checkpoint folder (also of Megatron-LM), or a Hugging
    Face folder or hub name (OWNER/MODEL)."""
    output: Path
    """The JSON file to write."""
    tasks: tuple[str, ...] = PAPER_TASKS
    """lm-eval task names; default: the paper's thirteen tasks."""
    shots: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    """Numbers of few-shot examples; each task is evaluated once with each number."""
    work_dir: Path | None = None
    """Folder for intermediate results, one file per task and number of shots; default: --output
    without .json."""
    evaluation_batch_size: Count = 8
    """Number of sequences of the model's length (at most 4096) per forward pass and rank; shorter
    sequences are batched up to the same number of tokens. The batch size does not change the
    result."""
    evaluation_dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype. bfloat16 is faster on a GPU, and changes a few answers."""
    tokenizer: TokenizerChoice = dataclasses.field(default_factory=TokenizerChoice)
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.tasks:
            raise UserError("--tasks is empty; pass at least one")
        super().__post_init__()
        if self.work_dir is None and self.output.suffix != ".json":
            raise UserError(
                f"--output {self.output}: must end in .json, because intermediate results are "
                "written to the folder of that name without .json; or pass --work-dir"
            )

    @property
    def parts_dir(self) -> Path:
        """Folder for the intermediate results."""
        return self.work_dir or self.output.with_suffix("")
