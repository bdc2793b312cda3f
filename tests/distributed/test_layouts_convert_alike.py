"""A checkpoint of any layout is the same Hugging Face folder, and a folder is a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_chameleon.artifacts import CheckpointRecord
from tests.distributed.layout_cases import (
    LAYERS,
    LOSS_ROUNDING,
    NORM_ROUNDING,
    REWRITTEN,
    TUNED,
    TUNED_FROM_CHECKPOINT,
)
from tests.small_corpus import VOCAB_SIZE


@pytest.fixture(scope="session")
def tensors(results):
    """``tensors(name)``: those in the folder made of the run, or of what a layout has written."""

    def read(name):
        results.require(f"convert-{name}")
        return load_file(results.places.huggingface(name) / "model.safetensors")

    return read


def test_the_folder_has_no_padding_and_trained_weights(tensors):
    found = tensors("one")
    assert found["transformer.wte.weight"].shape == (VOCAB_SIZE, 64)
    for name, tensor in found.items():
        assert np.ptp(tensor) > 0, name  # no bias or norm is as it was at the start


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_any_layout_wrote_is_the_same_folder_to_the_bit(results, tensors, name):
    results.require(f"rewrite-{name}")
    record = CheckpointRecord.load(results.places.from_huggingface(name))
    parallel = REWRITTEN[name].parallel
    assert record.layout["tensor_model_parallel_size"] == parallel.tensor_model_parallel_size
    assert record.layout["pipeline_model_parallel_size"] == parallel.pipeline_model_parallel_size
    expected, found = tensors("one"), tensors(name)
    assert found.keys() == expected.keys()
    for tensor in expected:
        np.testing.assert_array_equal(found[tensor], expected[tensor], err_msg=tensor)


def test_perplexities_by_the_converted_checkpoint_are_those_by_the_run(results):
    assert results.evaluation("converted").domains == results.evaluation("one").domains


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_by_the_converted_checkpoint_are_those_by_the_run(results, layer):
    converted, original = results.mixture("converted", layer), results.mixture("one", layer)
    assert converted.weights == original.weights


@pytest.mark.parametrize("name", TUNED)
def test_a_run_that_starts_from_a_folder_is_that_from_its_checkpoint(results, name):
    expected, found = results.metrics(TUNED_FROM_CHECKPOINT), results.metrics(name)
    trained, untrained = results.metrics("one")[-1]["loss"], results.metrics("one")[0]["loss"]
    assert expected[0]["loss"] < (trained + untrained) / 2
    for one, other in zip(expected, found, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0, abs=LOSS_ROUNDING)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=NORM_ROUNDING)
