"""If Triton cannot launch kernels, torch computes the same result, and one warning names the
fix."""

from __future__ import annotations

import warnings

import pytest
import torch

from megatron_chameleon.embedding.pooling import masked_mean
from megatron_chameleon.model.cross_entropy import log_sum_exp, write_gradient
from megatron_chameleon.parallel import triton_probe

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can launch kernels here")


class OnGPU(torch.Tensor):
    """CPU tensor that claims to be on a GPU; without a driver, a Triton launch fails."""

    is_cuda = True


@pytest.fixture(autouse=True)
def _new_process(monkeypatch):
    """Clear the cached result of the probe and its warning."""
    cached = triton_probe.triton_problem, triton_probe._works_or_warns
    for function in cached:
        function.cache_clear()
    monkeypatch.setattr(torch, "empty", lambda *size, **_device: torch.zeros(*size))
    yield
    for function in cached:
        function.cache_clear()


def test_without_a_compiler_torch_computes_and_one_warning_is_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    rows = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    labels, scale = torch.tensor([0, 5, 9]), torch.ones(3)
    denominator = log_sum_exp(rows, 10)
    gradient, on_gpu = torch.empty_like(rows), torch.empty_like(rows)
    write_gradient(rows, labels, denominator, scale, 10, gradient)
    mean = masked_mean(rows[:, :, None], torch.tensor([2] * 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(log_sum_exp(rows.as_subclass(OnGPU), 10), denominator)
        write_gradient(rows.as_subclass(OnGPU), labels, denominator, scale, 10, on_gpu)
        states = rows[:, :, None].as_subclass(OnGPU)
        assert torch.equal(masked_mean(states, torch.tensor([2] * 16)), mean)
    assert torch.equal(on_gpu, gradient)
    assert len(caught) == 1
    assert "gcc python3-dev" in str(caught[0].message)
