"""Methods with proxies find the CPU's mixtures on the device, with few host synchronizations."""

from __future__ import annotations

import pytest

from megatron_chameleon.artifacts import Mixture
from tests.simulated_cuda.cases import (
    OVERLAPPED,
    PIPELINE,
    PRETRAINING_FLAGS,
    STEPS_WITHOUT_LOGGING,
    TENSOR,
)
from tests.simulated_cuda.conftest import Finished, Tools
from tests.simulated_cuda.driver import Kind

pytestmark = pytest.mark.slow

# Weights are computed from losses or products of gradients, which agree to 1e-5.
WEIGHT_TOLERANCE = 1e-4
# Host synchronizations per step. DoReMi reads the gradient norm and the excess losses. DoGE reads
# the gradient norm, the domains of the batch, the positions of their samples, the gradient
# products, and the number of samples.
WAITS_OF_A_STEP = {"doremi": 2, "doge": 5}
LAYOUTS = {
    "one": ((), 1),
    "sharded": (OVERLAPPED, 2),
    "tensor": (TENSOR, 2),
    "pipeline": (PIPELINE, 2),
}


def compute(tools: Tools, kind: Kind, name: str, method: str, *flags: str, **options) -> Finished:
    command = ("tools/compute_mixture.py", "--method", method, "--accept-uncertain", *flags)
    places = ("--corpus", "{corpus}", "--output", "{folder}/mixture.json")
    done = tools.run(kind, name, [*command, *places], **options)
    assert done.status == 0, done.log
    return done


def weights(done: Finished) -> dict[str, float]:
    return dict(Mixture.load(done.folder / "mixture.json").weights)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["doremi", "doge"])
def test_proxies_find_the_weights_of_the_cpu(tools: Tools, method: str, layout: str) -> None:
    flags, ranks = LAYOUTS[layout]
    if method == "doremi":
        flags = (*flags, "--reference", str(tools.reference().folder))
    else:
        flags = (*flags, "--doge-mu", "0.05")
    name = f"{method}-{layout}"
    found, expected = tools.concurrently(
        lambda: compute(tools, "cuda", name, method, *PRETRAINING_FLAGS, *flags, ranks=ranks),
        lambda: compute(tools, "cpu", name, method, *PRETRAINING_FLAGS, *flags, ranks=ranks),
    )
    assert weights(found) == pytest.approx(weights(expected), abs=WEIGHT_TOLERANCE)
    for step in STEPS_WITHOUT_LOGGING:
        for waits in found.synchronizations():
            counts = waits.of_step(step)
            assert sum(counts.values()) <= WAITS_OF_A_STEP[method], (step, dict(counts))


@pytest.mark.parametrize("layout", ["one", "tensor", "pipeline"])
def test_trained_experts_of_mixmin_find_the_weights_of_the_cpu(tools: Tools, layout: str) -> None:
    flags, ranks = LAYOUTS[layout]
    flags = ("--experts", "nano", "--target", "poems=3,news=1", "--accept-uncertain", *flags)
    name = f"mixmin-{layout}"
    found, expected = tools.concurrently(
        lambda: compute(tools, "cuda", name, "mixmin", *PRETRAINING_FLAGS, *flags, ranks=ranks),
        lambda: compute(tools, "cpu", name, "mixmin", *PRETRAINING_FLAGS, *flags, ranks=ranks),
    )
    assert weights(found) == pytest.approx(weights(expected), abs=1e-3)
