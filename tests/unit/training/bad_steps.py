"""Faults injected into steps of a real run."""

from __future__ import annotations

import itertools

import torch

from megatron_chameleon.training.optimizer import TrainedModel


def run_out(*_arguments, **_more):
    """Raise the error of a device without free memory."""
    raise torch.OutOfMemoryError("CUDA out of memory")


def before_steps(patched, actions):
    """Call ``actions[n](model)`` before the n-th step of the next run, counted from 1."""
    steps, original = itertools.count(1), TrainedModel.step

    def step(model, forward_backward):
        actions.get(next(steps), lambda _model: None)(model.chunks)
        return original(model, forward_backward)

    patched.setattr(TrainedModel, "step", step)


def poison(factor):
    """Action of ``before_steps``: multiply the first parameter's next gradient by ``factor``."""

    def register(model):
        def multiply(gradient):
            handle.remove()
            return gradient * factor

        handle = next(model[0].parameters()).register_hook(multiply)

    return register
