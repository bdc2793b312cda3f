"""Leaving a run before its last step: by a signal, or because its time is up."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

from megatron_chameleon.options.stopping import StoppingOptions

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
OUT_OF_TIME = "--exit-duration-in-mins"
SIGNAL_NAMES = tuple(number.name for number in SIGNALS)
REASONS = (*SIGNAL_NAMES, OUT_OF_TIME)
"""Why a run may stop, in the order of :meth:`StopRequests.flags`."""
# A terminal's Ctrl-C reaches a rank twice, from the terminal and from torchrun; so does what a
# scheduler sends to all processes of a job. What comes this soon after the first is no second wish.
SECONDS_OF_ONE_WISH = 5.0


class StopRequests:
    """Takes the signals that ask for a stop, while it is entered, and watches the clock.

    The first signal is only noted: the step is finished, and all ranks leave together. A second one
    ends this process at once, as Ctrl-C does elsewhere. The clock runs from the making of it.

    It belongs to the main thread, which alone may take signals.
    """

    def __init__(self, options: StoppingOptions) -> None:
        minutes = options.exit_duration_in_mins
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._signals: dict[str, float] = {}
        self._before: dict[signal.Signals, Any] = {}

    def take_signals(self) -> None:
        """Take them from now on, until it is exited or the process ends."""
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)

    def __enter__(self) -> Self:
        self.take_signals()
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def flags(self) -> list[float]:
        """1.0 for each of REASONS that this rank has, else 0.0."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return [float(reason in self._signals) for reason in REASONS[:-1]] + [float(late)]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        first = min(self._signals.values(), default=now)
        if now - first > SECONDS_OF_ONE_WISH:
            raise KeyboardInterrupt
        self._signals.setdefault(signal.Signals(number).name, now)
