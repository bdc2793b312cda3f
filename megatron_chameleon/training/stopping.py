"""Stop a run before its last step: on a signal, or at a time limit."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

from megatron_chameleon.study.executor import STOP_SIGNALS, handle_stop_signals
from megatron_chameleon.training.options import StoppingOptions

OUT_OF_TIME = "--exit-duration-in-mins"
SIGNAL_NAMES = tuple(number.name for number in STOP_SIGNALS)
REASONS = (*SIGNAL_NAMES, OUT_OF_TIME)
"""Why a run may stop, in the order of :meth:`StopRequests.flags`."""
# Ctrl-C reaches a rank twice, from the terminal and from torchrun, and so does a signal that a
# scheduler sends to all processes of a job. All signals within this time after the first signal
# therefore count as one request.
SECONDS_OF_ONE_REQUEST = 5.0


class StopRequests:
    """Handle stop signals within a ``with`` block, and check the time limit.

    The first signal only sets a flag: the step is finished, and all ranks stop together. A second
    signal raises KeyboardInterrupt. The time limit starts when this object is constructed.

    Python allows signal handlers in the main thread only.
    """

    def __init__(self, options: StoppingOptions) -> None:
        minutes = options.exit_duration_in_mins
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._signals: dict[str, float] = {}
        self._before: dict[signal.Signals, Any] = {}

    def install_handlers(self) -> None:
        """Install the signal handlers, until the block or the process ends.

        SIGHUP remains ignored if it is, as under nohup.
        """
        self._before = handle_stop_signals(self._note)

    def __enter__(self) -> Self:
        self.install_handlers()
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def flags(self) -> list[float]:
        """One number per reason in ``REASONS``: 1.0 if this rank wants to stop for it, else 0.0."""
        late = self._deadline is not None and time.monotonic() >= self._deadline
        return [float(reason in self._signals) for reason in REASONS[:-1]] + [float(late)]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        first = min(self._signals.values(), default=now)
        if now - first > SECONDS_OF_ONE_REQUEST:
            raise KeyboardInterrupt
        self._signals.setdefault(signal.Signals(number).name, now)
