"""From a checkpoint folder to a model that can be read out."""

from __future__ import annotations

from megatron_chameleon.artifacts import CheckpointRecord, Corpus
from megatron_chameleon.artifacts.record import check_values
from megatron_chameleon.checkpoint.load import load_weights
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.gpt import build_model, unwrap
from megatron_chameleon.model.readout import Reader
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout


def shape_of(record: CheckpointRecord) -> ModelShape:
    """The model's shape.

    Raises:
        UserError: if checkpoint.json does not hold one, or one that its files cannot hold.
    """
    where, hint = f"{record.root}/checkpoint.json", "the checkpoint is damaged; use another"
    shape = check_values(where, ModelShape, record.model, hint, "model")
    held = sum(file.bytes for file in record.files.values())
    shape.require_bytes(held, f"{where}: field model")
    return shape


def require_tokenizer(record: CheckpointRecord, corpus: Corpus) -> None:
    """Refuse a corpus whose tokens mean something else to the model.

    Raises:
        UserError: if the model was trained on tokens of another tokenizer.
    """
    if record.tokenizer_hash != corpus.tokenizer.sha256:
        raise UserError(
            f"{record.root} was trained with another tokenizer than {corpus.root} was made with; "
            "preprocess the text again with that tokenizer (--tokenizer-model)"
        )


def open_reader(record: CheckpointRecord, layout: Layout, *, bf16: bool = False) -> Reader:
    """Build the model for this rank and read its weights.

    In float32, whatever it was trained in, so that embeddings and losses agree on every layout and
    device; or in bfloat16, where speed counts for more.
    """
    shape = shape_of(record)
    model = build_model(shape, layout, seed=0, bf16=bf16)
    load_weights(record, [model])
    model.eval()
    return Reader(model=unwrap(model), shape=shape, layout=layout)
