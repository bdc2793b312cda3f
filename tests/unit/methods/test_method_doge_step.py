"""A step of DoGE's proxy against autograd and the rule on whole gradients."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.gradient_alignment.hook import GradientAlignment
from megatron_chameleon.mixture.doge import DogeRecipe, Roles
from tests.device_reads import device_reads
from tests.unit.training.test_training_hook import (
    NUM_DOMAINS,
    RATE,
    build_passes,
    domain_mask,
    expected_gradient,
    micro_batches,
    run,
)

__all__ = ["micro_batches"]  # a fixture

NAMES = ["a", "b", "c", "d"]
# The batch has samples of all but domain 2.
PRESENT = (0, 1, 3)
ALL = Roles((0, 1, 2, 3), (0, 1, 2, 3))
TOWARDS_B = Roles((0, 2, 3), (1,))


@pytest.fixture
def passes(one_rank):
    return build_passes(one_rank, per_token=True)


def clipped_gradients(passes, batches, max_norm):
    """[k, n] float64, by autograd; zero for the domain that is absent."""
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
def test_a_step_is_that_of_the_algorithm(passes, micro_batches, one_rank, roles, max_norm):
    recipe = DogeRecipe(mu=0.2, max_norm=max_norm)
    hook = GradientAlignment(NAMES, recipe, roles)
    _, found = run(hook, passes, micro_batches, one_rank)
    gradients = clipped_gradients(passes, micro_batches, max_norm)
    norms = [float(gradients[i].norm()) for i in roles.train if i in PRESENT]
    assert min(norms) < 5.0  # at 0.4 all are clipped, at 5 none
    towards = gradients[list(roles.target)].sum(0)
    mean_norm = sum(norms) / len(norms) + 1e-6
    scores = torch.stack([gradients[i] @ towards / mean_norm for i in roles.train]).clamp(0, 5)
    weights = torch.softmax(RATE * scores / recipe.mu, dim=0)
    told = hook.metrics()
    assert [told["weights"][NAMES[i]] for i in roles.train] == pytest.approx(weights.tolist(), 1e-4)
    assert float(weights.max() - weights.min()) > 0.01
    here = [row for row, domain in enumerate(roles.train) if domain in PRESENT]
    shares = weights[here] / weights[here].sum()
    expected = shares @ gradients[[roles.train[row] for row in here]]
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-4)
    assert (told["weights"]["b"] == 0.0) == (roles is TOWARDS_B)


def test_the_host_waits_for_the_products_alone(passes, micro_batches, one_rank, monkeypatch):
    hook = GradientAlignment(NAMES, DogeRecipe(), ALL)
    run(hook, passes, micro_batches, one_rank)
    reads = device_reads(lambda: run(hook, passes, micro_batches, one_rank), monkeypatch)
    # What every hook of gradients costs; the copy of the products is not counted.
    assert reads == 3


def poisoned(passes, micro_batches, one_rank, domain, roles):
    """A hook after a step in which the gradient of one domain is not a number."""
    hook = GradientAlignment(NAMES, DogeRecipe(mu=0.2), roles)
    before = hook.state_dict()
    for batch in micro_batches:
        batch["loss_mask"][batch["domain"] == domain] *= math.nan
    _, found = run(hook, passes, micro_batches, one_rank)
    return hook, before, found


def test_a_gradient_that_is_no_number_teaches_nothing(passes, micro_batches, one_rank):
    hook, before, found = poisoned(passes, micro_batches, one_rank, 1, ALL)
    assert hook.state_dict() == before
    assert not torch.isfinite(found.norm())  # so that the guard skips the step


def test_a_state_goes_on_where_it_was_and_with_nothing_else(passes, micro_batches, one_rank):
    recipe = DogeRecipe(mu=0.2)
    first, second = (GradientAlignment(NAMES, recipe, ALL) for _ in range(2))
    run(first, passes, micro_batches, one_rank)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.metrics() == first.metrics()
    for hook in (first, second):
        run(hook, passes, micro_batches, one_rank)
    assert second.state_dict() == first.state_dict()
    whole = first.state_dict()
    for name in ("log_weights", "products", "alignment", "mean", "mean_alignment"):
        with pytest.raises(UserError, match=f"its '{name}' is not the 4"):
            second.load_state_dict({**whole, name: whole[name][:3]})
    for other, message in (
        (GradientAlignment(NAMES, DogeRecipe(mu=0.3), ALL), "another rule: mu 0.2, not 0.3"),
        (GradientAlignment(NAMES, recipe, TOWARDS_B), "another target: a, b, c, d, not b"),
        (GradientAlignment(NAMES, recipe, Roles((0, 1), ALL.target)), "other domains: a, b, c, d"),
    ):
        with pytest.raises(UserError, match=message):
            other.load_state_dict(first.state_dict())
