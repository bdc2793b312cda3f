"""Test data: small models, their checkpoints and records, and pickles that run code."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.gpt import build_model
from megatron_chameleon.training.optimizer import build_optimizer, build_scheduler, data_parallel
from megatron_chameleon.training.options import OptimizerOptions
from tests.unit.artifacts.artifact_samples import checkpoint_record

SHAPE = ModelConfig(2, 2, 32, 64, vocab_size=100, max_sequence_length=16)
OPTIONS = OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=3)


def record_at(folder, shape=SHAPE):
    return dataclasses.replace(checkpoint_record(folder), model=dataclasses.asdict(shape))


def saved(state, folder):
    """Save a checkpoint of ``state``, and return its record."""
    save_checkpoint(state, record_at(folder))
    return CheckpointRecord.load(folder)


def change_config(folder: Path, **fields: object) -> None:
    """Change fields of the config.json of a Hugging Face folder."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def trainer_of(layout, seed=1, *, bf16=False):
    """A small model with its optimizer and its scheduler."""
    model = data_parallel([build_model(SHAPE, layout, seed=seed, bf16=bf16)], layout, bf16=bf16)
    optimizer = build_optimizer(model, OPTIONS, layout, bf16=bf16)
    return model, optimizer, build_scheduler(optimizer, OPTIONS, train_iters=10)


def train(trainer, first, last):
    """Take optimizer steps ``first`` to ``last`` on random gradients that depend on the step."""
    (model,), optimizer, scheduler = trainer
    for step in range(first, last + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        scheduler.step(1)
        optimizer.step()


class PickledCode:
    """Object that creates the folder ``trace`` when unpickled, which shows that code was run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.trace),)
