"""The cost of a mixture as Chameleon's tables print it, apart from what the ledger counts.

Xie, Tonin, Cevher (ICML 2025) count 6 N D for training and 2 N D for a forward pass. N leaves out
the embeddings and the output layer; for the proxy called 82M, which has six layers, it is that of
twelve, 12 x 12 x 768^2. Their figures follow from this and the settings in ``PAPER``. Of the Pile's
row, RegMix's 3.5e18 fits no such rule.

Left out of the printed figures, and counted by :mod:`megatron_chameleon.model.flops`: attention
scores, the output layer (86% of a 1M proxy), and the forward passes of DoReMi's reference
beside the proxy. Neither counts inner products of gradients, regressions, or the search for
hyper-parameters. A mixture holds both: these figures to stand beside the paper's, the ledger's to
be believed.
"""

from __future__ import annotations

import dataclasses

from megatron_chameleon.model.flops import embedding_flops, forward_flops, training_flops
from megatron_chameleon.model.sizes import ModelShape, ModelSize, model_size, name_of

TRAINING, FORWARD = 6, 2
"""FLOPs per parameter and token."""

# What the paper takes for N where it is not 12 L h^2 of the size that trains.
PRINTED_PARAMETERS = {"82m": 12 * 12 * 768**2, "1m": 1_000_000}
TRAININGS = {"doremi": 2}  # the reference and the proxy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """What a method trains and reads.

    Attributes:
        model_size: of the proxies, or its name.
        trained_tokens: tokens that one proxy is trained on: steps x batch x sequence.
        num_proxies: proxies of the method's kind (of a swarm); DoReMi's pair counts as one.
        embedded_tokens: tokens of all windows that a proxy embeds.
    """

    model_size: str | ModelSize = "82m"
    trained_tokens: int = 0
    num_proxies: int = 1
    embedded_tokens: int = 0


STEP_TOKENS = 128 * 1024
LONG_PROXY = PaperSettings(trained_tokens=10_000 * STEP_TOKENS)
PAPER = {
    "doremi": LONG_PROXY,
    "doge": LONG_PROXY,
    # Windows of 400 tokens are what its figure for the Pile's 17 domains, 4.62e15, implies.
    "chameleon": PaperSettings(trained_tokens=2_000 * STEP_TOKENS, embedded_tokens=7 * 4096 * 400),
    "regmix": PaperSettings(model_size="1m", trained_tokens=10**9, num_proxies=200),
    # 20 mixtures at 4 sizes, each as dear as a proxy of 10,000 steps.
    "mixing-laws": dataclasses.replace(LONG_PROXY, num_proxies=80),
}
"""Method -> the settings behind the paper's figures for SlimPajama."""


def paper_parameters(size: str | ModelSize) -> int:
    """N of the paper for a proxy: 12 L h^2, or what it prints for its own.

    Raises:
        UserError: for a name that no size has.
    """
    name = size if isinstance(size, str) else name_of(size)
    if name in PRINTED_PARAMETERS:
        return PRINTED_PARAMETERS[name]
    shape = model_size(size) if isinstance(size, str) else size
    return 12 * shape.num_layers * shape.hidden_size**2


def paper_flops(method: str, settings: PaperSettings | None = None) -> float:
    """FLOPs to find a mixture as the paper counts them, for ``parameters["paper_flops"]``.

    Args:
        method: what ``--method`` takes, of those that train; it decides how often a proxy's
            training counts.
        settings: of this run; the paper's own for SlimPajama unless given. Of a swarm of several
            sizes, each size has settings of its own, and their figures add up.

    Raises:
        ValueError: without settings, for a method that the paper does not have.
    """
    if settings is None:
        if method not in PAPER:
            raise ValueError(
                f"the paper has no '{method}', only {', '.join(PAPER)}: give the settings of the "
                "run, or leave paper_flops out of the mixture"
            )
        settings = PAPER[method]
    trained = TRAININGS.get(method, 1) * settings.num_proxies * settings.trained_tokens
    per_parameter = TRAINING * trained + FORWARD * settings.embedded_tokens
    return float(paper_parameters(settings.model_size)) * per_parameter


def counted_flops(
    method: str, settings: PaperSettings, shape: ModelShape, seq_length: int, window_length: int
) -> float:
    """FLOPs of the same settings from the shapes: what the ledger would count at the least.

    DoReMi's reference reads every token that the proxy is trained on; domains' gradients cost no
    more than their sum; windows are embedded by the first half of the layers. With the 82M proxy as
    it is, DoReMi takes 11.6 times what Chameleon does, and DoGE 5.0 times.

    Args:
        method: what ``--method`` takes.
        settings: how many tokens are trained on and embedded, and by how many proxies.
        shape: of one proxy, in place of ``settings.model_size``.
        seq_length: tokens of a sample.
        window_length: tokens of a window that is embedded.
    """
    tokens = settings.num_proxies * settings.trained_tokens
    spent = TRAININGS.get(method, 1) * training_flops(shape, tokens, seq_length)
    if method == "doremi":
        spent += forward_flops(shape, tokens, seq_length)
    layer = shape.size.num_layers // 2
    return spent + embedding_flops(shape, layer, settings.embedded_tokens, window_length)
