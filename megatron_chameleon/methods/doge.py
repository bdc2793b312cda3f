"""DoGE: the domains whose gradients point where the target's do gain weight.

Fan, Pagliardini, Jaggi: DoGE, ICML 2024.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.errors import STOPPED_STATUS
from megatron_chameleon.methods.common.method import Method
from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.mixture import MethodOptions
from megatron_chameleon.options.proxy import ProxyOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class DogeOptions(MethodOptions):
    """Train a proxy whose gradient weighs domains by how much they help with the target.

    The weights are the mean over the proxy's steps. The same command goes on where it was stopped.
    """

    work_dir: Path | None = None
    """Folder of the proxy's run; the output without .json unless given."""
    target: str | None = None
    """Domains of the corpus, a,b, that the mixture is for: they are drawn as the others are, but
    not trained on, and get no weight. All domains alike are the target unless given, and all are
    trained on."""
    train_on_target: bool = False
    """Train on the domains of --target too, and give them weights."""
    rule: DogeRule = dataclasses.field(default_factory=DogeRule)
    proxy: ProxyOptions = dataclasses.field(default_factory=ProxyOptions)


def compute(options: DogeOptions) -> int | None:
    """Train the proxy and write the mixture."""
    from megatron_chameleon.methods.gradient_alignment.compute import compute_doge

    return None if compute_doge(options) else STOPPED_STATUS


METHOD = Method(
    name="doge",
    options=DogeOptions,
    compute=compute,
    summary="mean weights of a proxy that counts the domains most whose gradients help the target",
    needs="nothing beside the corpus",
    cost="one training run, whose steps take 1.7 times as long for 7 domains and 2.5 times for 17 "
    "(by Chameleon's paper); memory for a gradient of each domain",
    good_for="one set of domains; a target domain that is not trained on (--target)",
    source="Fan, Pagliardini, Jaggi: DoGE, ICML 2024",
)
