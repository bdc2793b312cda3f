from __future__ import annotations

from pathlib import Path

import pytest

from megatron_chameleon.artifacts import DrawnTokens, TokenizerIdentity
from megatron_chameleon.blend.schedule import MixtureSchedule, Phase
from megatron_chameleon.blend.token_data import DomainData, TokenData
from megatron_chameleon.training.plan import planned_epochs
from megatron_chameleon.training.run_folder import sampled_tokens

SIZES = {"news": 1000, "code": 250, "empty": 0}
DATA = TokenData(
    "a test",
    tuple(DomainData(name, Path(name), 0, 1, size, name, 100) for name, size in SIZES.items()),
    TokenizerIdentity("tokenizers", "tokenizer.json", "0" * 64, 100, 0),
    "0" * 64,
)
SCHEDULE = MixtureSchedule((Phase(0, (3.0, 1.0, 0.0)), Phase(8, (0.0, 2.0, 0.0))))


def test_what_was_asked_adds_up_over_the_weights_and_got_is_what_was_counted():
    drawn = sampled_tokens(DATA, SCHEDULE, 12, 10, {"news": 70, "code": 50})
    assert drawn == {
        "news": DrawnTokens(weight=0.0, asked=60.0, got=70, epochs=0.07),
        "code": DrawnTokens(weight=1.0, asked=60.0, got=50, epochs=0.2),
        "empty": DrawnTokens(weight=0.0, asked=0.0, got=0, epochs=0.0),
    }


@pytest.mark.parametrize(("samples", "weight"), [(0, 0.75), (1, 0.75), (8, 0.75), (9, 0.0)])
def test_the_weight_is_that_of_the_last_sample_drawn(samples, weight):
    assert sampled_tokens(DATA, SCHEDULE, samples, 10, {})["news"].weight == weight


def test_planned_epochs_are_of_all_that_the_schedule_asks_for():
    epochs = planned_epochs(DATA, SCHEDULE, 12, 10)
    assert epochs == pytest.approx({"news": 0.06, "code": 0.24, "empty": 0.0})
    # What the whole run asks for is what was asked when it ends.
    asked = sampled_tokens(DATA, SCHEDULE, 12, 10, {})
    assert epochs == pytest.approx(
        {name: asked[name].asked / max(size, 1) for name, size in SIZES.items()}
    )
