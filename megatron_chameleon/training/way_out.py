"""What helps where a run's folder holds something else, in the words of the command that trains."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class WayOut:
    """Ends of sentences that tell a person what to do; by default by tools/pretrain_gpt.py's flags.

    Attributes:
        elsewhere: how to train in another folder.
        anew: how to do without what the folder holds.
        draws_by_flags: whether the command has flags that say what domains are drawn.
    """

    elsewhere: str = "choose another --run-dir"
    anew: str = "give --overwrite to start anew"
    draws_by_flags: bool = True

    def __str__(self) -> str:
        return f"{self.elsewhere}, or {self.anew}"


BY_FLAGS = WayOut()
