"""What a run draws of each domain: tokens and epochs, asked for and got."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_chameleon.artifacts import DrawnTokens, implied_epochs
from megatron_chameleon.blend.schedule import MixtureSchedule
from megatron_chameleon.blend.token_data import TokenData


def drawn_tokens(
    data: TokenData,
    schedule: MixtureSchedule,
    samples: int,
    seq_length: int,
    got: Mapping[str, int],
) -> dict[str, DrawnTokens]:
    """Domain -> what the first ``samples`` samples asked for, and what was got.

    Args:
        data: the domains.
        schedule: by which they are drawn.
        samples: samples drawn so far.
        seq_length: tokens of a sample.
        got: domain -> tokens counted in the batches; 0 where it has none.
    """
    weights = schedule.weights_at(max(samples - 1, 0))
    asked = schedule.samples_asked(samples)
    return {
        domain.name: DrawnTokens(
            weight=weight / sum(weights),
            asked=asked_samples * seq_length,
            got=got.get(domain.name, 0),
            epochs=got.get(domain.name, 0) / max(domain.tokens, 1),
        )
        for domain, weight, asked_samples in zip(data.domains, weights, asked, strict=True)
    }


def planned_epochs(
    data: TokenData, schedule: MixtureSchedule, num_samples: int, seq_length: int
) -> dict[str, float]:
    """Domain -> passes over its tokens that the whole run asks for."""
    asked = schedule.samples_asked(num_samples)
    shares = {name: n / num_samples for name, n in zip(data.names, asked, strict=True)}
    return implied_epochs(data.tokens, shares, num_samples * seq_length)


def drawn_lines(drawn: Mapping[str, DrawnTokens]) -> str:
    """A line per domain: its tokens asked and got, and the epochs that these are."""
    width = max(len(name) for name in drawn)
    return "\n".join(
        f"  {name:{width}}  {tokens.got:>15,} tokens of {tokens.asked:>15,.0f} asked, "
        f"{tokens.epochs:.2f} epochs"
        for name, tokens in drawn.items()
    )
