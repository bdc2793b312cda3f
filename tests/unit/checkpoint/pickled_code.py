"""What a file holds that runs code when it is unpickled."""

from __future__ import annotations

import os
from pathlib import Path


class PickledCode:
    """Unpickled, it makes a folder: the trace by which a test sees that code was run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)
