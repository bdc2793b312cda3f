from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split

from megatron_chameleon.blend.dataset import (
    BlendedTokens,
    DomainDataset,
    _megatron_config,
    check_enough_tokens,
)
from megatron_chameleon.errors import UserError

SEQ_LENGTH = 16


def lengths_of(rng, num_documents, mean):
    return (1 + rng.poisson(mean, num_documents)).tolist()


@pytest.fixture
def corpus(make_corpus):
    rng = np.random.default_rng(7)
    return make_corpus(
        {
            "long": lengths_of(rng, 40, 50),
            "short": lengths_of(rng, 200, 4),
            "tiny": [9, 9],
            "unused": lengths_of(rng, 5, 10),
        }
    )


def megatron_samples(corpus, split, weights, counts, num_samples, seed):
    """What megatron.core's own classes give, of the domains that are drawn from at all."""
    config = _megatron_config(corpus, split, SEQ_LENGTH, seed)
    drawn = [i for i, count in enumerate(counts) if count]
    datasets = []
    for i in drawn:
        prefix = str(corpus.prefix(corpus.names[i], split))
        indexed = IndexedDataset(prefix)
        documents = np.arange(len(indexed), dtype=np.int32)
        datasets.append(
            GPTDataset(indexed, prefix, documents, int(counts[i]), Split[split], config)
        )
    blended = BlendedDataset(datasets, [weights[i] for i in drawn], num_samples, config)
    samples = [blended[i] for i in range(num_samples)]
    for sample in samples:
        sample["domain"] = torch.tensor(drawn[sample.pop("dataset_id")])
    return samples


# Sample counts that leave a domain at less than one epoch, between, and at many with a final
# epoch shuffled apart or not.
@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("num_samples", [1, 7, 100, 333, 1000])
def test_samples_are_those_of_megatron(corpus, split, num_samples):
    weights = [0.4, 0.35, 0.25, 0.0]
    ours = BlendedTokens(corpus, split, weights, num_samples, SEQ_LENGTH, seed=11)
    theirs = megatron_samples(corpus, split, weights, ours.samples_per_domain, num_samples, 11)
    assert len(ours) == num_samples
    for index, expected in enumerate(theirs):
        sample = ours[index]
        assert sample.keys() == expected.keys()
        for key, value in expected.items():
            assert sample[key].dtype == value.dtype, key
            assert torch.equal(sample[key], value), (index, key)


@pytest.mark.parametrize("num_samples", range(1, 60))
def test_indices_are_those_of_megatron_at_every_epoch_boundary(corpus, num_samples):
    config = _megatron_config(corpus, "train", SEQ_LENGTH, seed=3)
    prefix = str(corpus.prefix("unused", "train"))
    indexed = IndexedDataset(prefix)
    arguments = (indexed, prefix, np.arange(len(indexed), dtype=np.int32), num_samples, Split.train)
    ours, theirs = DomainDataset(*arguments, config), GPTDataset(*arguments, config)
    for name in ("document_index", "sample_index", "shuffle_index"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_samples_have_the_shapes_and_types_promised(corpus):
    sample = BlendedTokens(corpus, "train", [1, 1, 1, 1], 5, SEQ_LENGTH, seed=0)[2]
    assert {key: (tuple(value.shape), value.dtype) for key, value in sample.items()} == {
        "tokens": ((SEQ_LENGTH,), torch.int64),
        "labels": ((SEQ_LENGTH,), torch.int64),
        "loss_mask": ((SEQ_LENGTH,), torch.float32),
        "position_ids": ((SEQ_LENGTH,), torch.int64),
        "domain": ((), torch.int64),
    }
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])


def test_nothing_is_written_beside_the_data(corpus):
    before = sorted(path for path in corpus.root.rglob("*"))
    BlendedTokens(corpus, "train", [1, 1, 1, 1], 50, SEQ_LENGTH, seed=0)
    assert sorted(path for path in corpus.root.rglob("*")) == before


def test_every_sample_of_an_epoch_comes_once(corpus):
    whole = (corpus.domains["long"].train.tokens - 1) // SEQ_LENGTH
    blended = BlendedTokens(corpus, "train", [1, 0, 0, 0], whole, SEQ_LENGTH, seed=5)
    seen = {tuple(blended[i]["tokens"].tolist()) for i in range(whole)}
    assert len(seen) == whole


def test_domains_of_weight_zero_are_never_opened_or_drawn(corpus):
    corpus.prefix("tiny", "train").with_suffix(".bin").unlink()
    corpus.prefix("long", "train").with_suffix(".idx").unlink()
    blended = BlendedTokens(corpus, "train", [0.0, 0.5, 0.0, 0.5], 100, SEQ_LENGTH, seed=0)
    assert blended.samples_per_domain == [0, 50, 0, 50]
    assert {int(blended[i]["domain"]) for i in range(100)} == {1, 3}


@pytest.mark.parametrize("rare", [1e-3, 1e-12, 1e-300])
def test_rare_domains_have_as_many_samples_as_the_index_asks_for(corpus, rare):
    blended = BlendedTokens(corpus, "train", [1.0, rare, rare, rare], 2000, SEQ_LENGTH, seed=0)
    assert sum(blended.samples_per_domain) == 2000
    for index in range(2000):
        blended[index]
    with pytest.raises(IndexError):
        blended[2000]


def test_weights_are_scaled_to_sum_to_one(corpus):
    scaled = BlendedTokens(corpus, "train", [2, 6, 1, 1], 200, SEQ_LENGTH, seed=0)
    assert scaled.samples_per_domain == [40, 120, 20, 20]


def test_a_domain_shorter_than_a_sequence_is_refused_unless_its_weight_is_zero(corpus):
    with pytest.raises(UserError, match=r"'tiny' has 18 tokens in train.*18\+1.*--seq-length"):
        check_enough_tokens(corpus, [1, 1, 1, 1], 18)
    check_enough_tokens(corpus, [1, 1, 1, 1], 17)
    check_enough_tokens(corpus, [1, 1, 0, 1], 18)
    with pytest.raises(UserError, match="'tiny' has 18 tokens in valid"):
        BlendedTokens(corpus, "valid", [1, 1, 1, 1], 10, 18, seed=0)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1, 1, 1], "3 weights for the 4 domains"),
        ([1, -0.1, 1, 1], "weight of 'short' is -0.1"),
        ([1, 1, float("nan"), 1], "weight of 'tiny' is nan"),
        ([0, 0, 0, 0], "all weights are zero"),
    ],
)
def test_weights_that_cannot_be_drawn_by_are_refused(corpus, weights, problem):
    with pytest.raises(UserError, match=problem):
        BlendedTokens(corpus, "train", weights, 10, SEQ_LENGTH, seed=0)
