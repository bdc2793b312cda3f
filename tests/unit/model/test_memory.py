"""Compare the memory estimated from shapes with torch's allocator."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_chameleon.model.config import ModelConfig, preset
from megatron_chameleon.model.memory import (
    TrainingSetup,
    estimate_memory,
    peak_bytes_per_rank,
    stage_parameters,
)
from megatron_chameleon.parallel.options import RecomputeOptions, TrainingParallelOptions
from tests.families import FAMILIES, VARIANTS
from tests.peak_memory import peak_of_training

TOLERANCE = 0.1
PLAIN = TrainingSetup(
    config=ModelConfig(4, 4, 128, 512, vocab_size=1000, max_sequence_length=256),
    parallel=TrainingParallelOptions(),
    data_parallel_size=1,
    micro_batch_size=4,
    num_microbatches=2,
    bf16=False,
    seq_length=256,
)


def laid_out(setup=PLAIN, data_parallel_size=1, **parallel):
    options = TrainingParallelOptions(**parallel)
    return dataclasses.replace(setup, parallel=options, data_parallel_size=data_parallel_size)


def with_vocabulary(size, **changes):
    config = dataclasses.replace(PLAIN.config, vocab_size=size)
    return dataclasses.replace(PLAIN, config=config, **changes)


def with_model(name, **changes):
    """Return the setup of a model whose position table is longer than the sequences."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "ffn_hidden_size": 384,
        "kv_channels": 40,
        "vocab_size": 1000,
    }
    config = dataclasses.replace(VARIANTS[name], max_sequence_length=1024, **sizes)
    return dataclasses.replace(PLAIN, config=config, **changes)


def dropped(setup=PLAIN, **changes):
    """Return the setup on the CPU with every dropout, unless ``changes`` set a rate to 0."""
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    return dataclasses.replace(setup, on_cpu=True, **(rates | changes))


BF16 = with_vocabulary(5000, bf16=True, micro_batch_size=8)
SETUPS = {
    "plain": PLAIN,
    "bf16": BF16,
    "large vocabulary": with_vocabulary(9000),
    "full by twos": laid_out(recompute=RecomputeOptions("full", None, 2)),
    "block": laid_out(recompute=RecomputeOptions("full", "block", 2)),
    "selective": laid_out(recompute=RecomputeOptions("selective")),
    "hidden dropout": dropped(attention_dropout=0.0),
    "dropout": dropped(),
    "bf16 dropout": dropped(BF16),
    "dropout, full by twos": dropped(laid_out(recompute=RecomputeOptions("full", None, 2))),
    "sharded": laid_out(BF16, use_distributed_optimizer=True),
    **{name: with_model(name) for name in (*FAMILIES, "llama, one group")},
    "bf16 llama": with_model("llama, no groups", bf16=True),
    "bf16 qwen3": with_model("qwen3", bf16=True),
    "selective qwen3": laid_out(with_model("qwen3"), recompute=RecomputeOptions("selective")),
}


@pytest.mark.parametrize("name", SETUPS)
def test_the_estimate_is_near_the_measured_peak(one_rank, name):
    setup = SETUPS[name]
    layout = dataclasses.replace(
        one_rank, use_distributed_optimizer=setup.parallel.use_distributed_optimizer
    )
    measured = peak_of_training(setup, layout)
    assert peak_bytes_per_rank(setup) == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["60m", "1.2b"])
def test_the_parameters_of_all_ranks_add_up_to_the_model(name):
    config = preset(name, vocab_size=50_257, max_sequence_length=1024)
    setup = dataclasses.replace(PLAIN, config=config)
    padding = setup.embedding_elements - config.vocab_size * config.hidden_size
    assert stage_parameters(setup, 0) == config.num_parameters + padding
    pipelined = laid_out(setup, pipeline_model_parallel_size=config.num_layers)
    held = sum(stage_parameters(pipelined, stage) for stage in range(config.num_layers))
    # The last pipeline stage has a second copy of the embedding.
    assert held == config.num_parameters + padding + setup.embedding_elements


def test_a_sharded_optimizer_divides_its_states_by_the_number_of_ranks():
    setup = dataclasses.replace(PLAIN, bf16=True)
    sharded = laid_out(setup, data_parallel_size=4, use_distributed_optimizer=True)
    (whole,), (found,) = estimate_memory(setup), estimate_memory(sharded)
    for name, size in whole.items():
        shards = 4 if name in ("main_weights", "moments") else 1
        assert found[name] == pytest.approx(size / shards, rel=1e-3), name
