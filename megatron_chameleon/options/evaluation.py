"""Options of tools/evaluate.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.ranges import Count, LargeCount


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """Held-out perplexity per domain, over packed windows as in training unless asked otherwise."""

    corpus: Path
    """Folder written by tools/preprocess_data.py."""
    split: Literal["valid", "test"] = "test"
    """The held-out split."""
    packing: Literal["packed", "documents"] = "packed"
    """packed: documents one after another, in windows that run over their ends, as in training.
    documents: every document by itself, a long one in several windows."""
    window_length: Count | None = None
    """Tokens predicted from one window, at most; the model's sequence length unless given."""
    overlap: int = 0
    """Tokens that a window takes over from the one before as context and does not score again:
    more context for the tokens at its beginning, and more windows."""
    first_token: Literal["after-eod", "not-scored"] | None = None
    """Of each document with --packing documents: predicted from an end-of-document token, which is
    the default there, or not scored. Packed, no token stands before the first of the split, which
    is not scored."""
    score_end_of_document: bool = True
    """Count the prediction of end-of-document tokens too."""
    max_tokens: LargeCount | None = None
    """Predicted tokens per domain, at most, in windows spread over the split; all unless given."""
    evaluation_batch_size: Count = 32
    """Windows per forward pass and rank, more where they are shorter than --window-length; does not
    change the result."""
    overwrite: bool = False
    """Evaluate again what has its result in --output already; unless given, a result of the same
    weights, corpus and protocol is kept, so that a command that was interrupted goes on."""
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityOptions(HeldOutOptions):
    """The evaluation of one checkpoint."""

    checkpoint: Path
    """A run folder (its latest checkpoint) or one checkpoint folder."""
    output: Path
    """The JSON file to write."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexityToolOptions(HeldOutOptions):
    """Held-out perplexity per domain, over packed windows as in training unless asked otherwise.

    Several checkpoints are evaluated one after the other, in one start.
    """

    checkpoint: Annotated[tuple[tuple[Path, ...], ...], tyro.conf.UseAppendAction] = ()
    """A run folder (its latest checkpoint) or one checkpoint folder. May be given several times,
    or be several."""
    output: Annotated[tuple[tuple[Path, ...], ...], tyro.conf.UseAppendAction] = ()
    """The JSON file to write; one for each checkpoint, in their order."""

    def one_by_one(self) -> list[PerplexityOptions]:
        """The evaluation of each checkpoint.

        Raises:
            UserError: unless each of them has an output of its own.
        """
        checkpoints = [path for group in self.checkpoint for path in group]
        outputs = [path for group in self.output for path in group]
        if not checkpoints:
            raise UserError("--checkpoint is missing: give a run folder, or a checkpoint folder")
        if len(outputs) != len(checkpoints):
            raise UserError(
                f"{len(checkpoints)} --checkpoint but {len(outputs)} --output: "
                "give the file to write for each checkpoint, in the same order"
            )
        twice = next((path for path in outputs if outputs.count(path) > 1), None)
        if twice is not None:
            raise UserError(f"--output {twice} is given twice; give each checkpoint its own file")
        common = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(HeldOutOptions)
        }
        return [
            PerplexityOptions(checkpoint=checkpoint, output=output, **common)
            for checkpoint, output in zip(checkpoints, outputs, strict=True)
        ]
