"""A sweep: mixtures that were found alike but for one knob, and which of them is which."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts.cost import Cost
from megatron_chameleon.artifacts.mixture import Mixture
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.artifacts.record import FolderRecord, InnerPath
from megatron_chameleon.errors import UserError

FILE_NAME = "sweep.json"
FORMAT_VERSION = 1
MADE_BY = "tools/sweep_mixture.py writes it"

KnobValue = int | float | str


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One mixture of a sweep.

    Attributes:
        knobs: knob -> its value; the same knobs at every point.
        mixture: the file, below the folder of the sweep.
        mixture_hash: of the weights in it.
        made_from: what the mixture was computed from, below the same folder: a proxy's run, an
            embedding store.
    """

    knobs: dict[str, KnobValue]
    mixture: InnerPath
    mixture_hash: str
    made_from: list[InnerPath]


@dataclasses.dataclass(frozen=True)
class Sweep(FolderRecord):
    """What ``sweep.json`` says; ``root`` is the folder it was read from.

    Attributes:
        method: what found the mixtures.
        axes: knob -> the values it took while the others stood at the centre, in order; the
            centre's own is among them.
        points: the centre first, no two with the same knobs.
        cost: of all proxies, embeddings and mixtures, each counted once.
    """

    KIND = "sweep"
    FILE_NAME = FILE_NAME
    FORMAT_VERSION = FORMAT_VERSION
    MADE_BY = MADE_BY

    method: str
    axes: dict[str, list[KnobValue]]
    points: list[SweepPoint]
    provenance: Provenance
    cost: Cost

    @property
    def centre(self) -> SweepPoint:
        """The point that all others differ from in one knob. Raises UserError if there is none."""
        if not self.points:
            raise UserError(f"{self.root / FILE_NAME}: field points: there is none; {MADE_BY}")
        return self.points[0]

    def along(self, knob: str) -> list[SweepPoint]:
        """The points of an axis, in the order of its values.

        Raises:
            UserError: if one of them is not there.
        """
        found = []
        for value in self.axes[knob]:
            wanted = {**self.centre.knobs, knob: value}
            there = [point for point in self.points if point.knobs == wanted]
            if not there:
                raise UserError(
                    f"{self.root / FILE_NAME}: field points: there is none with {knob} {value}, "
                    f"which field axes names; {MADE_BY}"
                )
            found.append(there[0])
        return found

    def load_mixture(self, point: SweepPoint) -> Mixture:
        """The mixture of ``point``.

        Raises:
            UserError: if it cannot be read, or has other weights than those of the sweep.
        """
        path = self.root / point.mixture
        mixture = Mixture.load(path)
        if mixture.hash != point.mixture_hash:
            raise UserError(
                f"{path} has changed since {self.root / FILE_NAME} was written; run the sweep "
                "again, or delete that record"
            )
        return mixture
