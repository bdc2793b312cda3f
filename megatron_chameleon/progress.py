"""Progress bars: lively on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys

from tqdm import tqdm

from megatron_chameleon.console import escaped

SECONDS_BETWEEN_LOG_LINES = 10.0


def progress_bar(
    total: int, unit: str, description: str = "", *, quiet: bool = False, delay: float = 0.0
) -> tqdm:
    """A bar on stderr with the time left; ``quiet`` shows none (ranks other than the first).

    What is over within ``delay`` seconds shows none either.
    """
    return _Bar(
        total=total,
        unit=unit,
        unit_scale=True,
        desc=description,
        disable=quiet,
        delay=delay,
        mininterval=0.2 if sys.stderr.isatty() else SECONDS_BETWEEN_LOG_LINES,
    )


class _Bar(tqdm):
    """A bar whose description may hold the names of domains."""

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        super().set_description(desc and escaped(desc), refresh)
