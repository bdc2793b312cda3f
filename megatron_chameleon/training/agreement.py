"""What all ranks know of a step before it updates the model: its loss, and whether to stop.

It costs no wait of its own. The sum over ranks and its copy to the host are queued behind the
backward pass and before the gradient's norm, which megatron waits for in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.stopping import REASONS, SIGNAL_NAMES


class StepAgreement:
    """One rank's part in it: :meth:`send`, then the gradient's norm, then the results."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        on_gpu = layout.device.type == "cuda"
        # Pinned: only then does the copy not wait for the device.
        self._host = torch.zeros(2 + len(REASONS), dtype=torch.float64, pin_memory=on_gpu)

    def send(self, domain_sums: torch.Tensor, stop_flags: Sequence[float]) -> None:
        """Say what this rank has.

        Args:
            domain_sums: [k, 3] float64 on the device, as in :class:`StepResult`.
            stop_flags: above 0 for each of ``REASONS`` that this rank has to stop.
        """
        losses = domain_sums if speaks(self._layout) else torch.zeros_like(domain_sums)
        mine = torch.cat([losses[:, :2].sum(0), self._on_device(stop_flags)])
        dist.all_reduce(mine)
        self._host.copy_(mine, non_blocking=True)

    def signals(self, stop_flags: Sequence[float]) -> list[str]:
        """Those of ``SIGNAL_NAMES`` that any rank has; every rank calls this and waits for all.

        That the time is up does not count: each start of a run should get a step further.
        """
        mine = self._on_device(stop_flags[: len(SIGNAL_NAMES)])
        dist.all_reduce(mine)
        return [name for name, flag in zip(SIGNAL_NAMES, mine.tolist(), strict=True) if flag]

    def loss(self) -> float | None:
        """Mean loss of the step's tokens; None where none of them has one.

        Only after the device has been waited for since :meth:`send`.
        """
        loss, tokens = self._host[:2].tolist()
        return loss / tokens if tokens else None

    def stop_reasons(self) -> list[str]:
        """Those of ``REASONS`` that any rank has; only after the device has been waited for."""
        flags = self._host[2:].tolist()
        return [reason for reason, flag in zip(REASONS, flags, strict=True) if flag]

    def _on_device(self, flags: Sequence[float]) -> torch.Tensor:
        """The flags in a tensor, by kernels alone: copying them there would wait for the device."""
        tensor = torch.zeros(len(flags), dtype=torch.float64, device=self._layout.device)
        for number, flag in enumerate(flags):
            if flag:
                tensor[number : number + 1].fill_(flag)
        return tensor


def speaks(layout: Layout) -> bool:
    """Whether this rank's sums of losses count: tensor-parallel ranks all hold the same."""
    return layout.is_last_stage and layout.tensor_rank == 0
