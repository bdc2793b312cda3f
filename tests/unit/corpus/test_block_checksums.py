"""Every block of a corpus's token files is checked before its tokens are used."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.corpus import BLOCK_BYTES
from megatron_chameleon.blend.dataset import BlendedTokens
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.blend.token_data import corpus_tokens
from megatron_chameleon.corpus.indexed import BlockHasher, open_tokens
from megatron_chameleon.errors import UserError
from tests.small_corpus import write_small_corpus

TOKENS_PER_BLOCK = BLOCK_BYTES // 2


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def path_of(corpus, suffix, name="news", split="train"):
    prefix = corpus.prefix(name, split)
    return prefix.with_name(prefix.name + suffix)


@pytest.fixture
def corpus(tmp_path):
    """Three domains whose training text fills several blocks."""

    def document(number, rng):
        return rng.integers(0, 250, int(rng.integers(500, 2000)))

    return write_small_corpus(tmp_path / "corpus", document=document)


@given(st.lists(st.integers(0, 2 * BLOCK_BYTES + 9), max_size=4), st.booleans())
def test_blocks_are_hashed_alike_however_the_stream_is_cut(sizes, ended):
    content = random.Random(0).randbytes(sum(sizes))
    hasher, first = BlockHasher(), 0
    for size in sizes:
        hasher.update(content[first : first + size])
        first += size
    found = hasher.take()
    hasher.end_block()
    found += hasher.take()
    expected = [
        xxhash.xxh3_64_intdigest(content[i : i + BLOCK_BYTES])
        for i in range(0, len(content), BLOCK_BYTES)
    ]
    assert np.frombuffer(found, "<u8").tolist() == expected


@pytest.mark.parametrize("permutation", ["megatron", "epoch", "feistel"])
def test_a_flipped_bit_is_found_when_its_block_is_sampled(corpus, permutation):
    path = path_of(corpus, ".bin")
    num_bits = 8 * path.stat().st_size
    place = num_bits // 2 + 4
    data = corpus_tokens(corpus)

    def read_all():
        samples = BlendedTokens(
            data, MixtureSchedule.fixed([1.0, 1.0, 1.0]), 1000, 32, 1, permutation
        )
        found = []
        for first in range(0, 1000, 100):
            found.append(samples.batch(range(first, first + 100))["tokens"])
        return found

    whole = read_all()
    assert sum(len(batch) for batch in whole) == 1000
    flip(path, place)
    with pytest.raises(UserError) as raised:
        read_all()
    assert str(path) in str(raised.value)
    assert f"block {place // 8 // BLOCK_BYTES})" in str(raised.value)


def test_blocks_that_are_not_read_are_not_checked(corpus):
    path = path_of(corpus, ".bin")
    assert path.stat().st_size > 3 * BLOCK_BYTES
    flip(path, 8 * (2 * BLOCK_BYTES + 5))
    tokens = open_tokens(corpus, "news", "train").tokens
    size = TOKENS_PER_BLOCK
    tokens[: 2 * size]
    tokens[3 * size :]
    tokens[np.array([0, 3 * size])]
    for key in (slice(2 * size, 2 * size + 1), slice(0, 2 * size + 1), np.array([0, 2 * size])):
        with pytest.raises(UserError, match=r"block 2\)"):
            tokens[key]


def test_a_block_is_checked_once_and_gives_what_is_on_disk(corpus):
    on_disk = np.fromfile(path_of(corpus, ".bin"), np.uint16)
    tokens = open_tokens(corpus, "news", "train").tokens
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, stop = np.sort(rng.integers(0, on_disk.size, 2)).tolist()
        positions = rng.integers(0, on_disk.size, (3, 5))
        assert np.array_equal(tokens[first:stop], on_disk[first:stop])
        assert np.array_equal(tokens[positions], on_disk[positions])
    assert tokens[-5:].tolist() == on_disk[-5:].tolist()
    assert np.array_equal(tokens[:], on_disk)
    assert tokens.checked.all()
    with pytest.raises(IndexError):
        tokens[np.array([-1])]


@pytest.mark.parametrize("suffix", [".idx", ".xxh3"])
def test_any_flipped_bit_of_the_index_or_of_the_checksums_is_found(corpus, suffix):
    path = path_of(corpus, suffix)
    content = path.read_bytes()
    for bit in random.Random(1).sample(range(8 * len(content)), min(200, 8 * len(content))):
        flip(path, bit)
        with pytest.raises(UserError) as raised:
            open_tokens(corpus, "news", "train").tokens[:]
        assert path.stem in str(raised.value)
        with pytest.raises(UserError):
            corpus.verify()
        path.write_bytes(content)


def test_checksums_are_those_of_the_files_and_may_be_absent(corpus):
    content = path_of(corpus, ".bin").read_bytes(), path_of(corpus, ".idx").read_bytes()
    expected = [
        xxhash.xxh3_64_intdigest(part[i : i + BLOCK_BYTES])
        for part in content
        for i in range(0, len(part), BLOCK_BYTES)
    ]
    checksums = path_of(corpus, ".xxh3")
    assert np.fromfile(checksums, "<u8").tolist() == expected
    checksums.unlink()
    with pytest.raises(UserError, match=r"\.xxh3 is missing"):
        Corpus.load(corpus.root)
    news = corpus.domains["news"]
    before = dataclasses.replace(news, train=dataclasses.replace(news.train, block_checksums=None))
    dataclasses.replace(corpus, domains={**corpus.domains, "news": before}).save()
    older = Corpus.load(corpus.root)
    assert older.hash == corpus.hash
    assert np.array_equal(open_tokens(older, "news", "train").tokens[:].tobytes(), content[0])
