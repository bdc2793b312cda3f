"""Install the simulated CUDA device in each Python process that has this folder in PYTHONPATH.

Python imports a module of this name at its start. The processes of multiprocessing and of Ray thus
have the device, which :mod:`tests.simulated_cuda.run_tool` installs in its own process only. The
device is installed when megatron-core is imported; processes that do not import it stay quick.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class InstallDevice(importlib.abc.MetaPathFinder):
    """Finds no module; installs the device before the first import of ``megatron``."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "megatron":
            sys.meta_path.remove(self)
            from tests.simulated_cuda import device

            device.hide_triton()
            device.install()


sys.meta_path.insert(0, InstallDevice())
