"""Domains are discovered alike by any number of ranks."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.discovered import DiscoveredDomains
from tests.distributed.discover_cases import DISCOVERING, discovered


def found_by(results, name):
    results.require(f"discover-{name}")
    folder = discovered(results.places, name)
    return Corpus.load(folder), DiscoveredDomains.load(folder)


@pytest.mark.parametrize("name", [name for name in DISCOVERING if name != "one"])
def test_every_document_is_in_the_cluster_that_one_rank_finds(results, name):
    (expected, one), (corpus, other) = found_by(results, "one"), found_by(results, name)
    assert corpus.names[0] == "code"
    assert len(corpus.names) > 2
    assert corpus.hash == expected.hash
    assert corpus.domains == expected.domains
    assert other.silhouettes == pytest.approx(one.silhouettes, abs=1e-5)
    assert other.cost.num_devices == DISCOVERING[name].ranks
    assert other.cost.flops == one.cost.flops
