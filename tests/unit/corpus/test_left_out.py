from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_chameleon.corpus import join as left_out
from megatron_chameleon.corpus import shards as shard
from megatron_chameleon.corpus.join import (
    DUPLICATE,
    HELD_OUT,
    KEPT,
    Texts,
    find_left_out,
    reasons_to_leave_out,
)
from megatron_chameleon.corpus.records import MalformedRecord
from megatron_chameleon.corpus.shards import DOCUMENT, Shard, ShardWriter
from megatron_chameleon.errors import UserError

TRAIN, VALID, TEST = range(3)
GIVEN = 1
# High half, low half, domain, split, given; few values, so that all kinds of equality come up.
few_values = st.tuples(*(st.integers(0, high) for high in (3, 1, 2, 2, 1)))


def texts_of(rows):
    rows = [row if len(row) == 5 else (*row, 0) for row in rows]
    high, low, domain, split, given = zip(*rows, strict=True) if rows else ([],) * 5
    order = np.arange(len(rows))
    return Texts(
        np.array(high, np.uint64),
        np.array(low, np.uint64),
        order,
        np.array(domain, np.int64),
        np.array(split, np.uint8),
        np.array(given, np.uint8),
    )


def reasons_reference(texts):
    """The reasons, one text after another."""
    of_each_text: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for high, low, split, is_given in zip(
        texts.high, texts.low, texts.split, texts.given, strict=True
    ):
        of_each_text.setdefault((high, low), []).append((split, is_given))
    reasons = [KEPT] * texts.order.size
    seen = set()
    for i in np.argsort(texts.order):
        text = (texts.high[i], texts.low[i])
        given_splits = [split for split, is_given in of_each_text[text] if is_given and split > 0]
        if texts.split[i] != max(given_splits or [split for split, _ in of_each_text[text]]):
            reasons[i] = HELD_OUT
        elif (text, texts.domain[i]) in seen:
            reasons[i] = DUPLICATE
        else:
            seen.add((text, texts.domain[i]))
    return reasons


def reasons(*rows):
    return reasons_to_leave_out(texts_of(rows)).tolist()


def test_later_documents_of_a_domain_with_the_same_text_are_duplicates():
    assert reasons((1, 1, 0, TRAIN), (2, 1, 0, TRAIN), (1, 1, 0, TRAIN)) == [KEPT, KEPT, DUPLICATE]
    assert reasons((1, 1, 0, TRAIN), (1, 2, 0, TRAIN), (1, 1, 1, TRAIN)) == [KEPT] * 3


@pytest.mark.parametrize("domain", [0, 1])
def test_what_is_held_out_anywhere_is_not_trained_on(domain):
    assert reasons((1, 1, 0, TRAIN), (1, 1, domain, TEST)) == [HELD_OUT, KEPT]
    assert reasons((1, 1, 0, TEST), (1, 1, domain, TRAIN)) == [KEPT, HELD_OUT]
    assert reasons((1, 1, 0, VALID), (1, 1, domain, TRAIN)) == [KEPT, HELD_OUT]
    assert reasons((1, 1, 0, VALID), (1, 1, domain, TEST)) == [HELD_OUT, KEPT]


def test_a_text_in_all_splits_stays_in_test_alone():
    rows = [(1, 1, 0, split) for split in (TRAIN, TRAIN, VALID, TEST, TEST)]
    assert reasons(*rows) == [HELD_OUT, HELD_OUT, HELD_OUT, KEPT, DUPLICATE]


def test_what_a_source_holds_out_itself_goes_before_what_the_hash_says():
    assert reasons((1, 1, 0, VALID, GIVEN), (1, 1, 1, TEST)) == [KEPT, HELD_OUT]
    assert reasons((1, 1, 1, TEST), (1, 1, 0, VALID, GIVEN)) == [HELD_OUT, KEPT]
    assert reasons((1, 1, 0, VALID, GIVEN), (1, 1, 1, TEST, GIVEN)) == [HELD_OUT, KEPT]
    assert reasons((1, 1, 0, TRAIN, GIVEN), (1, 1, 1, TEST)) == [HELD_OUT, KEPT]
    assert reasons((1, 1, 0, TEST, GIVEN), (1, 1, 0, TEST)) == [KEPT, DUPLICATE]


@given(st.lists(few_values, max_size=60), st.randoms())
def test_the_fast_way_gives_what_the_plain_one_gives(rows, random):
    texts = texts_of(rows)
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled = texts.take(np.array(order, dtype=np.int64))
    assert reasons_to_leave_out(shuffled).tolist() == reasons_reference(shuffled)


def shards_of(folder, rows_of_each):
    """Shards whose domains are numbered in the order in which each of them mentions them."""
    shards, numbers = [], []
    for number, rows in enumerate(rows_of_each):
        (folder / f"{number}").mkdir(parents=True)
        writer = ShardWriter(folder / f"{number}", "uint16")
        own = list(dict.fromkeys(row[2] for row in rows))
        for begin in range(0, len(rows), 3):
            some = rows[begin : begin + 3]
            documents = np.zeros(len(some), DOCUMENT)
            documents["tokens"] = 1
            documents["domain"] = [own.index(row[2]) for row in some]
            documents["split"] = [row[3] for row in some]
            documents["given"] = [row[4] if len(row) == 5 else 0 for row in some]
            digests = np.array([row[:2] for row in some], np.uint64)
            writer.add(np.zeros(len(some), np.uint16), documents, digests)
        writer.finish()
        numbers.append(np.array(own, dtype=np.int64))
        no_lines = MalformedRecord(0, 0, [], [], [])
        names = [str(domain) for domain in own]
        counts = (len(rows), len(rows), writer.runs, writer.copies)
        root = folder / f"{number}"
        shards.append(Shard(root, "", "uint16", names, [], *counts, [], {}, no_lines, 0.0))
    return shards, numbers


wide = st.builds(lambda row: (row[0] << 62, row[1] << 63, *row[2:]), few_values)


@pytest.mark.parametrize(("run_documents", "range_texts"), [(1 << 18, 1 << 19), (3, 5), (1, 1)])
@settings(max_examples=30)
@given(rows_of_each=st.lists(st.lists(wide, max_size=12), min_size=1, max_size=4))
def test_neither_shards_nor_runs_nor_ranges_show(
    tmp_path_factory, rows_of_each, run_documents, range_texts
):
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "_RUN_DOCUMENTS", run_documents)
        patch.setattr(left_out, "_RANGE_TEXTS", range_texts)
        shards, numbers = shards_of(folder, rows_of_each)
        (folder / "found").mkdir()
        found = find_left_out(shards, numbers, folder / "found")

    rows = [row for rows in rows_of_each for row in rows]
    expected = reasons_reference(texts_of(rows))
    told = [found.reasons(number) for number in range(len(shards))]
    assert [
        reason
        for rows, reasons in zip(rows_of_each, told, strict=True)
        for reason in ([KEPT] * len(rows) if reasons is None else reasons.tolist())
    ] == expected
    for counted, reason in ((found.duplicates, DUPLICATE), (found.held_out, HELD_OUT)):
        domains = [row[2] for row, why in zip(rows, expected, strict=True) if why == reason]
        assert counted == Counter(domains)


def test_no_more_than_a_range_is_held_however_often_a_text_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(left_out, "_RANGE_TEXTS", 10)
    rng = np.random.default_rng(0)
    often = [(7, 7, 0, TRAIN)] * 500
    once = [(2 * int(high), 1, 0, TRAIN) for high in rng.integers(0, 2**63, 100)]
    shards, numbers = shards_of(tmp_path, [often[:250] + once[:50], often[250:] + once[50:]])
    sizes = []
    plain = reasons_to_leave_out

    def counting(texts):
        sizes.append(texts.order.size)
        return plain(texts)

    monkeypatch.setattr(left_out, "reasons_to_leave_out", counting)
    (tmp_path / "found").mkdir()
    found = find_left_out(shards, numbers, tmp_path / "found")
    assert found.duplicates == {0: 499}
    assert sum(sizes) == 102
    assert max(sizes) <= 20


def test_a_full_disk_is_told_in_one_line(tmp_path):
    shards, numbers = shards_of(tmp_path, [[(1, 1, 0, TRAIN), (1, 1, 0, TRAIN)]])
    with pytest.raises(UserError, match=r"cannot write .*000000: "):
        find_left_out(shards, numbers, tmp_path / "not" / "there")
