"""Options of tools/doctor.py."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """What acceleration is active on this machine, and what is lost without the rest."""

    json: bool = False
    """Print one JSON object instead of the text for people."""
