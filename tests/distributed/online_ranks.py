"""What the ranks of a run do whose weights follow the model; see online_cases.py."""

from __future__ import annotations

from tests.distributed.layout_cases import SAVE_INTERVAL, Case, Places
from tests.distributed.online_cases import ONLINE, ONLINE_AGAIN, online_options


def train_online(places: Places, name: str) -> None:
    _train(places, name, ONLINE[name])


def resume_online(places: Places, name: str) -> None:
    """Go on from the middle of another such run, in another folder and layout."""
    from tests.distributed.layout_ranks import cut_run, is_first_rank

    origin, case = ONLINE_AGAIN[name]
    if is_first_rank():
        cut_run(places.run(origin), places.run(name), SAVE_INTERVAL)
    _train(places, name, case)


def _train(places: Places, name: str, case: Case) -> None:
    from megatron_chameleon.methods.leverage.online import OnlineChameleon
    from megatron_chameleon.training.pretrain import pretrain

    pretrain(online_options(places, name, case), OnlineChameleon)
