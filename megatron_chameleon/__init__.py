"""Decide how much of each data domain a language model trains on, and train it."""

import logging
import os
import warnings

__version__ = "0.1.0"

# Each module of megatron-core that would use Transformer Engine or Apex warns when it is imported,
# a dozen times in total. The command doctor reports once that the packages are missing, with the
# consequences.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # megatron-core's distributed optimizer reads gradients of views on purpose, so the warning is
    # no sign of a problem.
    "The .grad attribute of a Tensor that is not a leaf",
    # This warning is about Transformer Engine's core_attn, which is not used here.
    "If you are using transformer_engine as the transformer implementation",
    # A model that is not used here, but imported from 0.19 on.
    "MimoModelConfig is experimental",
):
    warnings.filterwarnings("ignore", message=_message, category=UserWarning)


def _let_numba_compile() -> None:
    """Give numba a temporary cache if it has no other, since imports would then fail.

    numba and umap-learn cache next to their sources or in the home. Most users of a container can
    write neither.
    """
    import atexit
    import shutil
    import sys
    import tempfile

    sources = (os.path.dirname(__file__), sys.prefix)
    if "NUMBA_CACHE_DIR" in os.environ or all(os.access(path, os.W_OK) for path in sources):
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    try:
        os.makedirs(os.path.join(caches, "numba"), exist_ok=True)
        tempfile.TemporaryFile(dir=os.path.join(caches, "numba")).close()
    except OSError:
        os.environ["NUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="numba-")
        atexit.register(shutil.rmtree, os.environ["NUMBA_CACHE_DIR"], ignore_errors=True)


_let_numba_compile()

# megatron-core imports torch's builder of extensions, which logs that there is no GPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(
    lambda record: "No CUDA runtime is found" not in record.getMessage()
)
