"""What a checkpoint says of the tokenizer of its model: where it lay, and how it was opened."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord

DEFAULT_EOD_TOKEN = "<|endoftext|>"


@dataclasses.dataclass(frozen=True)
class RecordedTokenizer:
    """By the options that the checkpoint was made with.

    Attributes:
        place: the tokenizer, a folder that has one, or the corpus that the model was trained on.
        eod_token: what ends documents; None if the corpus alone says it.
        tiktoken_pattern: how a tiktoken file splits text, if that was given.
    """

    place: Path | None = None
    eod_token: str | None = None
    tiktoken_pattern: str | None = None

    @classmethod
    def of(cls, record: CheckpointRecord) -> RecordedTokenizer:
        """What ``record`` says: it is of a run with --corpus or --data-path, or of a conversion."""
        options: dict[str, Any] = record.provenance.options
        if options.get("corpus"):
            return cls(_now(options["corpus"], record))
        given: dict[str, Any] = options.get("data") or options
        place = given.get("tokenizer_model") or options.get("model")
        return cls(
            _now(place, record) if place else None,
            given.get("eod_token"),
            given.get("tiktoken_pattern"),
        )


def _now(place: str, record: CheckpointRecord) -> Path:
    """The path from where the command was run then; from here, where that leads nowhere."""
    then = Path(record.provenance.working_folder or ".") / place
    return Path(place) if Path(place).exists() and not then.exists() else then
