"""The hub that data sets come from, and what to do where it does not answer.

The package datasets asks it again and again, for minutes, and for each data set anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import datasets
from huggingface_hub import constants, get_session, hf_hub_url

TRIES = 2


class Hub:
    """Knows whether the hub has failed to answer; from then on it is not asked any more.

    Attributes:
        problem: why it did not answer; nothing as long as it does.
    """

    def __init__(self) -> None:
        self.problem = ""

    @contextlib.contextmanager
    def reading(self, data_set: str) -> Iterator[None]:
        """A block that loads ``data_set``, OWNER/NAME, from the hub or from what is kept of it.

        Of a hub that does not answer, the block finds what is kept, or fails at once.
        """
        if not self.problem and not constants.HF_HUB_OFFLINE:
            self.problem = _problem(data_set)
        with _offline() if self.problem else contextlib.nullcontext():
            yield


def _problem(data_set: str) -> str:
    """Why the hub does not answer when it is asked for ``data_set``; nothing if it does."""
    address = hf_hub_url(data_set, "README.md", repo_type="dataset")
    problem = ""
    for _ in range(TRIES):
        try:
            get_session().head(address, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except Exception as error:  # of whichever library it is asked by
            problem = f"{type(error).__name__}: {error}"
        else:
            return ""  # whatever it says: datasets can tell
    return f"{constants.ENDPOINT} does not answer ({problem})"


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """A block in which nothing is asked of the hub, as with HF_HUB_OFFLINE."""
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
