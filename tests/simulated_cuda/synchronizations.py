"""Count host synchronizations by kind and source line, in total and per step or forward pass."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.simulated_cuda.cases import STEPS

DEVICE_MODULES = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("synchronizations", "tensors", "device")
)
# Names of marks, which are set after each training step, before each forward pass, and before each
# call of flex attention.
TRAINING_STEP, FORWARD_PASS, FLEX_ATTENTION = "training step", "forward pass", "flex attention"
REPOSITORY = str(Path(__file__).parents[2])
Counts = collections.Counter[str]
"""'kind at file:line function < file:line function' -> number of synchronizations."""


@dataclasses.dataclass
class Synchronizations:
    """Counts since the start, and between marks of each kind.

    Attributes:
        total: counts since the start.
        intervals: name of a mark -> counts between consecutive marks, in order.
    """

    total: Counts = dataclasses.field(default_factory=collections.Counter)
    intervals: dict[str, list[Counts]] = dataclasses.field(default_factory=dict)
    _at_mark: dict[str, Counts] = dataclasses.field(default_factory=dict)
    _paused: bool = False

    def add(self, kind: str) -> None:
        """Count a synchronization at the calling source line."""
        if not self._paused:
            self.total[f"{kind} at {calling_place()}"] += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count synchronizations within this block."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def mark(self, name: str) -> None:
        """End the current interval of this name, if it has one, and start the next interval."""
        if name in self._at_mark:
            self.intervals.setdefault(name, []).append(self.total - self._at_mark[name])
        self._at_mark[name] = self.total.copy()

    def of_step(self, step: int) -> Counts:
        """Counts of a training step; the last interval is that of step ``STEPS``."""
        return self.intervals[TRAINING_STEP][step - STEPS - 1]

    def save(self, path: Path) -> None:
        """Write the counts as JSON, for :meth:`load`."""
        path.write_text(json.dumps({"total": self.total, "intervals": self.intervals}, indent=1))

    @classmethod
    def load(cls, path: Path) -> Synchronizations:
        """Read a file that :meth:`save` has written."""
        fields = json.loads(path.read_text())
        intervals = {
            name: [collections.Counter(counts) for counts in found]
            for name, found in fields["intervals"].items()
        }
        return cls(collections.Counter(fields["total"]), intervals)


def calling_place() -> str:
    """Return the innermost frames outside torch, up to the first one in this repository."""
    places: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        in_repository = name.startswith(REPOSITORY) and "site-packages" not in name
        if in_repository and name not in DEVICE_MODULES:
            places.append(f"{name.removeprefix(REPOSITORY + '/')}:{frame.f_lineno} {code.co_name}")
            break
        if "/site-packages/" in name and "/torch/" not in name and len(places) < 3:
            short = name.rpartition("/site-packages/")[2]
            places.append(f"{short}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places) or "a thread of autograd"
