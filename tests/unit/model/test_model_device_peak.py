from __future__ import annotations

import pytest

from megatron_chameleon.model.device_peak import dense_bf16_peak, model_flops_utilization
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.sizes import ModelShape, model_size


def test_only_whole_names_are_known():
    assert dense_bf16_peak("NVIDIA H200") == dense_bf16_peak("NVIDIA H100 80GB HBM3") == 989e12
    for slower_or_unknown in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "cpu", ""):
        assert dense_bf16_peak(slower_or_unknown) is None


def test_utilization_is_that_of_the_direct_count():
    """684m at sequence 1024, with every product of the model written out."""
    layers, h, f, s, v = 36, 1200, 4800, 1024, 50_257
    products = 2 * (h * 3 * h + h * h + h * f + f * h)  # multiply and add, per token
    attention = 2 * 2 * h * sum(range(1, s + 1)) / s  # scores and sums over the tokens before
    per_token = 3 * (layers * (products + attention) + 2 * h * v)
    counted = training_flops(ModelShape(model_size("684m"), v, s), 1, s)
    assert counted == pytest.approx(per_token, rel=1e-4)  # half of s against half of s + 1
    assert model_flops_utilization(counted, 100_000, 989e12) == pytest.approx(
        per_token * 1e5 / 989e12, rel=1e-4
    )


def test_without_a_peak_there_is_no_utilization():
    assert model_flops_utilization(1e9, 1e3, None) is None
