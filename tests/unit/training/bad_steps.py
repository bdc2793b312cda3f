"""Faults injected into steps of a real run."""

from __future__ import annotations

import torch

from megatron_chameleon.training import step, trainer


def run_out(*_arguments, **_more):
    """Raise the error of a device without free memory."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def before_steps(patched, actions):
    """Call ``actions[n](model)`` before the n-th step of the next run, counted from 1."""
    steps = iter(range(1, 1000))

    def train_step(model, *arguments, **more):
        actions.get(next(steps), lambda _model: None)(model)
        return step.train_step(model, *arguments, **more)

    patched.setattr(trainer, "train_step", train_step)


def poison(factor):
    """Action of ``before_steps``: multiply the first parameter's next gradient by ``factor``."""

    def register(model):
        def multiply(gradient):
            handle.remove()
            return gradient * factor

        handle = next(model[0].parameters()).register_hook(multiply)

    return register
