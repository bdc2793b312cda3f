"""tools/compute_mixture.py --method doge on one rank, and a step of its proxy against autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import Mixture
from megatron_chameleon.methods.doge.compute import Doge
from megatron_chameleon.methods.doge.hook import GradientAlignment
from megatron_chameleon.methods.doge.options import DogeRule
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from tests.small_corpus import DOMAINS
from tests.unit.methods.proxies import STEPS, hooks_of, method_options, proxy_run
from tests.unit.training.test_hook import (
    NUM_DOMAINS,
    RATE,
    build_passes,
    domain_mask,
    expected_gradient,
    micro_batches,
    run,
)

__all__ = ["micro_batches"]  # a fixture


@pytest.mark.parametrize("train_on_target", [False, True])
def test_a_target_is_trained_on_only_if_requested(corpus, tmp_path, train_on_target):
    settings = {"target": "poems", "rule": DogeRule(), "train_on_target": train_on_target}
    options = method_options("doge", tmp_path / "doge.json", corpus=corpus.root, **settings)
    assert Doge.compute(options)
    mixture, run = Mixture.load(options.output), proxy_run(options.output)
    assert sum(mixture.weights.values()) == pytest.approx(1.0)
    trained = list(DOMAINS if train_on_target else DOMAINS[:2])
    assert [name for name, weight in mixture.weights.items() if weight > 0] == trained
    mu = 0.01 if train_on_target else 0.05
    assert mixture.parameters["rule"]["mu"] == mu
    assert mixture.parameters["target_domains"] == ["poems"]
    assert mixture.parameters["trained_on"] == trained
    assert 0 < mixture.parameters["paper_flops"] < run.cost.flops  # without attention and head
    assert run.domain_tokens["poems"].actual == STEPS * 2 * 32  # sampled for its gradients
    first = hooks_of(options.output)[0]
    limited = np.clip([first["alignment"][name] for name in trained], 0, 5)
    expected = np.exp(0.5e-2 * limited / mu)  # half of the peak learning rate: warm-up
    assert [first["weights"][name] for name in trained] == pytest.approx(
        expected / expected.sum(), rel=1e-6
    )


NAMES = ["a", "b", "c", "d"]
PRESENT = (0, 1, 3)  # domains of the batch
ALL = Roles((0, 1, 2, 3), (0, 1, 2, 3))
TOWARDS_B = Roles((0, 2, 3), (1,))


@pytest.fixture
def passes(one_rank):
    return build_passes(one_rank, per_token=True)


def clipped_gradients(passes, batches, max_norm):
    """[k, n] float64 by autograd; zero for the absent domain."""
    found = {}
    for domain in PRESENT:
        masks = [domain_mask(batch, domain) for batch in batches]
        tokens = sum(mask.sum() for mask in masks)
        gradient = expected_gradient(passes, batches, [mask / tokens for mask in masks]).double()
        found[domain] = gradient * min(1.0, max_norm / float(gradient.norm()))
    zero = torch.zeros_like(found[0])
    return torch.stack([found.get(domain, zero) for domain in range(NUM_DOMAINS)])


@pytest.mark.parametrize("roles", [ALL, TOWARDS_B])
@pytest.mark.parametrize("max_norm", [5.0, 0.4])
def test_a_step_equals_the_algorithm_on_whole_gradients(
    passes, micro_batches, one_rank, roles, max_norm
):
    recipe = DogeRecipe(mu=0.2, dw_min=-5.0, max_norm=max_norm)
    hook = GradientAlignment(NAMES, recipe, roles)
    _, found = run(hook, passes, micro_batches, one_rank)
    gradients = clipped_gradients(passes, micro_batches, max_norm)
    norms = [float(gradients[i].norm()) for i in roles.train if i in PRESENT]
    assert min(norms) < 5.0  # 0.4 clips all, 5 none
    towards = gradients[list(roles.target)].sum(0)
    mean_norm = sum(norms) / len(norms) + 1e-6
    scores = torch.stack([gradients[i] @ towards / mean_norm for i in roles.train]).clamp(-5, 5)
    weights = torch.softmax(RATE * scores / recipe.mu, dim=0)
    logged = hook.metrics()["weights"]
    assert [logged[NAMES[i]] for i in roles.train] == pytest.approx(weights.tolist(), 1e-4)
    assert float(weights.max() - weights.min()) > 0.01
    rows = [row for row, domain in enumerate(roles.train) if domain in PRESENT]
    shares = weights[rows] / weights[rows].sum()
    expected = shares @ gradients[[roles.train[row] for row in rows]]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)
    assert (logged["b"] == 0.0) == (roles is TOWARDS_B)
