"""tools/discover_domains.py on one rank: from text without labels to a corpus of domains."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.metrics import adjusted_rand_score, pairwise_distances_argmin

from megatron_chameleon.artifacts import SPLITS, CheckpointRecord, Corpus, Mixture, find_checkpoint
from megatron_chameleon.artifacts.corpus import Domain, DomainSplit
from megatron_chameleon.artifacts.discovered import CENTROIDS_NAME, DiscoveredDomains
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.corpus.indexed import IndexedWriter, open_split, open_tokens
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.discovery import vectors
from megatron_chameleon.methods.discovery.discover import discover_domains, fit_clusters
from megatron_chameleon.methods.discovery.options import DiscoverOptions, DocumentEmbeddingOptions
from megatron_chameleon.methods.discovery.vectors import DocumentVectors
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.options.mixture import RecipeOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.training import OptimizerOptions
from megatron_chameleon.training.pretrain import pretrain
from tests.small_corpus import DOMAINS, word_tokenizer, write_small_corpus

HASH_OF_ANOTHER = "9" * 64


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Three kinds of text, each a domain, with the tokenizer beside them.

    Of the small corpus's domains, those whose step has no divisor in common with the ring: every
    document goes around all of it, and there are no kinds within a kind.
    """
    root = tmp_path_factory.mktemp("labelled")
    tokenizer = word_tokenizer(root / "tokenizer.json")
    steps = {1: DOMAINS[0], 5: DOMAINS[1], 7: DOMAINS[2]}
    names = [steps.get(step, f"step {step}") for step in range(1, 8)]
    corpus = write_small_corpus(root, names, tokenizer_hash=sha256_of_files(tokenizer))
    chosen = {name: corpus.domains[name] for name in steps.values()}
    dataclasses.replace(corpus, domains=chosen).save()
    return Corpus.load(root)


def written(corpus, root, kinds):
    """The same documents as one domain 'web', in an order by their hashes.

    ``kinds(name, split)`` says which kinds are in which split.
    """
    root.mkdir(parents=True)
    shutil.copy(corpus.root / "tokenizer.json", root)
    splits = {}
    for split in SPLITS:
        mixed = [
            text
            for name in corpus.names
            if kinds(name, split)
            for text in texts_of(corpus, name, split)
        ]
        mixed.sort(key=lambda text: hashlib.sha256(text).digest())
        writer = IndexedWriter(root / f"web-{split}", corpus.dtype)
        for text in mixed:
            writer.add(np.frombuffer(text, corpus.dtype))
        digest = writer.finish()
        counts = (writer.documents, writer.tokens, 5 * writer.tokens)
        splits[split] = DomainSplit(f"web-{split}", *counts, digest)
    dataclasses.replace(corpus, root=root, domains={"web": Domain(**splits)}).save()
    return Corpus.load(root)


def texts_of(corpus, name, split):
    """The documents of one split of a domain, by Megatron's own reader."""
    return [item.tobytes() for item in open_split(corpus, name, split)]


@pytest.fixture(scope="module")
def web(labelled, tmp_path_factory):
    """The same text without labels."""
    return written(labelled, tmp_path_factory.mktemp("web") / "corpus", lambda name, split: True)


@pytest.fixture(scope="module")
def proxy(web, pretrain_options, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("proxy") / "nano"
    optimizer = OptimizerOptions(lr=3e-3, lr_warmup_iters=2)
    pretrain(pretrain_options(run_dir, corpus=web.root, train_iters=12, optimizer=optimizer))
    return run_dir


@pytest.fixture
def options(web, proxy, tmp_path):
    """``options(**changes)``: those of the tool, for three clusters."""

    def make(**changes):
        made = DiscoverOptions(
            corpus=web.root,
            checkpoint=proxy,
            discover="3",
            output=tmp_path / "found",
            embedding=DocumentEmbeddingOptions(fit_windows=200),
        )
        return dataclasses.replace(made, **changes)

    return make


@pytest.fixture
def discover(options):
    """``discover(**changes)``: run the tool and read the corpus that it wrote."""

    def run(**changes):
        given = options(**changes)
        discover_domains(given)
        found = Corpus.load(given.output)
        found.verify()
        return found

    return run


@pytest.fixture(scope="module")
def kind_of(labelled):
    """Document -> its kind and split."""
    return {
        text: (name, split)
        for name in labelled.names
        for split in SPLITS
        for text in texts_of(labelled, name, split)
    }


def test_kinds_of_text_are_found_again_and_every_document_is_there_once(
    discover, kind_of, labelled
):
    found = discover()
    assert found.names == ["cluster-00", "cluster-01", "cluster-02"]
    kinds: dict[str, Counter[str]] = {name: Counter() for name in found.names}
    documents = []
    for name in found.names:
        for split in SPLITS:
            for text in texts_of(found, name, split):
                kind, of_split = kind_of[text]
                assert of_split == split
                kinds[name][kind] += 1
                documents.append(text)
    assert sorted(documents) == sorted(kind_of)
    assert {kind for each in kinds.values() for kind in each} == set(DOMAINS)
    assert all(len(each) == 1 for each in kinds.values()), kinds
    sizes = [sum(found.domains[name].split(s).tokens for s in SPLITS) for name in found.names]
    assert sizes == sorted(sizes, reverse=True)
    assert found.tokenizer == labelled.tokenizer
    bytes_ = [d.split(s).text_bytes for d in found.domains.values() for s in SPLITS]
    assert sum(bytes_) == 5 * sum(sizes)


def test_the_clusters_are_described(discover, options, web, proxy, kind_of, capsys):
    found = discover()
    said = capsys.readouterr().out
    record = DiscoveredDomains.load(found.root)
    checkpoint = CheckpointRecord.load(find_checkpoint(proxy))
    assert record.provenance.inputs == {"corpus": web.hash, "checkpoint": checkpoint.hash}
    assert found.provenance == record.provenance
    assert (record.num_clusters, record.dissolved, record.divided) == (3, 0, ["web"])
    assert (record.layer, record.window_length, record.windows_per_document) == (2, 32, 4)
    assert record.fitted_windows == 200
    assert record.cost.flops > 0
    assert list(record.domains) == found.names
    for name, domain in record.domains.items():
        splits = found.domains[name]
        assert domain.documents == sum(splits.split(split).documents for split in SPLITS)
        assert domain.tokens == {split: splits.split(split).tokens for split in SPLITS}
        assert domain.shares == {"web": 1.0}
        own = texts_of(found, name, "train")
        assert len(domain.nearest) == 3
        assert [near.distance for near in domain.nearest] == sorted(
            near.distance for near in domain.nearest
        )
        for near in domain.nearest:
            tokens = open_tokens(web, near.domain, "train").get(near.document)
            assert tokens.tobytes() in own
            assert near.text == " ".join(map(str, tokens[:-1].tolist()))[:100]
            assert near.text in said
        assert f"{name}: 100% web" in said
    assert f"3: {record.silhouettes[3]:.3f}" in said
    assert f"tools/compute_mixture.py --corpus {found.root} --checkpoint {proxy}" in said
    arrays = load_file(found.root / CENTROIDS_NAME)
    assert arrays["centroids"].shape == (3, 64)
    assert arrays["mean"].shape == arrays["deviation"].shape == (64,)


def test_what_is_written_can_be_weighed(discover, proxy, tmp_path):
    found = discover()
    mixture = tmp_path / "mixture.json"
    weighting = RecipeOptions(recipe="scaled", bootstrap_resamples=20)
    compute_mixture(
        ChameleonOptions(corpus=found.root, checkpoint=proxy, output=mixture, weighting=weighting)
    )
    assert list(Mixture.load(mixture).weights) == found.names


def test_of_several_numbers_the_one_of_the_best_silhouette_is_taken(discover, capsys):
    found = discover(discover="5, 2,3")
    record = DiscoveredDomains.load(found.root)
    assert list(record.silhouettes) == [2, 3, 5]
    best = max(record.silhouettes, key=lambda k: record.silhouettes[k])
    assert best == record.num_clusters == len(found.names) == 3
    said = capsys.readouterr().out
    assert ", ".join(f"{k}: {score:.3f}" for k, score in record.silhouettes.items()) in said


def test_the_seed_alone_decides_and_other_numbers_take_no_embedding(
    discover, tmp_path, monkeypatch
):
    first = discover()

    def no_proxy(*_):
        raise AssertionError("the proxy is not needed")

    again = discover(output=tmp_path / "anew")  # with embeddings of its own
    assert again.hash == first.hash
    monkeypatch.setattr(vectors, "open_reader", no_proxy)
    store = tmp_path / "found.embeddings"
    other = discover(output=tmp_path / "other", discover="2", store=store)
    assert len(other.names) == 2
    with pytest.raises(AssertionError, match="not needed"):
        discover(output=tmp_path / "third", store=store, seed=1)


def test_a_run_that_was_killed_goes_on(discover, options, tmp_path, monkeypatch):
    monkeypatch.setattr(vectors, "BLOCK_DOCUMENTS", 50)
    whole = discover(output=tmp_path / "whole")
    write = DocumentVectors.write
    written_blocks: list[Path] = []

    def killed(self, block, vectors):
        if len(written_blocks) == 2:
            raise KeyboardInterrupt
        write(self, block, vectors)
        written_blocks.append(self.path(block))

    with monkeypatch.context() as patch:
        patch.setattr(DocumentVectors, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            discover_domains(options())
    assert not options().output.exists()
    before = [path.stat().st_mtime_ns for path in written_blocks]
    found = discover()
    assert [path.stat().st_mtime_ns for path in written_blocks] == before
    assert found.hash == whole.hash
    assert [path.name for path in found.root.iterdir() if path.name.startswith(".")] == []


def test_a_run_that_ends_while_it_writes_leaves_no_corpus(discover, options, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(DiscoveredDomains, "save", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            discover_domains(options())
    assert not options().output.exists()
    assert len(discover().names) == 3


def test_some_domains_are_divided_and_the_others_stay(discover, labelled):
    found = discover(corpus=labelled.root, domains="news, poems", discover="2", cluster_name="kind")
    assert found.names == ["code", "kind-00", "kind-01"]
    assert found.domain_hash("code") == labelled.domain_hash("code")
    record = DiscoveredDomains.load(found.root)
    assert record.divided == ["news", "poems"]
    shares = {name: domain.shares for name, domain in record.domains.items()}
    assert sorted(map(tuple, shares.values())) == [("news",), ("poems",)]


def test_a_cluster_without_held_out_text_is_dissolved(labelled, discover, tmp_path):
    lacking = written(
        labelled, tmp_path / "lacking", lambda name, split: (name, split) != ("code", "valid")
    )
    with pytest.warns(UserWarning, match=r"1 of 3 clusters had too little text in train, valid"):
        found = discover(corpus=lacking.root)
    record = DiscoveredDomains.load(found.root)
    assert (record.num_clusters, record.dissolved, len(found.names)) == (3, 1, 2)
    before, after = (
        sum(d.split(s).documents for d in each.domains.values() for s in SPLITS)
        for each in (lacking, found)
    )
    assert before == after
    assert all(found.domains[name].valid.tokens for name in found.names)


@pytest.mark.parametrize("name", ["", "a,b", "a\nb"])
def test_what_is_no_name_of_a_domain_is_refused_for_clusters(discover, name):
    with pytest.raises(UserError, match=r"--cluster-name .*: must be a domain name"):
        discover(cluster_name=name)


def test_a_name_of_any_of_the_numbers_tried_may_be_taken(discover, labelled, tmp_path):
    """The names have the digits of the largest number, whichever is chosen."""
    first = discover(corpus=labelled.root, domains="news,poems", discover="2")
    assert "cluster-00" in first.names
    with pytest.raises(UserError, match="the corpus keeps a domain 'cluster-00'"):
        discover(corpus=first.root, domains="code", discover="2", output=tmp_path / "again")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"discover": "1"}, "--discover 1: must be >= 2"),
        ({"discover": "many"}, "--discover many: pass a number of clusters, or several"),
        ({"discover": "3,181"}, "--discover 181: there are only 180 training documents"),
        ({"domains": "web,net"}, "--domains web,net: there is no domain 'net'"),
        ({"min_tokens_per_split": 100_000}, "--min-tokens-per-split 100000: the text to cluster"),
        ({"embedding": DocumentEmbeddingOptions(fit_windows=2)}, "--fit-windows 2: fewer than"),
        (
            {"embedding": DocumentEmbeddingOptions(windows_per_document=0)},
            "--windows-per-document 0: ",
        ),
        ({"embedding": DocumentEmbeddingOptions(layer=9)}, "--layer 9: the model has layers 1"),
        (
            {"embedding": DocumentEmbeddingOptions(window_length=33)},
            "--window-length 33: the model",
        ),
        (
            {"parallel": ParallelOptions(tensor_model_parallel_size=2)},
            "1 rank(s) cannot be laid out",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(options, changes, message, tmp_path):
    with pytest.raises(UserError) as refused:
        discover_domains(options(**changes))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_that_is_there_is_not_touched(discover, options):
    found = discover()
    with pytest.raises(UserError, match="already holds a corpus; choose another --output"):
        discover_domains(options(discover="2"))
    assert Corpus.load(found.root) == found


def blobs(num_clusters, size, width=24, noise=0.3):
    """[n, width] float32 vectors around random directions, with a large common mean; labels [n]."""
    rng = np.random.default_rng(num_clusters)
    labels = rng.integers(0, num_clusters, size)
    centres = rng.normal(size=(num_clusters, width))
    vectors = 50 + centres[labels] + noise * rng.normal(size=(size, width))
    vectors[:, 0] *= 1000  # one feature varies far more than the others
    return vectors.astype(np.float32), labels


@pytest.mark.parametrize("num_clusters", [2, 5, 12])
def test_clusters_of_known_vectors_are_found_and_counted(num_clusters):
    windows, labels = blobs(num_clusters, 3000)
    tried = sorted({2, num_clusters, num_clusters + 3})
    fit = fit_clusters(windows, tried, seed=1, restarts=10)
    assert len(fit.centroids) == num_clusters
    assert list(fit.silhouettes) == tried
    found = pairwise_distances_argmin(fit.scaled(windows), fit.centroids)
    assert adjusted_rand_score(labels, found) > 0.99
    scaled = (windows - windows.mean(axis=0, dtype=float)) / windows.std(axis=0, dtype=float)
    scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
    np.testing.assert_allclose(fit.scaled(windows), scaled, atol=1e-4)
    assert fit.inertia == pytest.approx(np.square(scaled - fit.centroids[found]).sum(), rel=1e-3)


def test_the_arguments_alone_decide_the_clusters():
    windows, _ = blobs(4, 500)
    first, again = (fit_clusters(windows, [3, 4], seed=5, restarts=3) for _ in range(2))
    assert np.array_equal(first.centroids, again.centroids)
    assert first.silhouettes == again.silhouettes


@pytest.mark.parametrize("windows", [np.eye(3, 5), np.repeat(np.eye(3, 5), 40, axis=0)])
def test_vectors_that_are_too_few_or_too_similar_are_rejected(windows):
    with pytest.raises(UserError, match=r"--discover 4: .* too few or too similar"):
        fit_clusters(windows.astype(np.float32), [2, 4], seed=0, restarts=3)
