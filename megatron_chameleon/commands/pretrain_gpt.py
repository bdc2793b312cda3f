"""Train a GPT on a mixture of domains.

N ranks: ``torchrun --nproc-per-node N -m megatron_chameleon pretrain_gpt ...``.
"""

from __future__ import annotations

from megatron_chameleon.cli import Tool
from megatron_chameleon.methods.online.options import PretrainOptions, hook_class
from megatron_chameleon.training import options as training_options
from megatron_chameleon.training.stopping import StopRequests


def main(options: training_options.PretrainOptions) -> None:
    """Train, or resume training."""
    # Handle signals before torch is imported, and never restore the default: a signal may arrive at
    # any time.
    stops = StopRequests(options.stopping)
    stops.install_handlers()
    # Import this module here, so that --help does not import torch.
    from megatron_chameleon.training.trainer import pretrain

    pretrain(options, hook_factory=hook_class(options.online.online), stops=stops)


COMMAND = Tool(main, PretrainOptions, prints_log=True)
