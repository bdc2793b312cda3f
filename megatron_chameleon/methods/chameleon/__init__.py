"""Chameleon: domain weights from kernel ridge leverage scores of domain embeddings.

Xie, Tonin, Cevher: Chameleon, ICML 2025.
"""

from __future__ import annotations

from megatron_chameleon.methods.chameleon.options import ChameleonOptions
from megatron_chameleon.methods.method import Method


def run(options: ChameleonOptions) -> None:
    """Embed the domains and write the mixture."""
    from megatron_chameleon.methods.chameleon.compute import compute_mixture

    compute_mixture(options)


METHOD = Method(
    name="chameleon",
    options=ChameleonOptions,
    compute=run,
    summary="inverse leverage scores of the domain embeddings",
    needs="a proxy trained on a uniform mixture (--checkpoint)",
    cost="the proxy, once; then forward passes over each new domain",
    good_for="changing sets of domains; fine-tuning (--mode finetune)",
    source="Xie, Tonin, Cevher: Chameleon, ICML 2025",
)
