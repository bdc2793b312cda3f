"""What a forked process hands over to the one it was forked from: a single value, of any size."""

from __future__ import annotations

import os
import pickle
from typing import Any


class Handover:
    """Memory that both processes have, without a name, a server or a limit on its size.

    A pipe would hold up a writer of much until it is read, and a queue of ``multiprocessing`` needs
    a thread or a process of its own. What is put by the process that made it stays there.
    """

    def __init__(self) -> None:
        self._made_by = os.getpid()
        self._value: Any = None
        self._memory = os.fdopen(os.memfd_create("handover"), "w+b")

    def put(self, value: Any) -> None:
        """Hand over ``value``, which is then read once the process that does has ended."""
        if os.getpid() == self._made_by:
            self._value = value
            return
        pickle.dump(value, self._memory)
        self._memory.flush()

    def get(self) -> Any:
        """What was handed over; None if nothing, or not to its end."""
        if self._value is not None:
            return self._value
        self._memory.seek(0)
        try:
            return pickle.load(self._memory)
        except (EOFError, pickle.UnpicklingError):  # the process was killed
            return None
