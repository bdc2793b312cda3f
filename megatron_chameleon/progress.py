"""Progress bars: refreshed on a terminal, a line every few seconds in a log file."""

from __future__ import annotations

import sys

from tqdm import tqdm

from megatron_chameleon.console import escaped

SECONDS_BETWEEN_LOG_LINES = 10.0
# Delay of the bar of work that usually takes less time than this.
SECONDS_WITHOUT_BAR = 2.0


def progress_bar(
    total: int | None, unit: str, description: str = "", *, quiet: bool = False, delay: float = 0.0
) -> tqdm:
    """Return a progress bar on stderr that shows the remaining time.

    Args:
        total: number of ``unit`` to process; None if unknown.
        unit: name of the unit, printed after numbers.
        description: text before the bar.
        quiet: show no bar, as on ranks other than 0.
        delay: seconds before the bar appears.
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
    """A progress bar that escapes its description, which may hold names of domains."""

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        super().set_description(desc and escaped(desc), refresh)
