"""DoGE: raise the weight of domains whose gradients align with the target's.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024.
"""

from __future__ import annotations

from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.doge.options import DogeOptions
from megatron_chameleon.methods.method import Method


def run(options: DogeOptions) -> int | None:
    """Train the proxy and write the mixture."""
    from megatron_chameleon.methods.doge.compute import Doge

    return None if Doge.compute(options) else STOPPED_STATUS


METHOD = Method(
    name="doge",
    options=DogeOptions,
    compute=run,
    summary="mean weights of a proxy that upweights domains whose gradients align with the target",
    needs="nothing besides the corpus",
    cost="one training run, whose steps take 1.7 times as long for 7 domains and 2.5 times for 17 "
    "(by Chameleon's paper); memory for a gradient of each domain",
    good_for="one set of domains; a target domain that is not trained on (--target)",
    source="Fan, Pagliardini, Jaggi: DoGE, ICML 2024",
)
