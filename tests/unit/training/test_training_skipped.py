from __future__ import annotations

import math

from megatron_chameleon.training.skipped import SkippedStep, streak_message

FIRST = SkippedStep(12, "the loss is nan", {"code": 5, "news": 3}, {"code": math.nan, "news": 3.25})
SECOND = SkippedStep(13, "the loss is 99, above 4", {"news": 8}, {"news": 99.0})


def test_the_line_names_the_worst_domain_first():
    assert FIRST.line() == (
        "step 12 skipped: the loss is nan; code (5 samples, loss nan), news (3 samples, loss 3.25)"
    )


def test_the_last_words_name_steps_domains_and_the_checkpoint():
    said = streak_message([FIRST, SECOND], "run/checkpoints/step-00000010")
    assert said.startswith(
        "2 steps in a row were skipped, 12 to 13, the last because the loss is 99, above 4; their "
        "samples come from code (5 samples, loss nan), news (11 samples, loss 99); the last "
        "checkpoint before them is run/checkpoints/step-00000010; "
    )
    assert "from step 11 on (--mixture-change)" in said


def test_there_may_be_no_checkpoint():
    assert "there is no checkpoint before them" in streak_message([FIRST], None)
