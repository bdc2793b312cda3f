"""Steps of a real run that go wrong."""

from __future__ import annotations

import torch

from megatron_chameleon.training import step, trainer


def run_out(*_arguments, **_more):
    """What a device without room says."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def before_steps(patched, actions):
    """Call ``actions[step](model)`` before these steps of the next run, the first being 1."""
    steps = iter(range(1, 1000))

    def train_step(model, *arguments, **more):
        actions.get(next(steps), lambda _model: None)(model)
        return step.train_step(model, *arguments, **more)

    patched.setattr(trainer, "train_step", train_step)


def poison(factor):
    """Something that multiplies the next gradient of the first parameter by ``factor``."""

    def register(model):
        def multiply(gradient):
            handle.remove()
            return gradient * factor

        handle = next(model[0].parameters()).register_hook(multiply)

    return register
