"""k-means and the silhouette against plain loops, and on vectors whose clusters are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.cluster.vq

from megatron_chameleon.mixture import clustering
from megatron_chameleon.mixture.clustering import (
    fit_scaling,
    kmeans,
    nearest_centroids,
    silhouette,
)


def blobs(count=3, each=40, width=5, spread=0.2, seed=0):
    """Well separated clusters in a random order, and which one each vector is of."""
    rng = np.random.default_rng(seed)
    centres = 4 * rng.standard_normal((count, width))
    labels = rng.permutation(np.repeat(np.arange(count), each))
    return centres[labels] + spread * rng.standard_normal((count * each, width)), labels


def same_partition(one, other):
    pairs = set(zip(one.tolist(), other.tolist(), strict=True))
    return len(pairs) == len(set(one.tolist())) == len(set(other.tolist()))


def plain_silhouette(vectors, labels):
    """By its definition, one vector after the other."""
    scores = []
    for i, own in enumerate(labels):
        distance = np.linalg.norm(vectors - vectors[i], axis=1)
        others = [j for j in range(len(labels)) if labels[j] == own and j != i]
        if not others:
            scores.append(0.0)
            continue
        a = distance[others].mean()
        b = min(distance[labels == other].mean() for other in set(labels.tolist()) - {own})
        scores.append((b - a) / max(a, b))
    return float(np.mean(scores))


def test_clusters_that_lie_apart_are_found():
    vectors, labels = blobs(count=6)
    found = kmeans(vectors, 6, seed=0, restarts=5)
    assert same_partition(found.labels, labels)
    for number, centroid in enumerate(found.centroids):
        np.testing.assert_allclose(centroid, vectors[found.labels == number].mean(axis=0))
    distances = np.linalg.norm(vectors - found.centroids[found.labels], axis=1)
    assert found.inertia == pytest.approx((distances**2).sum())


def test_no_partition_of_a_few_vectors_is_better():
    vectors = np.random.default_rng(3).standard_normal((8, 2))
    best = min(
        sum(
            ((vectors[picked] - vectors[picked].mean(axis=0)) ** 2).sum()
            for picked in (chosen, ~chosen)
        )
        for bits in itertools.product([False, True], repeat=8)
        if 0 < sum(bits) < 8
        for chosen in [np.array(bits)]
    )
    assert kmeans(vectors, 2, seed=0, restarts=20).inertia == pytest.approx(best)


def test_the_seed_alone_decides_and_restarts_only_help():
    vectors = np.random.default_rng(1).standard_normal((300, 4))
    runs = [kmeans(vectors, 9, seed=2, restarts=4) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].centroids, runs[1].centroids)
    once = [kmeans(vectors, 9, seed, restarts=1).inertia for seed in range(5)]
    often = [kmeans(vectors, 9, seed, restarts=8).inertia for seed in range(5)]
    assert len(set(once)) > 1
    assert all(after <= before for before, after in zip(once, often, strict=True))
    assert sum(often) < sum(once)


def test_an_empty_cluster_is_begun_anew_where_a_vector_is_worst_off(monkeypatch):
    vectors, labels = blobs(count=3)
    far = np.full((1, vectors.shape[1]), 1e3)
    real = scipy.cluster.vq.kmeans2

    def start_badly(data, centroids, iterations, minit, **more):
        if minit == "++":  # two centroids where no vector is near
            return np.concatenate([data[:1], far, 2 * far]), np.zeros(len(data), np.int32)
        return real(data, centroids, iterations, minit=minit, **more)

    monkeypatch.setattr(clustering, "kmeans2", start_badly)
    assert same_partition(kmeans(vectors, 3, seed=0, restarts=1).labels, labels)


def test_more_clusters_than_distinct_vectors_are_refused():
    with pytest.raises(ValueError, match="more than the 3 vectors"):
        kmeans(np.eye(3), 4, seed=0, restarts=1)
    with pytest.raises(ValueError, match="too alike"):
        kmeans(np.repeat(np.eye(2), 10, axis=0), 3, seed=0, restarts=2)
    assert kmeans(np.eye(3), 3, seed=0, restarts=1).inertia == pytest.approx(0)


def test_the_first_of_two_centroids_as_near_as_each_other_counts():
    labels, distances = nearest_centroids(np.zeros((1, 2)), np.array([[3.0, 0], [0, 2], [2, 0]]))
    assert labels.tolist() == [1]
    assert distances.tolist() == [2.0]


@pytest.mark.parametrize("seed", range(4))
def test_the_silhouette_is_that_of_plain_loops(seed):
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((40, 3))
    labels = rng.integers(0, 4, 40) * 2  # numbers that are not all there
    labels[0] = 1  # one that is alone
    assert silhouette(vectors, labels, seed=0) == pytest.approx(plain_silhouette(vectors, labels))


def test_of_many_vectors_a_sample_tells_the_silhouette(monkeypatch):
    vectors, labels = blobs(each=200, spread=2.0)
    exact = silhouette(vectors, labels, seed=0)
    monkeypatch.setattr(clustering, "SILHOUETTE_ROWS", 150)
    sampled = silhouette(vectors, labels, seed=0)
    assert sampled != exact
    assert sampled == pytest.approx(exact, abs=0.05)
    assert silhouette(vectors, labels, seed=0) == sampled


def test_a_sample_of_one_cluster_alone_tells_nothing():
    vectors = np.random.default_rng(0).normal(size=(20_000, 2))
    labels = np.zeros(20_000, dtype=int)
    labels[7] = 1
    assert silhouette(vectors, labels, seed=0) == 0.0
    with pytest.raises(ValueError, match="labels are all alike"):
        silhouette(vectors, np.zeros(20_000, dtype=int), seed=0)


def test_the_silhouette_knows_the_number_of_clusters():
    vectors, _ = blobs(count=4)
    scores = {k: silhouette(vectors, kmeans(vectors, k, 0, 10).labels, seed=0) for k in range(2, 7)}
    assert max(scores, key=lambda k: scores[k]) == 4
    with pytest.raises(ValueError, match="all alike"):
        silhouette(vectors, np.zeros(len(vectors), int), seed=0)


def test_identical_vectors_have_no_silhouette():
    assert silhouette(np.ones((6, 2)), np.array([0, 1] * 3), seed=0) == 0.0


def test_scaled_vectors_are_centred_of_one_spread_and_length():
    rng = np.random.default_rng(0)
    vectors = (rng.standard_normal((500, 4)) * [1, 100, 0.01, 1] + [50, -3, 0, 7]).astype("f4")
    vectors[:, 3] = 7
    scaling = fit_scaling(vectors)
    np.testing.assert_allclose(scaling.mean, vectors.astype(float).mean(axis=0))
    assert scaling.deviation[3] == 1  # the constant feature says nothing, and is not blown up
    scaled = scaling(vectors)
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=1), 1)
    assert np.abs(scaled[:, 3]).max() == 0
    spreads = scaled[:, :3].std(axis=0)
    assert spreads.max() / spreads.min() < 1.2
    assert scaling(scaling.mean[None]).tolist() == [[0.0] * 4]
