"""Taking items from an iterator before they are asked for, in a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_OF_A_TURN = 5e-4


class _End:
    """Comes after the last item, with the exception that ended them, if there was one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


@contextlib.contextmanager
def quick_turns() -> Iterator[None]:
    """A block whose threads hand Python's lock to each other after half a millisecond.

    An encoder lets go of it and, when it is done with its batch, wants it back from a reader that
    is in the midst of parsing. Python's own 5 ms would be a tenth of the time a batch takes.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SECONDS_OF_A_TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def read_ahead(items: Iterable[Item], depth: int) -> Generator[Item]:
    """The same items in the same order, up to ``depth`` of them taken in advance.

    What the iterator raises is raised here, after the items before it. The thread ends when this
    generator is closed; one that waits for a pipe does not keep the process from ending.
    """
    ready: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Item | _End) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=_SECONDS_BETWEEN_LOOKS)
            except queue.Full:
                continue
            return True
        return False

    def take() -> None:
        try:
            for item in items:
                if not put(item):
                    return
                del item  # the queue alone holds it
        except BaseException as error:  # raised again where the items are used
            put(_End(error))
        else:
            put(_End())

    threading.Thread(target=take, name="read-ahead", daemon=True).start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
            del item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
