from __future__ import annotations

import dataclasses
import json
import math

from megatron_chameleon.training.skipped import SkippedStep, streak_message
from megatron_chameleon.training.way_out import WayOut

FIRST = SkippedStep(12, "the loss is nan", {"code": 5, "news": 3}, {"code": math.nan, "news": 3.25})
SECOND = SkippedStep(13, "the loss is 99, above 4", {"news": 8}, {"news": 99.0})


def test_the_line_names_the_worst_domain_first():
    assert FIRST.line() == (
        "step 12 skipped: the loss is nan; code (5 samples, loss nan), news (3 samples, loss 3.25)"
    )


def test_what_a_checkpoint_keeps_is_json_and_says_the_same():
    kept = json.loads(json.dumps([step.saved() for step in (FIRST, SECOND)], allow_nan=False))
    restored = [SkippedStep.restored(step) for step in kept]
    assert [step.line() for step in restored] == [FIRST.line(), SECOND.line()]


def test_the_last_words_name_steps_domains_and_the_checkpoint():
    said = streak_message([FIRST, SECOND], "run/checkpoints/step-00000010", "epoch")
    assert said == (
        "2 steps in a row were skipped, 12 to 13, the last because the loss is 99, above 4; their "
        "samples come from code (5 samples, loss nan), news (11 samples, loss 99); the last "
        "checkpoint before them is run/checkpoints/step-00000010; lower --lr or lengthen "
        "--lr-warmup-iters in a new run, or look at these domains and draw others from step 11 on "
        "(--mixture-change 11=MIXTURE)"
    )


def test_the_advice_is_what_the_run_can_take():
    assert "in a new run: from the start (--mixture), or" in streak_message(
        [FIRST], "x", "megatron"
    )
    assert "(--mixture-change 11=MIXTURE)" in streak_message([FIRST], "x", "feistel")
    first_step = dataclasses.replace(FIRST, step=1)
    for said in (
        streak_message([first_step], None, "epoch"),
        streak_message([FIRST], "x", "epoch", hook_mixes=True),
    ):
        assert said.endswith("draw others in a new run (--mixture)")


def test_a_command_without_flags_of_the_mixture_advises_none():
    """As that of a method which trains a proxy."""
    way_out = WayOut("give another --work-dir", "delete RUN", draws_by_flags=False)
    said = streak_message([FIRST], "x", "megatron", way_out=way_out)
    assert said.endswith(
        "in a new run, or look at these domains and mend their text; for a new run give another "
        "--work-dir, or delete RUN"
    )


def test_there_may_be_no_checkpoint_or_a_newer_one():
    assert "there is no checkpoint before them; " in streak_message([FIRST], None, "epoch")
    said = streak_message([FIRST], "x", "epoch", is_newest=False)
    assert "is x (to go on from there, write its name into the file 'latest' beside it); " in said
