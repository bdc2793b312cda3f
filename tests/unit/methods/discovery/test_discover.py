"""tools/discover_domains.py on one rank: from unlabelled text to a corpus of domains."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from safetensors.numpy import load_file
from sklearn.metrics import adjusted_rand_score, pairwise_distances_argmin
from tqdm import tqdm

from megatron_chameleon.artifacts import (
    SPLITS,
    CheckpointRecord,
    Corpus,
    EmbeddingStore,
    find_checkpoint,
)
from megatron_chameleon.artifacts.discovered import CENTROIDS_NAME, DiscoveredDomains
from megatron_chameleon.artifacts.files import sha256_of_files
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.import_corpus import import_corpus
from megatron_chameleon.corpus.options import ImportOptions
from megatron_chameleon.corpus.windows import spread_windows
from megatron_chameleon.embedding.embed import embed_windows
from megatron_chameleon.embedding.proxy import Proxy
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.discovery import DiscoverOptions, DocumentEmbeddingOptions
from megatron_chameleon.methods.discovery import discover as discover_module
from megatron_chameleon.methods.discovery.discover import discover_domains, fit_clusters
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.training.options import OptimizerOptions
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import DOMAINS, word_tokenizer, write_corpus, write_small_corpus


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A corpus of three domains, whose documents walk around rings of tokens in steps of 1, 5 or 7.

    Each step is coprime to the length of a ring, so that every walk visits the whole ring, and the
    documents of a domain form one cluster.
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
    """Write the documents of ``corpus`` as one domain 'web', ordered by their hashes.

    ``kinds(name, split)`` selects the kinds in each split.
    """
    mixed = {}
    for split in SPLITS:
        kept = [name for name in corpus.names if kinds(name, split)]
        texts = [text for name in kept for text in texts_of(corpus, name, split)]
        texts.sort(key=lambda text: hashlib.sha256(text).digest())
        mixed[split] = [np.frombuffer(text, corpus.dtype)[:-1] for text in texts]
    web = write_corpus(root, {"web": mixed}, corpus.tokenizer.sha256)
    shutil.copy(corpus.root / "tokenizer.json", root)
    return web


def texts_of(corpus, name, split):
    """Read the documents of one split of a domain with Megatron's reader."""
    return [item.tobytes() for item in IndexedDataset(str(corpus.prefix(name, split)))]


@pytest.fixture(scope="module")
def web(labelled, tmp_path_factory):
    """The text of ``labelled`` in a single domain."""
    return written(labelled, tmp_path_factory.mktemp("web") / "corpus", lambda name, split: True)


@pytest.fixture(scope="module")
def proxy(web, pretrain_options, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("proxy") / "nano"
    optimizer = OptimizerOptions(lr=3e-3, lr_warmup_iters=2)
    pretrain(pretrain_options(run_dir, corpus=web.root, train_iters=12, optimizer=optimizer))
    return run_dir


@pytest.fixture(scope="module")
def three(web, proxy, tmp_path_factory):
    """Options for three clusters."""
    output = tmp_path_factory.mktemp("three") / "found"
    embedding = DocumentEmbeddingOptions(fit_windows=200)
    return DiscoverOptions(web.root, proxy, "3", output, embedding=embedding)


@pytest.fixture
def options(three, tmp_path):
    """``options(**changes)``: options for three clusters, written to a new folder."""
    return partial(dataclasses.replace, three, output=tmp_path / "found")


@pytest.fixture
def discover(options):
    """``discover(**changes)``: run the tool and load the corpus that it wrote."""

    def run(**changes):
        run_options = options(**changes)
        discover_domains(run_options)
        found = Corpus.load(run_options.output)
        found.verify()
        return found

    return run


@pytest.fixture(scope="module")
def kind_of(labelled):
    """Maps each document to its kind and its split."""
    return {
        text: (name, split)
        for name in labelled.names
        for split in SPLITS
        for text in texts_of(labelled, name, split)
    }


@pytest.fixture(scope="module")
def found(three):
    """The read-only corpus of three clusters, next to its embeddings."""
    discover_domains(three)
    return Corpus.load(three.output)


def test_clusters_recover_the_kinds_and_keep_every_document(found, kind_of):
    found.verify()
    assert found.names == ["cluster-00", "cluster-01", "cluster-02"]
    texts = [(n, s, text) for n in found.names for s in SPLITS for text in texts_of(found, n, s)]
    assert sorted(text for _, _, text in texts) == sorted(kind_of)
    assert all(kind_of[text][1] == split for _, split, text in texts)
    kinds = {(name, kind_of[text][0]) for name, _, text in texts}
    assert (len(kinds), {kind for _, kind in kinds}) == (3, set(DOMAINS))
    sizes = [sum(found.domains[name].split(s).tokens for s in SPLITS) for name in found.names]
    assert sizes == sorted(sizes, reverse=True)


def test_the_record_describes_the_clusters(found, web, proxy):
    record = DiscoveredDomains.load(found.root)
    checkpoint = CheckpointRecord.load(find_checkpoint(proxy))
    assert record.provenance.inputs == {"corpus": web.hash, "checkpoint": checkpoint.hash}
    assert (record.num_clusters, record.dissolved, record.divided) == (3, 0, ["web"])
    assert record.cost.flops > 0
    for name, domain in record.domains.items():
        splits = found.domains[name]
        assert domain.documents == sum(splits.split(split).documents for split in SPLITS)
        assert domain.tokens == {split: splits.split(split).tokens for split in SPLITS}
        assert domain.shares == {"web": 1.0}
        own = texts_of(found, name, "train")
        distances = [near.distance for near in domain.nearest]
        assert distances == sorted(distances)
        for near in domain.nearest:
            tokens = open_domains(web).open(near.domain, "train").get(near.document)
            assert tokens.tobytes() in own
            assert near.text == " ".join(map(str, tokens[:-1].tolist()))[:100]
    assert load_file(found.root / CENTROIDS_NAME)["centroids"].shape == (3, 64)


def test_several_numbers_the_best_silhouette_wins(discover, found, tmp_path):
    best = discover(discover="5, 2,3", output=tmp_path / "best")
    record = DiscoveredDomains.load(best.root)
    assert list(record.silhouettes) == [2, 3, 5]
    assert max(record.silhouettes, key=lambda k: record.silhouettes[k]) == 3
    assert best.hash == found.hash  # the text was embedded again, with the same result


def test_other_numbers_of_clusters_need_no_embedding(discover, found, tmp_path, monkeypatch):
    store = found.root.with_name("found.embeddings")
    with monkeypatch.context() as patch:
        patch.setattr(Proxy, "open_reader", None)
        assert len(discover(discover="2", store=store).names) == 2
    embedding = DocumentEmbeddingOptions(fit_windows=200, windows_per_document=2)
    with pytest.raises(UserError, match="num_windows 4, not 2"):
        discover(output=tmp_path / "third", store=store, embedding=embedding)


def test_a_killed_run_resumes(discover, options, found, monkeypatch):
    """Finished blocks are kept if a run is killed while embedding, or while writing the corpus."""
    monkeypatch.setattr(discover_module, "BLOCK_DOCUMENTS", 50)
    write = EmbeddingStore.write_domain
    written_blocks: list[Path] = []

    def killed(self, name, *arguments):
        if len(written_blocks) == 3:
            raise KeyboardInterrupt
        store = write(self, name, *arguments)
        written_blocks.append(store.root / store.domains[name].file)
        return store

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingStore, "write_domain", killed)
        with pytest.raises(KeyboardInterrupt):
            discover_domains(options())
    assert not options().output.exists()
    before = [path.stat().st_mtime_ns for path in written_blocks]
    with monkeypatch.context() as patch:
        patch.setattr(DiscoveredDomains, "save", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            discover_domains(options())
    assert not options().output.exists()
    resumed = discover()
    assert [path.stat().st_mtime_ns for path in written_blocks] == before
    assert resumed.hash == found.hash
    with pytest.raises(UserError, match="--output"):
        discover_domains(options(discover="2"))


def test_selected_domains_are_clustered_and_the_others_unchanged(discover, labelled, tmp_path):
    found = discover(corpus=labelled.root, domains="news, poems", discover="2")
    assert found.names == ["code", "cluster-00", "cluster-01"]
    assert found.domain_hash("code") == labelled.domain_hash("code")
    record = DiscoveredDomains.load(found.root)
    assert record.divided == ["news", "poems"]
    shares = {name: domain.shares for name, domain in record.domains.items()}
    assert sorted(map(tuple, shares.values())) == [("news",), ("poems",)]
    with pytest.raises(UserError, match=r"--cluster-name cluster: .*'cluster-00'"):
        discover(corpus=found.root, domains="code", discover="2", output=tmp_path / "again")


def test_held_out_domains_are_neither_clustered_nor_changed(discover, labelled, tmp_path):
    output = tmp_path / "held-out"
    import_corpus(ImportOptions(output, corpus=labelled.root, held_out="code"))
    corpus = Corpus.load(output)
    found = discover(corpus=corpus.root, discover="2")
    assert found.names == ["cluster-00", "cluster-01"]
    assert list(found.held_out) == ["code"]
    assert found.domain_hash("code") == corpus.domain_hash("code")
    assert DiscoveredDomains.load(found.root).divided == ["news", "poems"]


def test_a_cluster_without_held_out_text_is_dissolved(labelled, discover, tmp_path):
    lacking = written(
        labelled, tmp_path / "lacking", lambda name, split: (name, split) != ("code", "valid")
    )
    with pytest.warns(UserWarning, match="1 of 3 clusters"):
        found = discover(corpus=lacking.root)
    assert (DiscoveredDomains.load(found.root).dissolved, len(found.names)) == (1, 2)
    before, after = (
        sum(d.split(s).documents for d in each.domains.values() for s in SPLITS)
        for each in (lacking, found)
    )
    assert before == after
    assert all(found.domains[name].valid.tokens for name in found.names)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"min_tokens_per_split": 100_000}, "--min-tokens-per-split 100000"),
        ({"cluster_name": "a,b"}, "--cluster-name"),
        ({"discover": "300"}, "--fit-windows 200"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(options, changes, named, tmp_path):
    with pytest.raises(UserError, match=named) as error:
        discover_domains(options(**changes))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_known_clusters_and_their_number_are_found():
    """Clusters around random directions, with a large common mean and one dominant feature."""
    rng = np.random.default_rng(12)
    labels = rng.integers(0, 12, 3000)
    windows = 50 + rng.normal(size=(12, 24))[labels] + 0.3 * rng.normal(size=(3000, 24))
    windows[:, 0] *= 1000
    vectors = windows.astype(np.float32)
    fit = fit_clusters(vectors, [2, 12, 15], seed=1, restarts=10)
    assert len(fit.centroids) == 12
    found = pairwise_distances_argmin(fit.scaling.transform(vectors), fit.centroids)
    assert adjusted_rand_score(labels, found) > 0.99
    scaled = (windows - windows.mean(axis=0)) / windows.std(axis=0)
    scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
    np.testing.assert_allclose(fit.scaling.transform(vectors), scaled, atol=1e-4)
    assert fit.inertia == pytest.approx(np.square(scaled - fit.centroids[found]).sum(), rel=1e-3)


def test_a_document_is_the_mean_of_its_windows(found, web, proxy):
    store = EmbeddingStore.load(found.root.with_name("found.embeddings"))
    (key,) = [key for key in store.domains if key.startswith("web/valid/")]
    tokens, vectors = open_domains(web).open("web", "valid"), store.vectors(key)
    assert len(vectors) == len(tokens)
    windows = spread_windows(tokens.lengths, 32, 4)
    assert len(windows) > len(tokens)
    checkpoint = CheckpointRecord.load(find_checkpoint(proxy))
    with distributed(ParallelOptions(), seed=0) as layout, tqdm(disable=True) as progress:
        reader = CheckpointModel(checkpoint).reader(layout)
        embedded = embed_windows(reader, tokens, windows, 2, 1, progress, "web")
    expected = [embedded[windows.document == row].mean(axis=0) for row in range(len(tokens))]
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
