"""Which text is read, for every tool that reads text."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """Which text is read: JSON lines, one document a line."""

    input: Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]
    """Files, folders or quoted globs of .jsonl, .jsonl.gz or .jsonl.zst. NAME=PATH makes all
    documents of PATH the domain NAME; a domain may be named several times."""
    text_key: str = "text"
    """Key of the text in each line; dots reach into nested objects."""
    max_malformed_share: float = 0.001
    """Malformed lines are left out and reported; a larger share of all lines ends the run."""

    @property
    def inputs(self) -> list[str]:
        """What ``--input`` was given, over all its uses."""
        return [path for group in self.input for path in group]
