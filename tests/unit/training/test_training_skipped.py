from __future__ import annotations

import json
import math

from megatron_chameleon.training.guard import SkippedStep, streak_message

FIRST = SkippedStep(12, "the loss is nan", {"code": 5, "news": 3}, {"code": math.nan, "news": 3.25})
SECOND = SkippedStep(13, "the loss is 99, above 4", {"news": 8}, {"news": 99.0})


def test_what_a_checkpoint_keeps_is_json_and_says_the_same():
    kept = json.loads(json.dumps([step.saved() for step in (FIRST, SECOND)], allow_nan=False))
    restored = [SkippedStep.restored(step) for step in kept]
    assert [step.line() for step in restored] == [FIRST.line(), SECOND.line()]


def test_the_last_words_name_steps_domains_and_the_checkpoint():
    said = streak_message([FIRST, SECOND], "run/checkpoints/step-00000010", "epoch")
    for part in ("12 to 13", "code (5", "news (11", "step-00000010", "--mixture-change 11="):
        assert part in said
