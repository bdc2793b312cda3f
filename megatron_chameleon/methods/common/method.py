"""What tools/compute_mixture.py has to know of a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron_chameleon.options.mixture import MethodOptions


@dataclasses.dataclass(frozen=True)
class Method:
    """An entry of ``--list-methods``; a file of ``megatron_chameleon/methods`` has one as METHOD.

    Attributes:
        name: what ``--method`` takes.
        options: the method's own frozen dataclass; its flags are made of it.
        compute: finds the mixture and writes it to ``options.output``; every rank calls it, with an
            instance of ``options``, and gets the same exit status. Any but 0 (or None) says that no
            mixture was written: STOPPED_STATUS of errors.py that it was asked to stop. It imports
            torch only when it is called.
        summary: what its weights are, in a few words.
        needs: what has to be there before, beside the corpus.
        cost: what it spends.
        good_for: when to choose it.
        source: the paper; empty without one.
    """

    name: str
    options: type[MethodOptions]
    compute: Callable[[Any], int | None]
    summary: str
    needs: str
    cost: str
    good_for: str
    source: str
