"""Layouts whose peak of memory is measured on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.distributed.layout_cases import DP2_SHARDED, PP2, SP2, TP2, Case, Places

if TYPE_CHECKING:
    from megatron_chameleon.model.memory import TrainingSetup

PEAKS = {"peak-tp2": TP2, "peak-sp2": SP2, "peak-pp2": PP2, "peak-dp2-sharded": DP2_SHARDED}


def peak_file(places: Places, name: str) -> Path:
    """The bytes measured on each rank, in their order."""
    return places.root / "peaks" / f"{name}.json"


def setup_of(case: Case) -> TrainingSetup:
    """A model whose layers and logits weigh more than its parameters."""
    from megatron_chameleon.model.memory import TrainingSetup
    from megatron_chameleon.model.sizes import ModelShape, ModelSize

    size = ModelSize(num_layers=4, num_attention_heads=4, hidden_size=128, ffn_hidden_size=512)
    sizes = case.parallel.tensor_model_parallel_size, case.parallel.pipeline_model_parallel_size
    return TrainingSetup(
        shape=ModelShape(size, vocab_size=1000, max_sequence_length=256),
        parallel=case.parallel,
        data_parallel_size=case.ranks // (sizes[0] * sizes[1]),
        micro_batch_size=4,
        num_microbatches=2,
        bf16=False,
    )


def measure_peak(places: Places, name: str) -> None:
    """Two real steps on every rank; the first writes down what each of them held at most."""
    import torch.distributed as dist

    from megatron_chameleon.parallel.layout import distributed
    from tests.peak_memory import peak_of_training

    setup = setup_of(PEAKS[name])
    with distributed(setup.parallel, seed=0) as layout:
        measured = [0] * layout.world_size
        dist.all_gather_object(measured, peak_of_training(setup, layout))
        if layout.is_main:
            peak_file(places, name).parent.mkdir(exist_ok=True)
            peak_file(places, name).write_text(json.dumps(measured))
