"""However the work is cut, shared, stopped and gone on with, the corpus is the same."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.corpus import indexed, join, shards
from megatron_chameleon.corpus.options import DomainOptions, PreprocessOptions
from megatron_chameleon.corpus.plan import Plan
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.errors import UserError
from tests.full_disk import largest_file_size
from tests.unit.corpus.corpus_making import (
    assert_same,
    given,
    left_in,
    made,
    record_of,
)


@pytest.fixture
def options(tmp_path, jsonl, texts, tokenizer_json):
    """Two files whose lines name their domains, a compressed one, and texts that repeat."""
    some = texts(300, 1)
    records = [
        {"text": text, "set": "abc"[number % 3]} for number, text in enumerate(some + some[:80])
    ]
    plain = [
        jsonl("x/0.jsonl", records[:200]),
        jsonl("x/1.jsonl", [*records[200:], {"text": "", "set": "a"}, {"text": None, "set": "b"}]),
    ]
    packed = jsonl("x/2.jsonl", [{"text": text, "set": "d"} for text in texts(60, 2)])
    packed.with_suffix(".jsonl.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    return PreprocessOptions(
        given(*plain, packed.with_suffix(".jsonl.gz")),
        tmp_path / "corpus",
        tokenizer_json,
        domains=DomainOptions(domain_key="set"),
        split="60,20,20",
        shard_bytes=4000,
    )


@pytest.fixture
def whole(options, tmp_path):
    """The corpus made in one shard, to compare with."""
    return made(dataclasses.replace(options, output=tmp_path / "whole", shard_bytes=10**9))


def assert_same_but_for_cuts(corpus, whole):
    """The same documents in the same files; what was read of sources is told in other pieces."""
    first, second = record_of(corpus), record_of(whole)
    assert first["domains"] == second["domains"]
    assert list(first["domains"]) == list(second["domains"])
    for path in sorted((whole.root / "tokens").iterdir()):
        assert (corpus.root / "tokens" / path.name).read_bytes() == path.read_bytes(), path.name


def number_of_shards(options):
    return len(Plan.load(options.output / ".partial").shards)


@pytest.mark.parametrize("shard_bytes", [300, 700, 4000, 20_000])
def test_the_corpus_does_not_depend_on_how_sources_are_cut(options, whole, shard_bytes):
    assert_same_but_for_cuts(made(dataclasses.replace(options, shard_bytes=shard_bytes)), whole)


def test_parquet_that_is_cut_between_row_groups_gives_the_same_corpus(
    one_domain, tmp_path, texts, capsys
):
    table = pa.table({"text": texts(300, 1)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=20)
    parquet = dataclasses.replace(
        one_domain, source=given(f"a={tmp_path}/a.parquet"), output=tmp_path / "parquet"
    )
    preprocess_data(dataclasses.replace(parquet, shard="2/2"))
    assert number_of_shards(parquet) > 3
    assert_same_but_for_cuts(made(parquet), made(one_domain))


def test_the_corpus_does_not_depend_on_who_makes_the_shards(options, tmp_path, capsys):
    alone = made(options)
    capsys.readouterr()
    shared = dataclasses.replace(options, output=tmp_path / "shared")
    for share in ("2/3", "3/3", "1/3"):
        preprocess_data(dataclasses.replace(shared, shard=share))
        assert not (shared.output / "corpus.json").exists()
        total = number_of_shards(shared)
        said = capsys.readouterr().out
        if share == "2/3":
            assert f"--shard 2/3 is done; {total - total // 3} of all {total} shards are m" in said
            assert "next: the same command with --shard 1/3, --shard 3/3, and without" in said
    assert total > 8
    assert f"--shard 1/3 is done, and so are all {total} shards" in said
    assert "next: the same command without --shard joins them" in said
    assert_same(made(shared), alone)
    assert f"{total} of {total} shards were finished before" in capsys.readouterr().out

    processes = dataclasses.replace(options, output=tmp_path / "processes", workers=2)
    assert_same(made(processes), alone)
    assert not (processes.output / ".partial").exists()


def test_blocks_in_memory_do_not_show_however_small(options, whole, monkeypatch):
    """What bounds the memory is all met many times over here, and the files are the same."""
    for module, name, size in [
        (shards, "_BATCH_CHARACTERS", 100),
        (shards, "_RUN_DOCUMENTS", 4),
        (join, "_RANGE_TEXTS", 5),
        (join, "_COPIES", 3),
        (join, "_BLOCK_DOCUMENTS", 3),
        (join, "_BLOCK_BYTES", 16),
        (join, "_WAITING_BYTES", 200),
        (indexed, "_BUFFER_BYTES", 64),
        (indexed, "_INDEX_BLOCK", 5),
    ]:
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, size)
    assert_same_but_for_cuts(made(options), whole)


@pytest.fixture
def one_domain(tmp_path, jsonl, texts, tokenizer_json):
    """One plain file of 30 kB, to be cut in eight shards."""
    source = given(f"a={jsonl('a.jsonl', texts(300, 1))}")
    return PreprocessOptions(
        source, tmp_path / "corpus", tokenizer_json, split="60,20,20", shard_bytes=4000
    )


def test_a_disk_that_is_full_while_shards_are_joined_keeps_them_all(one_domain, tmp_path, capsys):
    expected = made(dataclasses.replace(one_domain, output=tmp_path / "expected"))
    capsys.readouterr()
    most = (expected.root / "tokens" / "a-train.bin").stat().st_size
    with (
        pytest.raises(UserError, match=r"cannot write .*a-train.bin: File too large; free space"),
        largest_file_size(most - 1),
    ):
        preprocess_data(one_domain)
    total = number_of_shards(one_domain)
    assert f"{total} of {total} shards are finished and kept" in capsys.readouterr().err
    assert [name for name in left_in(one_domain.output) if "shards/" not in name] == [
        ".partial/plan.json"
    ]
    assert_same(made(one_domain), expected)
    assert f"{total} of {total} shards were finished before" in capsys.readouterr().out


def test_a_disk_that_is_full_while_a_shard_is_made_keeps_the_finished_ones(
    one_domain, tmp_path, capsys
):
    larger = dataclasses.replace(one_domain, shard_bytes=9000)
    expected = made(dataclasses.replace(larger, output=tmp_path / "expected"))

    def fail():
        with (
            pytest.raises(UserError, match=r"cannot write .*tokens\.bin: File too large; free"),
            largest_file_size(5000),
        ):
            preprocess_data(larger)

    fail()
    assert not larger.output.exists()
    preprocess_data(dataclasses.replace(larger, shard="2/3"))
    before = left_in(larger.output)
    fail()
    assert left_in(larger.output) == before
    assert_same(made(larger), expected)
    assert "1 of 4 shards were finished before" in capsys.readouterr().out


def test_shards_that_are_there_are_not_made_again(one_domain, capsys):
    preprocess_data(dataclasses.replace(one_domain, shard="1/2"))
    folder = one_domain.output / ".partial" / "shards"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert "tokenizing" in capsys.readouterr().err
    preprocess_data(dataclasses.replace(one_domain, shard="1/2"))
    assert "tokenizing" not in capsys.readouterr().err
    preprocess_data(dataclasses.replace(one_domain, shard="2/2"))
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)


def rewrite(path, change):
    """Change the content of ``path``, and its time for sure."""
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def first_letter(content):
    at = content.index(b'"text": "') + 9
    content[at : at + 1] = b"Q" if content[at : at + 1] != b"Q" else b"R"


def last_letter(content):
    at = content.rindex(b'"}')
    content[at - 1 : at] = b"Q" if content[at - 1 : at] != b"Q" else b"R"


@pytest.mark.parametrize("share", [None, "2/3"])
def test_a_source_whose_size_has_changed_is_refused(one_domain, tmp_path, share):
    preprocess_data(dataclasses.replace(one_domain, shard="1/3"))
    rewrite(tmp_path / "a.jsonl", lambda content: content.extend(b"\n"))
    with pytest.raises(UserError, match=r"a\.jsonl has changed: .* bytes and held .*restore"):
        preprocess_data(dataclasses.replace(one_domain, shard=share))


@pytest.mark.parametrize("share", [None, "2/3"])
def test_a_source_of_the_same_size_whose_content_has_changed_is_refused(
    one_domain, tmp_path, share
):
    preprocess_data(dataclasses.replace(one_domain, shard="1/3"))
    rewrite(tmp_path / "a.jsonl", first_letter)
    with pytest.raises(UserError, match=r"a\.jsonl has changed since it was read for .*restore it"):
        preprocess_data(dataclasses.replace(one_domain, shard=share))


def test_a_source_that_was_only_touched_is_gone_on_with(one_domain, tmp_path):
    expected = made(dataclasses.replace(one_domain, output=tmp_path / "expected"))
    preprocess_data(dataclasses.replace(one_domain, shard="1/3"))
    rewrite(tmp_path / "a.jsonl", lambda content: None)
    preprocess_data(dataclasses.replace(one_domain, shard="2/3"))
    assert_same(made(one_domain), expected)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_leaves_nothing_before_a_shard_is_finished(options, workers):
    source = dataclasses.replace(options.source, text_key="no")
    wrong = dataclasses.replace(options, source=source, workers=workers, shard_bytes=20_000)
    with pytest.raises(UserError, match="no line has the key 'no'"):
        preprocess_data(wrong)
    assert not options.output.exists()


def test_a_corpus_that_is_refused_keeps_its_shards_and_can_be_allowed(one_domain, capsys):
    strict = dataclasses.replace(one_domain, min_tokens_per_split=10**6)
    with pytest.raises(UserError, match="fewer than --min-tokens-per-split"):
        preprocess_data(strict)
    total = number_of_shards(one_domain)
    assert f"{total} of {total} shards are finished and kept" in capsys.readouterr().err
    assert made(one_domain).names == ["a"]
    assert f"{total} of {total} shards were finished before" in capsys.readouterr().out


def test_malformed_lines_of_all_shards_count_together(one_domain, jsonl, texts):
    lines = [*texts(150, 1), b"{", *texts(150, 2), b"[]", *texts(100, 3)]
    source = given(f"a={jsonl('a.jsonl', lines)}", max_malformed_share=0.004)
    with pytest.raises(UserError, match=r"2 of 402 lines are malformed: .*byte .*; .*byte"):
        preprocess_data(dataclasses.replace(one_domain, source=source))
    allowed = dataclasses.replace(source, max_malformed_share=0.005)
    with pytest.warns(UserWarning, match="2 of 402 lines are malformed"):
        corpus = made(dataclasses.replace(one_domain, source=allowed))
    assert corpus.not_written["a"].malformed == 2


def test_an_old_corpus_stays_until_its_replacement_is_whole(one_domain, jsonl, texts):
    first = made(one_domain)
    source = given(f"b={jsonl('b.jsonl', texts(300, 2))}")
    other = dataclasses.replace(one_domain, source=source, overwrite=True)
    preprocess_data(dataclasses.replace(other, shard="1/2"))
    assert Corpus.load(one_domain.output).hash == first.hash
    assert made(other).names == ["b"]


def test_a_shard_of_another_plan_is_refused(one_domain):
    preprocess_data(dataclasses.replace(one_domain, shard="1/2"))
    path = one_domain.output / ".partial" / "shards" / "000002" / "shard.json"
    plan = Plan.load(one_domain.output / ".partial")
    body = json.loads(path.read_text().replace(plan.hash, "0" * 64))
    del body["checksum"]
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"000002 belongs to another plan .* remove .*000002 and"):
        preprocess_data(one_domain)


def test_a_shard_that_is_cut_short_is_refused_and_made_again_once_removed(one_domain, tmp_path):
    preprocess_data(dataclasses.replace(one_domain, shard="1/2"))
    broken = one_domain.output / ".partial" / "shards" / "000002"
    os.truncate(broken / "tokens.bin", 10)
    with pytest.raises(UserError, match=rf"tokens\.bin does not match .*: remove {broken} and run"):
        preprocess_data(one_domain)
    shutil.rmtree(broken)
    assert_same(made(one_domain), made(dataclasses.replace(one_domain, output=tmp_path / "new")))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_what_other_machines_have_left_half_written_is_told(options, count, capsys):
    directories = options.output / ".partial" / "staging"
    for number in range(count):
        (directories / f"elsewhere-{number}" / "000000").mkdir(parents=True)
    host = os.uname().nodename
    (directories / f"{host}-1-0123abcd").mkdir(parents=True)  # of this machine: is removed
    preprocess_data(options)
    printed = [line for line in capsys.readouterr().out.splitlines() if "unfinished work" in line]
    assert len(printed) == min(count, 1)
    if count == 0:
        assert not (options.output / ".partial").exists()
        return
    more = " and 2 more" if count == 3 else ""
    assert f"(elsewhere-0{more}): when none" in printed[0]
    assert printed[0].endswith(f"remove it by rm -r {options.output / '.partial'}")
    shutil.rmtree(options.output / ".partial")
    Corpus.load(options.output).verify()
