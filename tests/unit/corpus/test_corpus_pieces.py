from __future__ import annotations

import itertools

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.corpus.plan import divide
from megatron_chameleon.corpus.sources import Piece, Source

sources_of_any_size = st.lists(
    st.builds(
        lambda size, cuttable: Source("", "lines", "", bytes=size, cuttable=cuttable),
        st.integers(0, 1000),
        st.booleans(),
    ),
    max_size=20,
)


def bounds(piece, source):
    return piece.start, source.bytes if piece.stop is None else piece.stop


@given(sources_of_any_size, st.integers(1, 300))
def test_the_pieces_are_the_sources_one_after_another(sources, target):
    pieces = [piece for shard in divide(sources, target) for piece in shard]
    assert [piece.source for piece in pieces] == sorted(piece.source for piece in pieces)
    for number, source in enumerate(sources):
        own = [bounds(piece, source) for piece in pieces if piece.source == number]
        edges = [0, *(stop for _, stop in own)]
        assert own == list(itertools.pairwise(edges))
        assert edges[-1] == source.bytes
        assert len(own) == 1 or source.cuttable


@given(sources_of_any_size, st.integers(1, 300))
def test_no_shard_is_larger_than_asked_for_unless_it_cannot_be_divide(sources, target):
    for shard in divide(sources, target):
        size = sum(piece.bytes for piece in shard)
        assert size <= target or (len(shard) == 1 and not sources[shard[0].source].cuttable)


@given(sources_of_any_size, st.integers(1, 300))
def test_two_neighbours_would_not_fit_in_one_shard(sources, target):
    sizes = [[piece.bytes for piece in shard] for shard in divide(sources, target)]
    for shard, after in itertools.pairwise(sizes):
        assert sum(shard) + after[0] > target


def test_a_source_of_unknown_size_has_a_shard_of_its_own():
    small = Source("a", "lines", "", bytes=1)
    unknown = Source("b", "dataset", "")
    sources = [small, small, unknown, unknown, small]
    assert [[piece.source for piece in shard] for shard in divide(sources, 9)] == [
        [0, 1],
        [2],
        [3],
        [4],
    ]


def test_parquet_is_cut_between_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {i}" * 20 for i in range(100)]})
    pq.write_table(table, path, row_group_size=10, compression="none", use_dictionary=False)
    size = path.stat().st_size
    source = Source("a", "parquet", str(path), bytes=size, cuttable=True)
    pieces = [piece for shard in divide([source], size // 3) for piece in shard]
    assert pieces[0].start == 0
    assert pieces[-1].stop is None
    assert [piece.stop for piece in pieces[:-1]] == [piece.start for piece in pieces[1:]]
    assert len(pieces) == 4
    assert sum(piece.bytes for piece in pieces) == size
    assert divide([source], size) == [[Piece(0, 0, None, size)]]
