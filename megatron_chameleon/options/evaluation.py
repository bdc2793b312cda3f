"""Options of tools/evaluate.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_chameleon.errors import UserError
from megatron_chameleon.options.parallel import ParallelOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutOptions:
    """Held-out perplexity per domain, over packed windows as in training."""

    corpus: Path
    """Folder written by tools/preprocess_data.py."""
    split: Literal["valid", "test"] = "test"
    """The held-out split."""
    window_length: int | None = None
    """Tokens predicted from one window; the model's sequence length unless given."""
    max_tokens: int | None = None
    """Predicted tokens per domain, at most, in windows spread over the split; all unless given."""
    evaluation_batch_size: int = 32
    """Windows per forward pass and rank; does not change the result."""
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
    """Held-out perplexity per domain, over packed windows as in training.

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
