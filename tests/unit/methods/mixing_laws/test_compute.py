"""Proxies with the epochs of the target run reject text that is worthless when it is repeated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.methods.mixing_laws import MixingLawsOptions
from megatron_chameleon.methods.mixing_laws.compute import MixingLawsFit
from megatron_chameleon.methods.options import PriorOptions
from megatron_chameleon.methods.swarm import MixtureSamplingOptions, SwarmOptions
from tests.small_corpus import EOD, Documents, write_corpus

SWARM = SwarmOptions(
    model="nano",
    train_iters=50,
    seq_length=16,
    global_batch_size=16,
    lr=1e-2,
    lr_warmup_iters=5,
    eval_tokens=1024,
)
SMALL, LARGE = 8000, 1_280_000


@pytest.fixture
def two_domains(tmp_path):
    """The target's distribution in a small domain, and mixed with another one in a large domain.

    The tokens are independent, so a model learns only their frequencies, within 50 steps, or
    memorizes text that is repeated often.
    """
    rng = np.random.default_rng(1)
    target = 1 / np.arange(1, EOD + 1)
    target /= target.sum()
    other = 0.6 * target + 0.4 * np.roll(target, 100)

    def documents(tokens, shares):
        return np.split(rng.choice(EOD, tokens, p=shares), tokens // 16)

    texts: Documents = {
        name: {
            "train": documents(tokens, shares),
            "valid": documents(2048, target),
            "test": documents(16, target),
        }
        for name, tokens, shares in (("small", SMALL, target), ("large", LARGE, other))
    }
    return write_corpus(tmp_path / "corpus", texts)


@pytest.mark.slow
def test_text_that_is_good_only_while_fresh_is_rejected(two_domains, tmp_path):
    """The target run has 100 times the proxies' tokens.

    Losses of real runs of that length with weights 0, 0.1, 0.5 and 0.9 of the small domain are
    4.46, 4.18, 4.36 and 5.27.
    """
    found = {}
    for target_tokens in (None, 100 * SWARM.tokens):
        output = tmp_path / f"{target_tokens}.json"
        options = MixingLawsOptions(
            corpus=two_domains.root,
            output=output,
            target="small",
            num_proxies=8,
            sampling=MixtureSamplingOptions(
                prior_exponent=0.0, min_strength=1.0, max_upweighting=1000.0
            ),
            swarm=dataclasses.replace(SWARM, target_tokens=target_tokens),
            fallback=PriorOptions(accept_uncertain=True),
        )
        assert MixingLawsFit(options).compute()
        found[target_tokens] = Mixture.load(output).weights["small"]
    unmatched, matched = found.values()
    assert unmatched > 0.8
    assert matched < 0.3
