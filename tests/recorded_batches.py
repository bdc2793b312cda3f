"""Record the batches that training reads, and read traced samples in the same form."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pandas as pd
import torch

from megatron_chameleon.blend.trace import RunTrace
from megatron_chameleon.training.step import BatchShape

Windows = dict[tuple[int, int, int, int], tuple[str, list[int]]]
"""(step, data-parallel rank, micro-batch, row) -> domain and tokens [s + 1]."""


@contextlib.contextmanager
def recorded_batches() -> Iterator[Windows]:
    """Record the windows that this rank reads in the block; a step that is repeated counts once."""
    found: Windows = {}
    micro_batches = BatchShape.micro_batches

    def recorded(shape: BatchShape, samples: Any, layout: Any, start_step: int = 0) -> Any:
        for number, batch in enumerate(micro_batches(shape, samples, layout, start_step)):
            step, micro_batch = divmod(number, shape.num_microbatches)
            windows = torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1).tolist()
            for row, (domain, window) in enumerate(zip(batch["domain"], windows, strict=True)):
                place = start_step + step + 1, layout.data_rank, micro_batch, row
                found[place] = (samples.data.names[domain], window)
            yield batch

    with mock.patch.object(BatchShape, "micro_batches", recorded):
        yield found


def traced_batches(trace: RunTrace, first: int, last: int) -> Windows:
    """The windows of the steps ``first`` to ``last`` according to the run's record."""
    found: Windows = {}
    numbers = {name: number for number, name in enumerate(trace.data.names)}
    for line in traced_rows(trace, first, last).itertuples():
        place = line.step, line.rank, line.micro_batch, line.row
        _, window = found.setdefault(place, (line.domain, []))
        place = numbers[line.domain], line.document, line.first_token, line.stop_token
        window += trace.tokens(*place).tolist()
    return found


def traced_rows(trace: RunTrace, first: int, last: int) -> pd.DataFrame:
    """All rows of the steps ``first`` to ``last`` in one table."""
    return pd.concat(trace.rows(first, last), ignore_index=True)
