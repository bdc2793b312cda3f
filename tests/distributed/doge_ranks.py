"""What the ranks do that find a mixture by DoGE; see doge_cases.py."""

from __future__ import annotations

from tests.distributed.doge_cases import DOGE, DOGE_AGAIN, doge_options, proxy_of
from tests.distributed.layout_cases import SAVE_INTERVAL, Case, Places


def find_doge(places: Places, name: str) -> None:
    _find(places, name, *DOGE[name])


def resume_doge(places: Places, name: str) -> None:
    """Go on from the middle of another proxy, in another folder and layout."""
    from tests.distributed.layout_ranks import cut_run, is_first_rank

    origin, case = DOGE_AGAIN[name]
    if is_first_rank():
        cut_run(proxy_of(places, origin), proxy_of(places, name), SAVE_INTERVAL)
    _find(places, name, case, DOGE[origin][1])


def _find(places: Places, name: str, case: Case, target: str | None) -> None:
    from megatron_chameleon.methods.gradient_alignment.compute import compute_doge

    assert compute_doge(doge_options(places, name, case, target))
