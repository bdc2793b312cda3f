"""A sweep: mixtures that each differ from a central mixture in one hyperparameter."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts.mixture import Mixture
from megatron_chameleon.artifacts.provenance import Cost, Provenance
from megatron_chameleon.artifacts.record import FolderRecord, InnerPath
from megatron_chameleon.errors import UserError

SettingValue = int | float | str


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One mixture of a sweep.

    Attributes:
        settings: hyperparameter -> value; the same hyperparameters at every point. ``steps`` is the
            step of the proxy's checkpoint, and ``train_iters`` is the length of its run.
        mixture: path of the mixture, relative to the sweep's folder.
        mixture_hash: hash of the weights in it.
        made_from: paths of the mixture's inputs (a proxy's run, an embedding store), relative to
            the sweep's folder.
    """

    settings: dict[str, SettingValue]
    mixture: InnerPath
    mixture_hash: str
    made_from: list[InnerPath]


@dataclasses.dataclass(frozen=True)
class Sweep(FolderRecord):
    """Contents of ``sweep.json``; ``root`` is its folder.

    Attributes:
        method: method that computed the mixtures.
        axes: hyperparameter -> its values with all others at the centre, in order; includes the
            centre's value. Along ``steps``, all points are checkpoints of one run, whose length is
            the last value; the centre need not be one of them.
        points: distinct points; the first is the centre.
        cost: cost of all proxies, embeddings and mixtures, each counted once.
    """

    KIND = "sweep"
    FILE_NAME = "sweep.json"
    MADE_BY = "megatron-chameleon sweep_mixture writes it"

    method: str
    axes: dict[str, list[SettingValue]]
    points: list[SweepPoint]
    provenance: Provenance
    cost: Cost

    @property
    def centre(self) -> SweepPoint:
        """The centre of the sweep. Raises UserError if there are no points."""
        if not self.points:
            raise UserError(f"{self.root / self.FILE_NAME}: field points is empty; {self.MADE_BY}")
        return self.points[0]

    def along(self, parameter: str) -> list[SweepPoint]:
        """The points of an axis, in the order of its values.

        Raises:
            UserError: if a point is missing.
        """
        found, values = [], self.axes[parameter]
        shared = {"train_iters": values[-1]} if parameter == "steps" else {}
        for value in values:
            wanted = {**self.centre.settings, **shared, parameter: value}
            point = next((point for point in self.points if point.settings == wanted), None)
            if point is None:
                raise UserError(
                    f"{self.root / self.FILE_NAME}: field points: missing {parameter} {value}, "
                    f"which field axes lists; {self.MADE_BY}"
                )
            found.append(point)
        return found

    def load_mixture(self, point: SweepPoint) -> Mixture:
        """The mixture of ``point``.

        Raises:
            UserError: if the mixture cannot be read, or its weights have changed since the sweep.
        """
        path = self.root / point.mixture
        mixture = Mixture.load(path)
        if mixture.hash != point.mixture_hash:
            raise UserError(
                f"{path} has changed since {self.root / self.FILE_NAME} was written; run the sweep "
                "again, or delete that record"
            )
        return mixture
