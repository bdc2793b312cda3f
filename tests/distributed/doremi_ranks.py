"""What the ranks of DoReMi do; see doremi_cases.py."""

from __future__ import annotations

from tests.distributed.doremi_cases import DOREMI, DOREMI_AGAIN, doremi_options
from tests.distributed.layout_cases import SAVE_INTERVAL, Case, Places


def find_doremi(places: Places, name: str) -> None:
    _find(places, name, DOREMI[name])


def resume_doremi(places: Places, name: str) -> None:
    """Go on from the middle of another's proxy, in another folder and layout."""
    from tests.distributed.layout_ranks import cut_run, is_first_rank

    origin, case = DOREMI_AGAIN[name]
    if is_first_rank():
        cut_run(places.run(origin) / "proxy", places.run(name) / "proxy", SAVE_INTERVAL)
    _find(places, name, case)


def _find(places: Places, name: str, case: Case) -> None:
    from megatron_chameleon.methods.excess_loss.compute import compute_doremi

    assert compute_doremi(doremi_options(places, name, case))
