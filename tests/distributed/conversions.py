"""Checkpoints to Hugging Face folders and back, and what a layout makes of one in between."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from megatron_chameleon.artifacts import CheckpointRecord
from megatron_chameleon.checkpoint.convert import convert_from_huggingface, convert_to_huggingface
from megatron_chameleon.checkpoint.load import load_weights, shape_of
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.evaluation.perplexity import evaluate_perplexity
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.options.convert import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.training.pretrain import pretrain
from tests.distributed.layout_cases import (
    ADDED_ROWS,
    NARROW_MULTIPLE,
    NARROW_RUN,
    REWRITTEN,
    Places,
    mixture_options,
    perplexity_options,
    tuning_options,
)


def convert_run(places: Places) -> None:
    """The run 'one' to a folder, and the folder to a checkpoint."""
    folder = places.huggingface("one")
    convert_to_huggingface(ToHuggingFaceOptions(places.run("one"), folder))
    convert_from_huggingface(FromHuggingFaceOptions(folder, places.from_huggingface("one")))


def pad_folder(places: Places) -> None:
    """The folder of the run 'one' with more rows than the tokenizer has tokens."""
    shutil.copytree(places.huggingface("one"), places.padded)
    weights, config = places.padded / "model.safetensors", places.padded / "config.json"
    tensors = load_file(weights)
    rows = tensors["transformer.wte.weight"]
    padded = torch.cat([rows, torch.ones(ADDED_ROWS, rows.size(1))])
    save_file({**tensors, "transformer.wte.weight": padded}, weights)
    body = json.loads(config.read_text())
    config.write_text(json.dumps({**body, "vocab_size": padded.size(0)}))


def train_tuned(places: Places, name: str) -> None:
    """Train from the folder, or from the checkpoint made of it."""
    pretrain(tuning_options(places, name))


def rewrite(places: Places, name: str) -> None:
    """Read that checkpoint in a layout, with untrained weights before, and write it again."""
    record = CheckpointRecord.load(places.from_huggingface("one"))
    is_narrow = name == NARROW_RUN
    narrow = mock.patch("megatron_chameleon.model.gpt.VOCABULARY_MULTIPLE", NARROW_MULTIPLE)
    with (
        narrow if is_narrow else contextlib.nullcontext(),
        distributed(REWRITTEN[name].parallel, seed=0) as layout,
    ):
        model = build_model_chunks(shape_of(record), layout, seed=1)
        load_weights(record, model)
        root, described = places.from_huggingface(name), layout.describe()
        written = dataclasses.replace(record, root=root, layout=described)
        save_checkpoint(model_state(model), written)


def convert_rewritten(places: Places, name: str) -> None:
    """What the layout has written, to a folder."""
    convert_to_huggingface(
        ToHuggingFaceOptions(places.from_huggingface(name), places.huggingface(name))
    )


def evaluate_converted(places: Places) -> None:
    """Perplexity by the checkpoint of the folder, as by the run itself."""
    options = perplexity_options(places, "one")
    checkpoint, output = places.from_huggingface("one"), places.evaluation("converted")
    evaluate_perplexity(dataclasses.replace(options, checkpoint=checkpoint, output=output))


def embed_converted(places: Places, layer: int) -> None:
    """The mixture by the checkpoint of the folder, as by the run itself."""
    options = mixture_options(places, "one", layer)
    checkpoint, output = places.from_huggingface("one"), places.mixture("converted", layer)
    compute_mixture(dataclasses.replace(options, checkpoint=checkpoint, output=output))
