"""Embeddings, weights and perplexities do not depend on layout or batch size."""

from __future__ import annotations

import numpy as np
import pytest

from tests.distributed.layout_cases import LAYERS, NUM_WINDOWS, OVERLAP, READINGS
from tests.small_corpus import VOCAB_SIZE

TOLERANCE = 1e-5


@pytest.mark.parametrize("layer", LAYERS)
def test_hidden_states_are_what_a_hook_on_the_whole_model_sees(results, layer):
    reference = results.reference()
    hooked, read = reference[f"hidden/{layer}"], reference[f"reader/{layer}"]
    assert hooked.std() > 0.05
    np.testing.assert_allclose(read, hooked, rtol=0, atol=TOLERANCE)


def test_layers_are_not_alike(results):
    reference = results.reference()
    first, last = (reference[f"hidden/{layer}"] for layer in LAYERS)
    assert np.abs(first - last).max() > 0.1


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("reading", READINGS)
def test_embeddings_are_the_plain_means_over_each_window(results, reading, layer):
    reference = results.reference()
    for name, vectors in results.vectors(reading, layer).items():
        expected = reference[f"{name}/{layer}"]
        assert len(expected) == NUM_WINDOWS
        assert expected.std(axis=0).max() > 100 * TOLERANCE  # windows differ by far more
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("reading", READINGS)
def test_weights_are_those_of_one_rank(results, reading, layer):
    one, other = results.mixture("one", layer), results.mixture(reading, layer)
    assert max(one.weights.values()) - min(one.weights.values()) > 0.01
    assert other.weights == pytest.approx(one.weights, abs=TOLERANCE)


@pytest.mark.parametrize("reading", READINGS)
def test_perplexities_are_those_of_plain_windows(results, reading):
    reference = results.reference()
    evaluation = results.evaluation(reading)
    for name, domain in evaluation.domains.items():
        assert domain.loss == pytest.approx(float(reference[name]), abs=TOLERANCE)
        assert domain.perplexity == pytest.approx(np.exp(reference[name]), rel=TOLERANCE)
        assert domain.loss < np.log(VOCAB_SIZE) - 1.0  # the model has learned something


@pytest.mark.parametrize("reading", READINGS)
def test_documents_by_themselves_are_scored_alike_in_every_layout(results, reading):
    reference = results.reference()
    evaluation = results.evaluation_by_document(reading)
    assert evaluation.protocol.overlap == OVERLAP
    for name, domain in evaluation.domains.items():
        sums, tokens = reference[f"{name}/documents"]
        assert domain.tokens == tokens.sum()
        assert domain.loss == pytest.approx(sums.sum() / tokens.sum(), abs=TOLERANCE)
        assert domain.clusters is not None
        assert domain.clusters.tokens == tokens.tolist()
        assert domain.clusters.losses == pytest.approx(sums.tolist(), rel=TOLERANCE)
        assert domain.text_bytes == results.evaluation_by_document("one").domains[name].text_bytes
        assert domain.bits_per_byte is not None
