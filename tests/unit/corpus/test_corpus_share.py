from __future__ import annotations

import pytest

from megatron_chameleon.corpus.shards.share import Share, parse_share, shares_of
from megatron_chameleon.errors import UserError


def test_the_shares_are_all_shards_once():
    shares = [parse_share(f"{number}/3") for number in (1, 2, 3)]
    of_each = [[shard for shard in range(8) if share.has(shard)] for share in shares]
    assert of_each == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [shard for shard in range(5) if parse_share("1/1").has(shard)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("given", ["", "3", "0/3", "4/3", "1/0", "-1/3", "1/3/5", "a/b", "1 /3"])
def test_two_numbers_are_asked_for(given):
    with pytest.raises(UserError, match=r"--shard .*i/n is expected"):
        parse_share(given)


def test_the_shares_of_shards_are_named():
    assert shares_of([0, 3, 5], 3) == [Share(1, 3), Share(3, 3)]
    assert str(Share(1, 3)) == "1/3"
