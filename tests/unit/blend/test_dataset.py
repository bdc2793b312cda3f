from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import get_blend_from_list, normalize

from megatron_chameleon.blend.dataset import BlendedTokens, check_enough_tokens, check_weights
from megatron_chameleon.blend.megatron_order import build_blending_indices
from megatron_chameleon.blend.order import MAX_SAMPLES
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase
from megatron_chameleon.corpus.data_path import DataPath
from megatron_chameleon.corpus.domains import open_data_path, open_domains
from megatron_chameleon.errors import UserError
from tests.small_corpus import without_checksums
from tests.unit.blend.inputs import dataset_config

SEQ_LENGTH = 16
FREE = ("epoch", "feistel")


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


def blended(corpus, weights, num_samples, split="train", **options):
    schedule = weights if isinstance(weights, MixtureSchedule) else MixtureSchedule.fixed(weights)
    settings = {"seq_length": SEQ_LENGTH, "seed": 11, **options}
    return BlendedTokens(open_domains(corpus).of(split), schedule, num_samples, **settings)


@pytest.fixture
def megatron_samples(corpus, one_rank, tmp_path):
    """Return ``megatron_samples(path, split, num_samples)``, which uses Megatron's own builder."""

    def build(path, split, num_samples):
        config = dataset_config(
            corpus.tokenizer,
            random_seed=11,
            sequence_length=SEQ_LENGTH,
            blend=get_blend_from_list(path.split()),
            split=split,
            path_to_cache=str(tmp_path / "cache"),
        )
        sizes = [num_samples, 0, 0]
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]

    return build


def of_data_path(corpus, text, num_samples, split="1", weights=None):
    """Open the samples of ``--data-path text``; pass sizes as ``weights`` if it has no weights."""
    path = DataPath.parse(text)
    return BlendedTokens(
        open_data_path(path, split, corpus.tokenizer),
        MixtureSchedule.fixed(path.weights or weights),
        num_samples,
        SEQ_LENGTH,
        seed=11,
        by_size=not path.weights,
    )


def assert_same_samples(ours, theirs, num_samples):
    assert len(ours) == num_samples
    for index in range(num_samples):
        expected, sample = theirs[index], ours[index]
        if "dataset_id" in expected:
            assert int(sample.pop("domain")) == expected.pop("dataset_id")
        for key, value in expected.items():
            assert sample[key].dtype == value.dtype, key
            assert torch.equal(sample[key], value), (index, key)


THREE_DOMAINS = {"long": "0.4 ", "short": "0.35 ", "tiny": "0.25 "}
TWO_DOMAINS = {"long": "30 ", "short": "70 "}


# Numbers of samples that need less than one epoch of a domain, one to two epochs, or many; Megatron
# shuffles the final epoch of some of them separately.
@pytest.mark.parametrize(
    ("num_samples", "split", "weights"),
    [
        *((number, "100,0,0", THREE_DOMAINS) for number in (1, 100, 1000)),
        (200, "90,7,3", TWO_DOMAINS),
        (200, "50,40,10", TWO_DOMAINS),
        *((number, "1", {"unused": ""}) for number in (*range(1, 12), 59, 150)),
    ],
)
def test_samples_of_a_data_path_match_megatron(
    corpus, megatron_samples, num_samples, split, weights
):
    text = " ".join(f"{weight}{corpus.prefix(name, 'train')}" for name, weight in weights.items())
    ours = of_data_path(corpus, text, num_samples, split, [1.0])
    assert_same_samples(ours, megatron_samples(text, split, num_samples), num_samples)


# Normalizing these weights twice changes their last bit, and with it the order.
SCALED_TWICE = (18, 32, 9, 3, 34, 12, 19, 15, 13, 13, 12)


@pytest.mark.parametrize("by_size", [False, True])
def test_ties_are_resolved_as_in_megatron(make_corpus, megatron_samples, by_size):
    corpus = make_corpus({f"d{i}": [SEQ_LENGTH * n + 1] for i, n in enumerate(SCALED_TWICE)})
    text = " ".join(
        f"{'' if by_size else weight} {corpus.prefix(name, 'train')}"
        for weight, name in zip(SCALED_TWICE, corpus.names, strict=True)
    )
    ours = of_data_path(corpus, text, 67, weights=SCALED_TWICE)
    assert_same_samples(ours, megatron_samples(text, "1", 67), 67)
    once, twice = normalize(list(SCALED_TWICE)), normalize(normalize(list(SCALED_TWICE)))
    orders = [build_blending_indices(weights, 67)[0].tolist() for weights in (once, twice)]
    assert orders[0] != orders[1]


def test_blending_by_size_matches_megatron_for_one_epoch(make_corpus, megatron_samples):
    """Megatron builds one epoch: 43 * (7 / 43) > 7 in float64 must not be rounded up to 8."""
    sizes = (7, 4, 22, 1, 9)
    corpus = make_corpus({f"d{n}": [SEQ_LENGTH] * n + [1] for n in sizes})
    text = " ".join(str(corpus.prefix(name, "train")) for name in corpus.names)
    one = of_data_path(corpus, text, 43, weights=sizes)
    assert_same_samples(one, megatron_samples(text, "1", 43), 43)
    more = of_data_path(corpus, text, 100, weights=sizes)
    batch = more.batch(range(100))
    assert abs(more.counts(100) - 100 / 43 * np.array(sizes)).max() < 1
    # Each domain has the samples that Megatron builds for it alone.
    for number, count in enumerate(more.counts(100).tolist()):
        alone = megatron_samples(text.split()[number], "1", count)
        found = batch["tokens"][batch["domain"] == number]
        assert torch.equal(found, torch.stack([alone[i]["tokens"] for i in range(count)]))


@pytest.mark.parametrize("permutation", ["megatron", *FREE])
def test_a_batch_stacks_its_samples(corpus, permutation):
    dataset = blended(corpus, [3, 2, 1, 0], 300, permutation=permutation)
    indices = np.random.default_rng(0).permutation(300)[:40].tolist()
    batch = blended(corpus, [3, 2, 1, 0], 300, permutation=permutation).batch(indices)
    for row, index in enumerate(indices):
        for key, value in dataset[index].items():
            assert torch.equal(batch[key][row], value), key
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert (batch["tokens"].dtype, batch["tokens"].shape) == (torch.int64, (40, SEQ_LENGTH))


@pytest.mark.parametrize("permutation", ["megatron", *FREE])
def test_domains_without_weight_are_never_opened_and_rare_ones_can_be_read(corpus, permutation):
    Path(f"{corpus.prefix('unused', 'train')}.bin").unlink()
    for rare in (1e-3, 1e-12, 1e-300):
        dataset = blended(corpus, [1.0, rare, rare, 0.0], 2000, permutation=permutation)
        assert dataset.counts(2000).sum() == 2000
        assert set(dataset.batch(range(2000))["domain"].tolist()) <= {0, 1, 2}
        with pytest.raises(IndexError):
            dataset[2000]


def stream_of(dataset, domain, num_samples):
    """The tokens of one domain's samples, in order."""
    batch = dataset.batch(range(num_samples))
    return batch["tokens"][batch["domain"] == domain]


@pytest.mark.parametrize("permutation", FREE)
@pytest.mark.parametrize("remainder", [0, 3])
def test_every_token_is_read_once_per_epoch(make_corpus, permutation, remainder):
    # With a remainder, some windows begin in one epoch and end in the next.
    size, epochs = SEQ_LENGTH * 13 + remainder, SEQ_LENGTH
    corpus = without_checksums(make_corpus({"a": [1] * size}))  # a document per token
    numbers = np.arange(1, size + 1, dtype=np.uint16)
    Path(f"{corpus.prefix('a', 'train')}.bin").write_bytes(numbers.tobytes())
    num_samples = size * epochs // SEQ_LENGTH
    dataset = blended(corpus, [1], num_samples, permutation=permutation)
    batch = dataset.batch(range(num_samples))
    # After SEQ_LENGTH epochs, a window ends at the end of an epoch.
    assert Counter(batch["tokens"].flatten().tolist()) == dict.fromkeys(numbers.tolist(), epochs)
    assert Counter(batch["labels"].flatten().tolist()).keys() == set(numbers.tolist())
    orders = batch["tokens"].flatten().split(size)
    assert len({tuple(order.tolist()) for order in orders}) == epochs


@pytest.mark.parametrize("permutation", FREE)
@pytest.mark.parametrize("boundary", [1, 50, 119])
def test_a_change_of_weights_neither_loses_nor_repeats_a_sample(corpus, permutation, boundary):
    options = {"permutation": permutation}
    before, after = (5, 3, 2, 0), (1, 1, 0, 6)
    schedule = MixtureSchedule((Phase(0, before), Phase(boundary, after)))
    planned = blended(corpus, schedule, 120, **options)
    for domain, count in enumerate(planned.counts(120).tolist()):
        alone = [float(other == domain) for other in range(4)]
        expected = blended(corpus, alone, max(count, 1), **options).batch(range(count or 1))
        assert torch.equal(stream_of(planned, domain, 120), expected["tokens"][:count])
    # A change during the run gives the same samples as a planned change.
    changed = blended(corpus, before, 120, **options)
    first = changed.batch(range(boundary))
    changed.change_weights(boundary, after)
    second = changed.batch(range(boundary, 120))
    for key, value in planned.batch(range(120)).items():
        assert torch.equal(torch.cat([first[key], second[key]]), value), key
    assert changed.schedule == schedule


@pytest.mark.parametrize("bound_of_kind", [("random", 2), ("nearly 0 or equal", 3)], ids=str)
@pytest.mark.parametrize("num_domains", [4, 30])
def test_counts_follow_weights_that_change_often(make_corpus, num_domains, bound_of_kind):
    """The bounds hold only for the schedules of this test; see BlendOrder."""
    kind, bound = bound_of_kind
    data = open_domains(make_corpus({"a": [SEQ_LENGTH + 1]}))
    data = dataclasses.replace(data, names=data.names * num_domains)
    rng = np.random.default_rng(num_domains)
    starts = [0, *np.cumsum(rng.integers(1, 60, 100)).tolist()]
    weights = rng.dirichlet(np.ones(num_domains), len(starts))
    if kind != "random":
        weights = np.where(weights > np.median(weights, axis=1, keepdims=True), 1, 1e-9)
    weights /= weights.sum(axis=1, keepdims=True)
    schedule = MixtureSchedule(tuple(map(Phase, starts, map(tuple, weights.tolist()))))
    dataset = BlendedTokens(data, schedule, starts[-1] + 50, SEQ_LENGTH, 1, "epoch")
    domains, numbers = dataset.locate(np.arange(len(dataset)))
    counts = np.cumsum(np.eye(num_domains, dtype=int)[domains], axis=0)
    np.testing.assert_array_equal(numbers, counts[np.arange(len(dataset)), domains] - 1)
    targets = np.cumsum([schedule.weights_at(sample) for sample in range(len(dataset))], axis=0)
    assert np.abs(counts - targets).max() < bound
    for samples in (1, starts[5], starts[5] + 1, len(dataset)):
        assert dataset.counts(samples).tolist() == counts[samples - 1].tolist()


def test_counts_follow_ramps(make_corpus):
    data = open_domains(make_corpus({"a": [SEQ_LENGTH + 1]}))
    data = dataclasses.replace(data, names=data.names * 9)
    a, b, c = 3 * np.random.default_rng(9).dirichlet(np.ones(9), 3)
    schedule = MixtureSchedule.fixed(a).ramp(0, 300, b).ramp(300, 1700, c)
    schedule = schedule.changed(2000, a).ramp(2100, 2101, b).ramp(2200, 2600, a)
    # The plain reference: the weights in the middle of each sample.
    knots = [0, 300, 1700, 2000, 2000, 2100, 2101, 2200, 2600]
    weights = np.array([a, b, c, c, a, a, b, b, a]) / 3
    middles = np.arange(2800) + 0.5
    shares = np.array([np.interp(middles, knots, weights[:, domain]) for domain in range(9)]).T
    targets = np.cumsum(shares, axis=0)
    dataset = BlendedTokens(data, schedule, 2800, SEQ_LENGTH, 1, "epoch")
    domains, numbers = dataset.locate(np.arange(2800))
    counts = np.cumsum(np.eye(9, dtype=int)[domains], axis=0)
    np.testing.assert_array_equal(numbers, counts[np.arange(2800), domains] - 1)
    assert np.abs(counts - targets).max() < 2
    for sample in (0, 17, 299, 300, 1698, 2000, 2100, 2101, 2400, 2799):
        found = np.array(schedule.weights_at(sample))
        np.testing.assert_allclose(found / found.sum(), shares[sample], rtol=1e-12)
        np.testing.assert_allclose(schedule.target_samples(sample + 1), targets[sample])
        assert dataset.counts(sample + 1).tolist() == counts[sample].tolist()
    # Steps stand for a ramp: their targets differ from the ramp's by about a quarter of a sample.
    stepped = schedule.stepped()
    assert not any(phase.ramp_samples for phase in stepped.phases)
    found = np.array([stepped.target_samples(sample + 1) for sample in range(0, 2800, 7)])
    assert np.abs(found - targets[::7]).max() <= 0.3


def test_weights_of_samples_that_were_read_cannot_change(corpus):
    dataset = blended(corpus, (1, 1, 0, 0), 100, permutation="epoch")
    dataset.batch(range(40))
    with pytest.raises(ValueError, match="samples up to 40 have been read"):
        dataset.change_weights(39, (0, 1, 2, 3))
    with pytest.raises(UserError, match="weight of 'long' is -1"):
        dataset.change_weights(40, (-1, 1, 2, 3))
    assert len(dataset.schedule.phases) == 1
    with pytest.raises(UserError, match="--permutation epoch"):
        blended(corpus, (1, 1, 0, 0), 100).change_weights(40, (0, 1, 2, 3))


@pytest.mark.parametrize("permutation", FREE)
def test_the_order_of_a_corpus_depends_only_on_seed_name_and_epoch(
    corpus, make_corpus, permutation
):
    def stream(found, name, weights, **options):
        dataset = blended(found, weights, 120, permutation=permutation, **options)
        return stream_of(dataset, found.names.index(name), 120)[:20]

    expected = stream(corpus, "short", (1, 1, 1, 1))
    assert torch.equal(stream(corpus, "short", (0, 9, 1, 1)), expected)
    assert not torch.equal(stream(corpus, "short", (1, 1, 1, 1), seed=12), expected)
    fewer = dataclasses.replace(corpus, domains={"short": corpus.domains["short"]})
    assert torch.equal(stream(fewer, "short", (1,)), expected)
    renamed = dataclasses.replace(corpus, domains={"other": corpus.domains["short"]})
    assert not torch.equal(stream(renamed, "other", (1,)), expected)


def test_an_order_that_is_too_large_is_rejected(corpus):
    with pytest.raises(UserError, match="--permutation feistel"):
        blended(corpus, [1, 1, 1, 0], MAX_SAMPLES)
    with pytest.raises(UserError, match="--train-iters"):
        blended(corpus, [1, 1, 1, 0], MAX_SAMPLES + 1, permutation="feistel")


@pytest.fixture
def numbered_corpus(make_corpus):
    """Two domains of 200 tokens, numbered from 1, in three and in 67 documents."""
    lengths = {"long": [70, 50, 80], "short": [3] * 66 + [2]}
    corpus = without_checksums(make_corpus(lengths))
    for name in lengths:
        numbers = np.arange(1, 201, dtype=np.uint16)
        Path(f"{corpus.prefix(name, 'train')}.bin").write_bytes(numbers.tobytes())
    return corpus, {name: np.split(numbers, np.cumsum(n)[:-1]) for name, n in lengths.items()}


def sampled_tokens(dataset):
    """Count how often each domain's tokens are sampled."""
    batch = dataset.batch(range(len(dataset)))
    tokens, domains = batch["tokens"].numpy(), batch["domain"].numpy()
    return [Counter(tokens[domains == i].flatten().tolist()) for i in range(2)]


@pytest.mark.parametrize("permutation", ["megatron", *FREE])
@pytest.mark.parametrize("is_corpus", [True, False])
def test_a_cut_domain_has_the_epochs_of_the_target_run(numbered_corpus, permutation, is_corpus):
    """Measure epochs by counting how often every token of a domain is sampled."""
    corpus, documents = numbered_corpus
    data = open_domains(corpus)
    if not is_corpus:  # a range of sequences within the files, without the last ones
        text = f"1 {corpus.prefix('long', 'train')} 3 {corpus.prefix('short', 'train')}"
        data = open_data_path(DataPath.parse(text), "70,30,0", corpus.tokenizer)
    run, target = 40 * SEQ_LENGTH, 120 * SEQ_LENGTH
    cut, smaller = data.cut(run, target), data.cut(run, 2 * target)
    assert data.cut(run, None) == data.cut(run, run) == data
    sizes = [domain.tokens for domain in cut.domains]
    assert sizes == [domain.tokens // 3 for domain in data.domains]
    settings = {"seq_length": SEQ_LENGTH, "permutation": permutation}
    kept = []
    for seed, weights in ((1, (1, 3)), (2, (3, 1))):
        schedule = MixtureSchedule.fixed(weights)
        proxy = BlendedTokens(cut, schedule, 40, seed=seed, **settings)
        whole = BlendedTokens(data, schedule, 120, seed=seed, **settings)
        for found, real, size, domain in zip(
            sampled_tokens(proxy), sampled_tokens(whole), sizes, data.domains, strict=True
        ):
            epochs = found.total() / size
            assert epochs == pytest.approx(real.total() / domain.tokens, rel=0.02)
            assert len(found) == size
            # Windows at the ends of epochs add or remove one. Megatron shuffles the windows of
            # several epochs together, and the samples are not all of them.
            assert max(found.values()) <= np.ceil(epochs) + 1
            assert min(found.values()) >= np.floor(epochs) - (3 if permutation == "megatron" else 1)
        kept.append([set(found) for found in sampled_tokens(proxy)])
    for number, (some, others) in enumerate(zip(*kept, strict=True)):
        text = some | others  # the same for every seed and weight
        assert len(text) == sizes[number]
        of_domain = list(documents.values())[number][: data.domains[number].stop]
        parts = [text.intersection(document.tolist()) for document in of_domain]
        cut_short = [i for i, part in enumerate(parts) if 0 < len(part) < len(of_domain[i])]
        assert sum(map(len, parts)) == sizes[number]
        assert len(cut_short) <= 1
        for i in cut_short:
            assert parts[i] == set(of_domain[i][-len(parts[i]) :].tolist())
        if number:
            assert parts.index(set()) < sizes[number] // 3  # not the first documents of the file
        file = smaller.domains[number].open()
        assert text > {int(token) for i in range(len(file)) for token in file.get(i)}
        assert file.get(len(file) - 1)[-1] in {document[-1] for document in of_domain}


def test_a_cut_that_cannot_be_made_is_rejected(corpus):
    data = open_domains(corpus)
    with pytest.raises(UserError, match="--target-tokens 99: must be >= 100"):
        data.cut(100, 99)
    cut = data.cut(100, 200)  # half of 18 tokens
    with pytest.raises(UserError, match=r"'tiny' .* is cut to 9 of its 18 tokens"):
        BlendedTokens(cut, MixtureSchedule.fixed([1, 1, 1, 0]), 10, SEQ_LENGTH, 1, "feistel")
    BlendedTokens(cut, MixtureSchedule.fixed([1, 1, 0, 0]), 10, SEQ_LENGTH, 1, "feistel")


def test_short_domains_and_invalid_weights_are_rejected(make_corpus):
    data = open_domains(make_corpus({"a": [5, 3, 9, 1], "b": [9, 9]}))
    with pytest.raises(UserError, match="--seq-length"):
        check_enough_tokens(data, [1, 0], 18)
    check_enough_tokens(data, [1, 1], 17)
    check_enough_tokens(data, [0, 0], 18)
    for weights in ([1], [1, -0.1], [1, float("nan")], [0, 0], [1e308, 1e308]):
        with pytest.raises(UserError, match="weight"):
            check_weights(data, weights)
