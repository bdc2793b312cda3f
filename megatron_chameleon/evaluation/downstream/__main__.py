"""lm-eval's own command, with our checkpoints among its models.

    python -m megatron_chameleon.evaluation.downstream run \
      --model megatron_chameleon --model_args checkpoint=runs/mine/5-base/uniform-seed1 --tasks sciq

lm-eval 0.4.13 has no way to announce a model from outside: it knows the models that were registered
before it looks, and this registers ours and hands over. Under torchrun start it with -m.
"""

from __future__ import annotations

import os
import sys

from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.installed import require_harness

MODEL_NAME = "megatron_chameleon"


def register_model() -> None:
    """Let lm-eval know our model by name; it is imported when it is asked for."""
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        module = f"{__package__}.checkpoint_model"
        model_registry.register(MODEL_NAME, target=f"{module}:CheckpointModel")


def main() -> None:
    """Run lm-eval's command. Leaves with status 2 and one line for a user's mistake."""
    if int(os.environ.get("RANK", "0")) > 0:
        os.environ.setdefault("LMEVAL_LOG_LEVEL", "ERROR")  # the first rank says it
    try:
        require_harness()
        from lm_eval.__main__ import cli_evaluate

        register_model()
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
