"""Train small models with and without compiled layers.

    python compiled_ranks.py ROOT BACKEND CASE...

takes two steps of each case, eagerly and compiled by BACKEND. Each rank writes ROOT/RANK.json:
case -> losses and gradient norms of both trainings, the number of compiled graphs, and the reasons
for graph breaks.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The launcher sets this variable to disable torch.compile, which these ranks need.
os.environ.pop("TORCHDYNAMO_DISABLE", None)

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables.torch import constant_fold_functions

from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.parallel.layout import Layout, distributed
from megatron_chameleon.training.options import OptimizerOptions
from tests.distributed.cases import COMPILED
from tests.families import FAMILIES, LENGTH, VOCAB_SIZE
from tests.random_training import RandomTraining, random_batches

STEPS, MICRO_BATCHES, ROWS = 2, 4, 2


def batches(layout: Layout) -> Iterator[Batch]:
    """Micro-batches of random text for this rank."""
    random = random_batches(VOCAB_SIZE, ROWS, LENGTH, num_domains=ROWS)
    for number, batch in enumerate(itertools.islice(random, STEPS * MICRO_BATCHES)):
        if number % layout.data_size == layout.data_rank:
            yield batch


def train(name: str, layout: Layout, backend: CompileCounterWithBackend | None) -> list[Any]:
    """Return for each step this rank's losses by domain, followed by the gradient norm."""
    training = RandomTraining(
        FAMILIES[name.rpartition("-")[2]],
        layout,
        bf16=False,
        compiled=backend,
        optimizer=OptimizerOptions(lr=1e-2, lr_warmup_iters=1),
        recompute=COMPILED[name].recompute,
    )
    passes = training.passes(MICRO_BATCHES // layout.data_size, ROWS, num_domains=ROWS)
    of_rank, found = batches(layout), []
    for _ in range(STEPS):
        result = training.step(lambda: passes.forward_backward(of_rank))
        found.append([*result.domain_sums[:, 0].tolist(), result.grad_norm])
    return found


def compare(name: str, backend: str) -> dict[str, Any]:
    """Train a case once eagerly and once with compiled layers."""
    with distributed(COMPILED[name], seed=0) as layout:
        plain = train(name, layout, None)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        # The simulated device replaces this function, which torch.compile must treat as a constant.
        constant_fold_functions[torch.cuda.current_device] = None  # type: ignore[call-overload]
        graphs = CompileCounterWithBackend(backend)
        with torch.compiler.set_stance("default"):
            compiled = train(name, layout, graphs)
    breaks = [reason[:300] for reason in torch._dynamo.utils.counters["graph_break"]]
    return {
        "plain": plain,
        "compiled": compiled,
        "graphs": graphs.frame_count,
        "breaks": breaks,
    }


def main() -> None:
    root, backend, *names = sys.argv[1:]
    found = {name: compare(name, backend) for name in names}
    Path(root, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
