"""Which of the shards this machine does."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from megatron_chameleon.errors import UserError


@dataclasses.dataclass(frozen=True)
class Share:
    """Every ``count``-th shard, from the ``number``-th on; both count from 1."""

    number: int
    count: int

    def has(self, shard: int) -> bool:
        """Whether ``shard``, counted from 0, is one of them."""
        return shard % self.count == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_share(given: str) -> Share:
    """The share that --shard i/n asks for.

    Raises:
        UserError: unless these are two numbers, 1 <= i <= n.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", given)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--shard {given}: i/n is expected, i from 1 to n, as in 3/8")
    return Share(int(match[1]), int(match[2]))


def shares_of(shards: Iterable[int], count: int) -> list[Share]:
    """The shares, of ``count``, that ``shards`` belong to."""
    return [Share(number, count) for number in sorted({shard % count + 1 for shard in shards})]
