"""discover_domains: domains for unlabelled text, as clusters of document embeddings.

A document's vector is the mean over a few of its windows. The embedding store holds the vectors in
blocks of documents, so that memory is bounded and an interrupted run loses at most one block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans, MiniBatchKMeans
from sklearn.metrics import pairwise_distances_argmin, silhouette_score
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler

from megatron_chameleon.artifacts import (
    SPLITS,
    Corpus,
    Cost,
    EmbeddingStore,
    Split,
    Stopwatch,
    provenance,
)
from megatron_chameleon.artifacts.discovered import (
    DiscoveredDomain,
    DiscoveredDomains,
    NearDocument,
)
from megatron_chameleon.artifacts.files import writing
from megatron_chameleon.artifacts.provenance import Provenance
from megatron_chameleon.console import align_columns
from megatron_chameleon.corpus.join import link_domain, regroup
from megatron_chameleon.corpus.options import is_domain_name
from megatron_chameleon.corpus.staging import corpus_folder
from megatron_chameleon.corpus.tokenizer import Tokenizer, corpus_tokenizer
from megatron_chameleon.embedding.embed import (
    StoreEntry,
    fill_store,
    missing_entries,
    open_store,
)
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import ExtractionOptions
from megatron_chameleon.methods.chameleon.compute import EmbeddingPlan, plan_embedding
from megatron_chameleon.methods.discovery import DiscoverOptions
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar

# Documents per block of embeddings; a killed run loses at most one block. A block takes 256 MiB at
# 4 windows per document and a hidden size of 2048.
BLOCK_DOCUMENTS = 8192
# Windows per mini-batch of k-means.
BATCH_ROWS = 1024
# Windows sampled to compute a silhouette. Their pairwise distances take 34 MB.
SILHOUETTE_ROWS = 2048
NEAREST_SHOWN = 3
PREVIEW_CHARACTERS = 100
# Tokens decoded for a preview. In nearly all text, they contain at least PREVIEW_CHARACTERS
# characters.
_PREVIEW_TOKENS = 4 * PREVIEW_CHARACTERS
_SHARES_SHOWN = 4

Labels = dict[tuple[str, Split], NDArray[np.int32]]
"""(domain, split) -> [num_documents] cluster of each document."""


def discover_domains(options: DiscoverOptions) -> None:
    """Cluster the documents of a corpus and write the corpus of the clusters.

    Called on every rank.

    Raises:
        UserError: for a mistake in the options or in the files that they name. Finished embeddings
        are kept.
    """
    with distributed(options.parallel, seed=0) as layout:
        plan = from_main(lambda: plan_discovery(options))
        text, proxy, recipe = plan.embedding.text, plan.embedding.proxy, plan.embedding.recipe
        folder, width = options.store_folder, proxy.hidden_size
        store, missing = from_main(
            lambda: (
                store := open_store(folder, recipe, width, plan.provenance),
                missing_entries(store, text, plan.samples() + plan.documents()),
            )
        )
        cost = Cost()
        if missing:
            reader = proxy.open_reader(layout, recipe)
            batch_size = options.embedding.embedding_batch_size
            store, cost = fill_store(store, text, reader, missing, batch_size)
        if not layout.is_main:
            return
        stopwatch = Stopwatch()
        windows = np.concatenate([store.vectors(block.key) for block in plan.samples()])
        fit = fit_clusters(windows, options.numbers, options.seed, options.restarts)
        clusters = assign_documents(plan, store, fit)
        if clusters.dissolved:
            warnings.warn(
                f"{clusters.dissolved} of {len(fit.centroids)} clusters had too little text in "
                f"train, valid or test (--min-tokens-per-split {options.min_tokens_per_split}); "
                "their documents were reassigned to the nearest of the remaining "
                f"{len(clusters.centroids)} clusters",
                stacklevel=2,
            )
        print(_summary(plan, _write(plan, store, clusters, cost, stopwatch)))


@dataclasses.dataclass(frozen=True)
class DiscoverPlan:
    """Validated options with their artifacts.

    Attributes:
        embedding: the domains to cluster, and the proxy that embeds their documents;
            ``embedding.recipe.num_windows`` is per document.
        options: options of the tool.
        corpus: corpus to cluster.
        provenance: provenance of the new corpus.
    """

    embedding: EmbeddingPlan
    options: DiscoverOptions
    corpus: Corpus
    provenance: Provenance

    @property
    def names(self) -> list[str]:
        """Names of the domains to cluster."""
        return self.embedding.names

    def samples(self) -> list[StoreEntry]:
        """Return store entries of the windows to which k-means is fitted, one entry per domain.

        The number of windows of a domain is proportional to its tokens, but at least 1.
        """
        tokens, seed = self.corpus.train_tokens, self.options.seed
        total = sum(tokens[name] for name in self.names)
        entries = []
        for name in self.names:
            count = max(1, round(self.options.embedding.fit_windows * (tokens[name] / total)))
            recipe = dataclasses.replace(self.embedding.recipe, num_windows=count, seed=seed)
            entries.append(StoreEntry(f"{name}/windows-{count}-seed{seed}", name, recipe))
        return entries

    def documents(self) -> list[StoreEntry]:
        """Return store entries of the documents to cluster: blocks in the corpus's order."""
        blocks = []
        for name in self.names:
            for split in SPLITS:
                count = self.corpus.domains[name].split(split).documents
                for first in range(0, count, BLOCK_DOCUMENTS):
                    block = range(first, min(first + BLOCK_DOCUMENTS, count))
                    key = f"{name}/{split}/{first}-{block.stop}"
                    blocks.append(StoreEntry(key, name, self.embedding.recipe, split, block))
        return blocks


def plan_discovery(options: DiscoverOptions) -> DiscoverPlan:
    """Load and check the artifacts that ``options`` name. Writes nothing.

    Raises:
        UserError: for the first mistake found.
    """
    if Corpus.exists(options.output):
        raise UserError(f"{options.output} already holds a corpus; choose another --output")
    extraction = ExtractionOptions(
        layer=options.embedding.layer,
        window_length=options.embedding.window_length,
        num_windows=options.embedding.windows_per_document,
        within_documents=True,
    )
    corpus = Corpus.load(options.corpus)
    embedding = plan_embedding(options, corpus, extraction)
    names = embedding.names
    cluster, most, least = options.cluster_name, options.numbers[-1], options.min_tokens_per_split
    if not is_domain_name(cluster) or not cluster.isprintable() or "," in cluster:
        raise UserError(
            f"--cluster-name {cluster!r}: must be a valid domain name, on one line and without "
            "commas"
        )
    kept = set(corpus.all_domains).difference(names)
    if taken := kept.intersection(cluster_names(cluster, most, most)):
        raise UserError(
            f"--cluster-name {cluster}: the new corpus keeps the domain '{min(taken)}'; pass "
            "another name"
        )
    documents = sum(corpus.domains[name].train.documents for name in names)
    if most > documents:
        raise UserError(
            f"--discover {most}: there are only {documents} training documents; pass fewer clusters"
        )
    for split in SPLITS:
        for name in names:
            lengths = embedding.text.open(name, split).lengths
            if len(lengths) and lengths.min() == 0:
                raise UserError(
                    f"{corpus.prefix(name, split)}.idx has a document without tokens, which has no "
                    "embedding; preprocess the corpus again"
                )
        tokens = sum(corpus.domains[name].split(split).tokens for name in names)
        if tokens < 2 * least:
            raise UserError(
                f"--min-tokens-per-split {least}: the text to cluster has {tokens} {split} tokens, "
                "too few for two clusters; lower --min-tokens-per-split, or add text"
            )
    corpus_tokenizer(corpus)  # fails before the embedding if the tokenizer's file is missing
    made = provenance(options, {"corpus": corpus.hash, "checkpoint": embedding.proxy.hash})
    return DiscoverPlan(embedding, options, corpus, made)


def cluster_names(name: str, count: int, most: int) -> list[str]:
    """Return ``name-00``, ``name-01``, ..., with at least two digits, enough for ``most`` names.

    Names do not depend on the number of clusters that is chosen after embedding.
    """
    digits = max(2, len(str(most - 1)))
    return [f"{name}-{number:0{digits}d}" for number in range(count)]


@dataclasses.dataclass(frozen=True, eq=False)
class KMeansFit:
    """K-means centroids, and the scaling of vectors before they are compared with the centroids.

    Hidden states share a large mean, and a few of their features vary far more than the others;
    both would hide the differences between texts. So vectors are centred, each feature is divided
    by its standard deviation, and the result is scaled to length 1: squared distances are then
    2 - 2 cos.

    Attributes:
        scaling: scales vectors [n, h] for comparison; a vector that equals the mean becomes zero.
        centroids: [k, h] float32 means of scaled windows.
        inertia: sum of squared distances of the windows to their centroids.
        silhouettes: number of clusters -> mean silhouette, for each number tried.
        windows: number of windows fitted.
    """

    scaling: Pipeline
    centroids: NDArray[np.float32]
    inertia: float
    silhouettes: dict[int, float]
    windows: int


def fit_clusters(
    vectors: NDArray[np.float32], numbers: list[int], seed: int, restarts: int
) -> KMeansFit:
    """Fit mini-batch k-means (Sculley, 2010) from k-means++ starts; refine by Lloyd's algorithm.

    The result depends on the arguments only.

    Args:
        vectors: [n, h].
        numbers: numbers of clusters to try, increasing. The number with the best mean silhouette
            (Rousseeuw, 1987) is chosen, the smallest one if several are equal.
        seed: seed of the starts, the mini-batches and the windows sampled for the silhouettes.
        restarts: runs of k-means per number; the one with the smallest inertia is kept.

    Raises:
        UserError: if the vectors are too few or too similar for so many clusters.
    """
    scaling = make_pipeline(StandardScaler(), Normalizer()).fit(vectors)
    scaled = scaling.transform(vectors)
    silhouettes: dict[int, float] = {}
    fitted: dict[int, KMeans] = {}
    runs = len(numbers) * restarts
    with progress_bar(runs, " starts", "fitting", delay=SECONDS_WITHOUT_BAR) as bar:
        for number in numbers:
            chosen: MiniBatchKMeans | None = None
            for start in range(restarts if number <= len(scaled) else 0):
                state = np.random.SeedSequence([seed, number, start]).generate_state(1)
                found = MiniBatchKMeans(
                    number, n_init=1, batch_size=BATCH_ROWS, random_state=int(state[0])
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # runs with empty clusters are discarded
                    found.fit(scaled)
                is_full = len(np.unique(found.labels_)) == number
                if is_full and (chosen is None or found.inertia_ < chosen.inertia_):
                    chosen = found
                bar.update()
            if chosen is None:
                raise UserError(
                    f"--discover {number}: {len(scaled)} windows are too few or too similar for so "
                    "many clusters; pass fewer, or more --fit-windows"
                )
            # Mini-batch k-means stops before it converges, so Lloyd's iterations over all windows
            # refine the best run.
            centroids = chosen.cluster_centers_
            fitted[number] = KMeans(number, init=centroids, n_init=1).fit(scaled)
            size, labels = min(SILHOUETTE_ROWS, len(scaled)), fitted[number].labels_
            # Use 0 if the silhouette is undefined: if all sampled windows are in one cluster, or
            # each window is the only one in its cluster.
            silhouettes[number] = 0.0
            with contextlib.suppress(ValueError):
                silhouettes[number] = float(
                    silhouette_score(scaled, labels, sample_size=size, random_state=seed)
                )
    best = fitted[max(silhouettes, key=lambda number: silhouettes[number])]
    return KMeansFit(scaling, best.cluster_centers_, float(best.inertia_), silhouettes, len(scaled))


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentClusters:
    """The cluster of each document; clusters are numbered by decreasing size.

    Attributes:
        fit: the fit of k-means, which includes the clusters that were dissolved afterwards.
        labels: (domain, split) -> [num_documents] cluster of each document.
        centroids: [k, h] centroids of the k remaining clusters.
        tokens: [k, domains, splits] tokens of each cluster.
        dissolved: number of clusters that were dissolved because they were too small.
    """

    fit: KMeansFit
    labels: Labels
    centroids: NDArray[np.float32]
    tokens: NDArray[np.int64]
    dissolved: int


def assign_documents(plan: DiscoverPlan, store: EmbeddingStore, fit: KMeansFit) -> DocumentClusters:
    """Assign every document to the nearest centroid, and dissolve clusters that are too small.

    A document's vector is the mean over its windows, so its nearest centroid has the smallest sum
    of squared distances to these windows (up to the scaling to length 1). Documents are read block
    by block. The smallest cluster is dissolved first: its documents may make another cluster large
    enough.

    Raises:
        UserError: if fewer than two clusters have enough text in every split.
    """
    keys: list[tuple[str, Split]] = [(name, split) for name in plan.names for split in SPLITS]
    lengths = {(name, split): plan.embedding.text.open(name, split).lengths for name, split in keys}
    labels: Labels = {key: np.full(len(lengths[key]), -1, np.int32) for key in keys}
    count, least, dissolved = len(fit.centroids), plan.options.min_tokens_per_split, -1
    left = np.arange(count)
    while True:
        documents = sum(int((here == dissolved).sum()) for here in labels.values())
        bar = progress_bar(documents, " documents", "assigning", delay=SECONDS_WITHOUT_BAR)
        with bar as progress:
            for block in plan.documents():
                place = slice(block.documents.start, block.documents.stop)
                here = labels[block.domain, block.split][place]
                rows = np.flatnonzero(here == dissolved)
                if rows.size:
                    scaled = fit.scaling.transform(store.vectors(block.key)[rows])
                    here[rows] = left[pairwise_distances_argmin(scaled, fit.centroids[left])]
                    progress.update(len(rows))
        sums = [np.bincount(labels[key], weights=lengths[key], minlength=count) for key in keys]
        tokens = np.array(sums, np.int64).reshape(len(plan.names), len(SPLITS), count)
        tokens = tokens.transpose(2, 0, 1)  # [count, domains, splits]; sums are exact below 2^53
        by_split = tokens.sum(axis=1)[left]
        is_small = (by_split.min(axis=1) < least) | (by_split[:, SPLITS.index("train")] == 0)
        small = np.flatnonzero(is_small)
        if not small.size:
            break
        dissolved = int(left[small[np.argmin(by_split[small].sum(axis=1))]])
        left = left[left != dissolved]
        if len(left) < 2:
            raise UserError(
                f"--discover {plan.options.discover}: fewer than two clusters have {least} tokens "
                "in each of train, valid and test; pass fewer clusters, or add text"
            )
    order = left[np.argsort(-tokens[left].sum(axis=(1, 2)), kind="stable")]
    new = np.full(count, -1, np.int32)
    new[order] = np.arange(len(order))
    labels = {key: new[here] for key, here in labels.items()}
    return DocumentClusters(
        fit=fit,
        labels=labels,
        centroids=fit.centroids[order],
        tokens=tokens[order],
        dissolved=count - len(order),
    )


def nearest_documents(
    plan: DiscoverPlan, store: EmbeddingStore, clusters: DocumentClusters
) -> list[list[tuple[float, str, int]]]:
    """Find the training documents nearest to each centroid, in ascending order of distance.

    Returns:
        For each cluster, tuples (distance, domain, document); ``document`` is an index from 0.
    """
    nearest: list[list[tuple[float, str, int]]] = [[] for _ in clusters.centroids]
    for block in plan.documents():
        if block.split != "train":
            continue
        place = slice(block.documents.start, block.documents.stop)
        labels = clusters.labels[block.domain, block.split][place]
        scaled = clusters.fit.scaling.transform(store.vectors(block.key))
        distances = np.linalg.norm(scaled - clusters.centroids[labels], axis=1)
        for number in np.unique(labels).tolist():
            rows = np.flatnonzero(labels == number)
            rows = rows[np.argsort(distances[rows], kind="stable")[:NEAREST_SHOWN]]
            found = [(float(distances[i]), block.domain, block.documents[i]) for i in rows]
            both = sorted(nearest[number] + found, key=lambda near: near[0])
            nearest[number] = both[:NEAREST_SHOWN]
    return nearest


def _write(
    plan: DiscoverPlan,
    store: EmbeddingStore,
    clusters: DocumentClusters,
    embedding: Cost,
    stopwatch: Stopwatch,
) -> DiscoveredDomains:
    """Publish the corpus and its record in one rename, and return the record."""
    options, corpus, fit, recipe = plan.options, plan.corpus, clusters.fit, plan.embedding.recipe
    names = cluster_names(options.cluster_name, len(clusters.centroids), options.numbers[-1])
    tokenizer = corpus_tokenizer(corpus)
    total = int(clusters.tokens.sum()) * corpus.token_bytes
    with corpus_folder(options.output, overwrite=False, shared=False) as folder:
        made = folder.staging / "corpus"
        with writing(made):
            made.mkdir()
        with progress_bar(total, "B", "copying") as bar:
            domains = regroup(corpus, clusters.labels, names, tokenizer, made, bar.update)
        held_out = {name: link_domain(corpus, name, made) for name in corpus.held_out}
        tokenizer.save(made)
        cost = embedding + stopwatch.cost(num_devices=embedding.num_devices)
        Corpus(
            root=made,
            tokenizer=corpus.tokenizer,
            dtype=corpus.dtype,
            domains=domains,
            provenance=plan.provenance,
            cost=cost,
            not_written={
                name: c for name, c in corpus.not_written.items() if name in {*domains, *held_out}
            },
            held_out=held_out,
        ).save()
        described = {}
        for position, nearest in enumerate(nearest_documents(plan, store, clusters)):
            tokens = clusters.tokens[position]  # [domains, splits]
            shares = tokens.sum(axis=1) / tokens.sum()
            described[names[position]] = DiscoveredDomain(
                documents=sum(domains[names[position]].split(split).documents for split in SPLITS),
                tokens=dict(zip(SPLITS, tokens.sum(axis=0).tolist(), strict=True)),
                shares={
                    plan.names[i]: float(shares[i])
                    for i in np.argsort(-shares, kind="stable").tolist()
                    if shares[i] > 0
                },
                nearest=[
                    NearDocument(where, i, distance, _preview(plan, where, i, tokenizer))
                    for distance, where, i in nearest
                ],
            )
        record = DiscoveredDomains(
            root=made,
            num_clusters=len(fit.centroids),
            silhouettes=fit.silhouettes,
            inertia=fit.inertia,
            fitted_windows=fit.windows,
            model_hash=recipe.model_hash,
            layer=recipe.layer,
            window_length=recipe.window_length,
            windows_per_document=recipe.num_windows,
            seed=options.seed,
            dissolved=clusters.dissolved,
            domains=described,
            divided=plan.names,
            provenance=plan.provenance,
            cost=cost,
        )
        record.save()
        scaler = fit.scaling[0]
        record.save_centroids(clusters.centroids, scaler.mean_, scaler.scale_)
        folder.publish(made)
    return record


def _preview(plan: DiscoverPlan, domain: str, document: int, tokenizer: Tokenizer) -> str:
    """Return the beginning of a training document, with unprintable characters escaped."""
    tokens = plan.embedding.text.open(domain, "train").get(document)
    # Omit the last token, which is the end-of-document token.
    text = tokenizer.decode(tokens[:-1][:_PREVIEW_TOKENS].tolist())
    return repr(text[:PREVIEW_CHARACTERS])[1:-1]  # repr() escapes line breaks


def _summary(plan: DiscoverPlan, made: DiscoveredDomains) -> str:
    """Format the summary: a table, each cluster's content, the output, the next command."""
    scores = ", ".join(f"{k}: {score:.3f}" for k, score in made.silhouettes.items())
    rows = [["domain", "documents", *(f"{split} tokens" for split in SPLITS)]]
    described = []
    for name, domain in made.domains.items():
        counts = (domain.documents, *(domain.tokens[split] for split in SPLITS))
        rows.append([name, *(f"{count:,}" for count in counts)])
        largest = list(domain.shares.items())[:_SHARES_SHOWN]
        described.append(f"{name}: {', '.join(f'{share:.0%} {old}' for old, share in largest)}")
        described += [f"    {near.text}" for near in domain.nearest]
    output = plan.options.output
    proxy, corpus = shlex.quote(str(plan.options.checkpoint)), shlex.quote(str(output))
    return "\n".join(
        [
            "silhouette by number of clusters (k-means fitted to "
            f"{made.fitted_windows:,} windows): {scores}",
            *align_columns(rows),
            "",
            *described,
            "",
            f"wrote {output}; {plan.options.store_folder} holds the embeddings, which other "
            "numbers of clusters reuse; delete that folder if you do not need it",
            f"next: megatron-chameleon compute_mixture --corpus {corpus} "
            f"--checkpoint {proxy} --output MIXTURE.json",
        ]
    )
