"""How many bf16 operations a device can do a second, and which share of them a model does."""

from __future__ import annotations

# Dense bf16 tensor-core FLOP/s, by what the device calls itself. NVIDIA's data sheets give twice as
# much, for sparse matrices. The PCIe and NVL parts are slower than these SXM ones, so a name has to
# match whole.
DENSE_BF16_PEAK: dict[str, float] = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


def dense_bf16_peak(device_name: str) -> float | None:
    """FLOP/s of the device of that name, or None if it is not in the table."""
    return DENSE_BF16_PEAK.get(device_name)


def model_flops_utilization(
    flops_per_token: float, tokens_per_second: float, peak: float | None
) -> float | None:
    """Model FLOP/s over the device's peak: Chowdhery et al. 2022, "PaLM", appendix B.

    Args:
        flops_per_token: of the model itself, forward and backward; what is recomputed or padded
            does not count.
        tokens_per_second: through one device.
        peak: FLOP/s of that device, or None if nobody knows.

    Returns:
        A share from 0 to 1, or None without a peak.
    """
    return None if peak is None else flops_per_token * tokens_per_second / peak
