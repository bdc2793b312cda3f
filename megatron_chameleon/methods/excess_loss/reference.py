"""The model that DoReMi's proxy is compared with, and whether the two can be."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.provenance import plain_options
from megatron_chameleon.checkpoint.load import require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.training import PretrainOptions

FLAG = "--reference"


@dataclasses.dataclass(frozen=True)
class Reference:
    """The last checkpoint of the reference's run, and the shape of its model."""

    checkpoint: CheckpointRecord
    shape: ModelShape


@dataclasses.dataclass(frozen=True)
class Compared:
    """What is compared with a reference: a proxy of ``shape``, trained by ``run`` on ``corpus``."""

    corpus: Corpus
    run: PretrainOptions
    shape: ModelShape


def find_reference(folder: Path, proxy: Compared, called: str = FLAG) -> Reference:
    """The reference, trained.

    Args:
        folder: of its run.
        proxy: that is compared with it.
        called: what messages call it; the flag by which a person gives it.

    Raises:
        UserError: if it is no finished run, or its losses are not those of the proxy's samples.
    """
    if not TrainingRun.exists(folder):
        raise UserError(f"{called} {folder}: there is no run; give the folder of a finished one")
    run = TrainingRun.load(folder)
    if run.status != "finished":
        raise UserError(
            f"{called} {folder}: the run is {run.status} at step {run.step} of {run.train_iters}; "
            "finish it first"
        )
    record = CheckpointRecord.load(find_checkpoint(folder, called))
    reference = Reference(record, shape_of(record))
    _require_same_losses(reference, proxy)
    return reference


def warn_of_differences(folder: Path, proxy: Compared) -> None:
    """Warn of what makes the losses of a reference that was given others than they might be."""
    run = TrainingRun.load(folder)
    if run.provenance.inputs.get("corpus") != proxy.corpus.hash:
        warnings.warn(
            f"{FLAG} {folder} was trained on another corpus than {proxy.corpus.root}: domains that "
            "it has not seen will look as if there were nothing to learn",
            MixtureWarning,
            stacklevel=2,
        )
    before = run.provenance.options.get("boundaries", {})
    for name, value in plain_options(proxy.run.boundaries).items():
        if name == "eod_mask_loss" and value:  # what it leaves out has no excess loss either
            continue
        if before.get(name, False) != value:
            flag = f"--{name.replace('_', '-')}"
            warnings.warn(
                f"{FLAG} {folder} was trained with {flag} {before.get(name, False)}, the proxy is "
                f"with {value}: at the ends of documents, excess losses are of that difference too",
                MixtureWarning,
                stacklevel=2,
            )


def _require_same_losses(reference: Reference, proxy: Compared) -> None:
    """Raises UserError unless the two models' losses are of the same tokens."""
    where, shape, wanted = reference.checkpoint.root, reference.shape, proxy.shape
    require_tokenizer(reference.checkpoint, proxy.corpus)
    if shape.vocab_size != wanted.vocab_size:
        raise UserError(
            f"{where} has a vocabulary of {shape.vocab_size}, {proxy.corpus.root} one of "
            f"{wanted.vocab_size}; give another {FLAG}"
        )
    if shape.max_sequence_length != wanted.max_sequence_length:
        raise UserError(
            f"{where} was trained on samples of {shape.max_sequence_length} tokens, the proxy's "
            f"--seq-length is {wanted.max_sequence_length}; give that one, or another {FLAG}"
        )
    check_model_layout(shape.size, proxy.run.parallel, wanted.max_sequence_length)
