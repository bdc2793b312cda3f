"""Measure whether domain embeddings in the surrogate's kernel save runs of a new domain.

    OMP_NUM_THREADS=1 python benchmarks/embedding_kernel.py --swarm RUN/4-mixture/regmix/swarm \
        --store RUN/3-embeddings/nano-seed1

Each domain of the swarm in turn is the new one. The surrogate is fitted to the members in which its
weight is below 1%, and to a few random members with more of it. It predicts one half of the members
with more of it; the few are taken from the other half.

The kernels differ in the Gaussian process on the features f = sqrt(w) [k]. ``plain`` uses f.
``embeddings`` uses f A^(1/2), that is, inner products f A f' and the distances they imply, with
A_ij = exp(-|x_i - x_j|^2 / median), where x are the domain embeddings and the median is over all
pairs of domains. ``equal`` replaces all A_ij with i != j by their mean: it shares effects between
domains without knowing which are similar.

Errors and rank correlations are means over the domains; +- is the standard error, over the domains,
of the paired difference from ``plain``. "new" is the held-out loss of the new domain, "old" the
mean over the other domains, "mean" the mean of all losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from megatron_chameleon.artifacts import EmbeddingStore
from megatron_chameleon.artifacts.swarm import SwarmRecord
from megatron_chameleon.interchange.mixture_runs import MixtureRuns, read_mixture_runs
from megatron_chameleon.mixture import fit_surrogate, surrogate
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.fit_quality import quality_of

LITTLE = 0.01
FIRST_SEED = 20  # seeds below were used to choose A
COLUMNS = ("new: rank", "old: rank", "mean: rank", "new: error", "old: error", "mean: error")


def main() -> None:
    """Print rank correlations and errors of each kernel, for each number of runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--swarm", type=Path, required=True, help="folder of swarm.json")
    parser.add_argument("--store", type=Path, required=True, help="embeddings of its domains")
    parser.add_argument("--runs", type=int, nargs="+", default=[0, 1, 2, 4], help="of the domain")
    parser.add_argument("--splits", type=int, default=3, help="random splits per domain")
    arguments = parser.parse_args()
    members = read_mixture_runs(arguments.swarm / "ratios.csv", arguments.swarm / "metrics.csv")
    store = EmbeddingStore.load(arguments.store)
    domains = SwarmRecord.load(arguments.swarm).domains
    means = np.stack([store.vectors(name).mean(axis=0) for name in domains])
    roots = kernel_roots(means.astype(np.float64))
    for num_runs in arguments.runs:
        found = {
            name: np.array(
                [
                    np.mean(
                        [
                            measured(members, new, num_runs, FIRST_SEED + split, root)
                            for split in range(arguments.splits)
                        ],
                        axis=0,
                    )
                    for new in range(len(members.domains))
                ]
            )
            for name, root in roots.items()
        }
        for name, values in found.items():
            gains = values - found["plain"]
            errors = gains.std(axis=0, ddof=1) / np.sqrt(len(gains))
            each = zip(COLUMNS, values.mean(axis=0), gains.mean(axis=0), errors, strict=True)
            line = ", ".join(
                f"{what} {value:.3f} ({gain:+.3f} +- {error:.3f})"
                for what, value, gain, error in each
            )
            print(f"{num_runs} runs, {name}: {line}", flush=True)


def kernel_roots(embeddings: Array) -> dict[str, Array]:
    """Return A^(1/2) [k, k] of each kernel, for domain embeddings [k, h]."""
    others = ~np.eye(len(embeddings), dtype=bool)
    squares = ((embeddings[:, None] - embeddings) ** 2).sum(axis=-1)
    affinity = np.exp(-squares / np.median(squares[others]))
    equal = np.where(others, affinity[others].mean(), 1.0)

    def root(matrix: Array) -> Array:
        values, vectors = np.linalg.eigh(matrix)
        found: Array = vectors * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
        return found

    return {"plain": np.eye(len(affinity)), "embeddings": root(affinity), "equal": root(equal)}


def measured(members: MixtureRuns, new: int, num_runs: int, seed: int, root: Array) -> list[float]:
    """Return the values of ``COLUMNS`` if domain ``new`` is the new one."""
    mixtures, losses = members.mixtures, members.losses
    without = np.flatnonzero(mixtures[:, new] < LITTLE)
    order = np.random.default_rng([new, seed]).permutation(
        np.flatnonzero(mixtures[:, new] >= LITTLE)
    )
    held_out, rest = np.array_split(order, 2)
    fitted = np.concatenate([without, rest[:num_runs]])
    with mock.patch.object(surrogate, "weight_features", with_root(root)):
        mean = fit_surrogate(mixtures[fitted], losses[fitted]).mean(mixtures[held_out])
    each = quality_of(mean, losses[held_out])
    whole = quality_of(
        mean.mean(axis=1, keepdims=True), losses[held_out].mean(axis=1, keepdims=True)
    )
    old = np.arange(len(members.domains)) != new
    return [
        float(value)
        for quality in ("spearman", "mae")
        for value in (
            getattr(each, quality)[new],
            getattr(each, quality)[old].mean(),
            getattr(whole, quality)[0],
        )
    ]


def with_root(root: Array) -> Callable[..., tuple[Array, Array]]:
    """Return ``weight_features`` with the square roots multiplied by ``root`` [k, k]."""
    original = surrogate.weight_features

    def features(
        weights: Array, kind: surrogate.Features, log_epsilon: float
    ) -> tuple[Array, Array]:
        mapped, slopes = original(weights, kind, log_epsilon)
        return (mapped @ root, slopes) if kind == "sqrt" else (mapped, slopes)

    return features


if __name__ == "__main__":
    main()
