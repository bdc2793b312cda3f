"""Run a tool on the simulated CUDA device, as the only rank or as one of several ranks.

    python -m tests.simulated_cuda.run_tool [--synchronizations FILE] tools/TOOL.py OPTIONS...

Under torchrun, as ``python -m torch.distributed.run --nproc-per-node N -m
tests.simulated_cuda.run_tool ...``, each rank has a device of its own. With ``--synchronizations``,
rank 0 writes the source lines and numbers of its host synchronizations to FILE, and each other rank
to FILE.RANK.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path


def main() -> None:
    """Install the device and run the tool."""
    parser = argparse.ArgumentParser(prog="run_tool", description=__doc__)
    parser.add_argument("--synchronizations", type=Path)
    parser.add_argument("tool", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    from tests.simulated_cuda import device

    device.install()
    use_kernels()
    run_on_device(options.tool, options.arguments, options.synchronizations)


def use_kernels() -> None:
    """Interpret Triton's kernels if TRITON_INTERPRET=1 is set; otherwise hide Triton."""
    from tests.simulated_cuda import device

    sys.modules.pop("triton", None)
    if os.environ.get("TRITON_INTERPRET") == "1":
        device.interpret_kernels()
    else:
        device.hide_triton()


def run_on_device(tool: Path, arguments: Sequence[str], synchronizations: Path | None) -> None:
    """Run ``tool`` as if started with ``arguments``; the device must be installed.

    Raises:
        SystemExit: with the tool's exit status.
    """
    from tests.simulated_cuda.device import mark_steps_and_passes, replace_flex_attention
    from tests.simulated_cuda.tensors import DEVICE

    DEVICE.count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mark_steps_and_passes()
    replace_flex_attention()
    try:
        run_as_main(tool, arguments)
    finally:
        if synchronizations is not None:
            rank = int(os.environ.get("RANK", "0"))
            suffix = f".{rank}" if rank else ""
            DEVICE.synchronizations.save(synchronizations.with_name(synchronizations.name + suffix))


def run_as_main(tool: Path, arguments: Sequence[str]) -> None:
    """Run ``tool`` as ``python tool arguments...`` would."""
    sys.argv = [str(tool), *arguments]
    sys.path.insert(0, str(tool.resolve().parent))
    runpy.run_path(str(tool), run_name="__main__")


if __name__ == "__main__":
    main()
