"""What the tests of Chameleon share: its options for a barely trained proxy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.artifacts import (
    EmbeddingStore,
    Mixture,
)
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from tests.small_corpus import DOMAINS

WINDOWS, RESAMPLES = 60, 200
# Scores of a barely trained proxy are near zero at the reference's ridge, so most tests use this.
SCALED = RecipeOptions(recipe="scaled", bootstrap_resamples=RESAMPLES)


@pytest.fixture
def options(corpus, finished_run, tmp_path):
    """``options(**changes)``: those of the tool, for the finished run as proxy."""

    def make(**changes):
        extraction = ExtractionOptions(num_windows=WINDOWS)
        made = ChameleonOptions(
            corpus=corpus.root,
            checkpoint=finished_run,
            output=tmp_path / "out" / "mixture.json",
            extraction=extraction,
            weighting=SCALED,
        )
        return dataclasses.replace(made, **changes)

    return make


@pytest.fixture
def compute(options):
    """``compute(**changes)``: run the tool and read what it wrote."""

    def run(**changes):
        given = options(**changes)
        compute_mixture(given)
        return Mixture.load(given.output)

    return run


def store_beside(options):
    return EmbeddingStore.load(options().output.parent / "embeddings")


def means_of(store, names=DOMAINS):
    return np.stack([store.vectors(name).astype(np.float64).mean(axis=0) for name in names])
