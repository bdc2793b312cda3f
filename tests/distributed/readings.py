"""Embed and evaluate the run READ in a layout and by plain loops; convert its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from megatron_chameleon.artifacts import CheckpointRecord, Corpus, find_checkpoint
from megatron_chameleon.checkpoint.convert import (
    convert_to_checkpoint,
    convert_to_huggingface,
)
from megatron_chameleon.checkpoint.load import load_weights
from megatron_chameleon.checkpoint.open_model import CheckpointModel, open_model
from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
from megatron_chameleon.checkpoint.save import save_checkpoint
from megatron_chameleon.checkpoint.state import model_state
from megatron_chameleon.corpus.windows import draw_windows
from megatron_chameleon.evaluation.options import PerplexityOptions
from megatron_chameleon.evaluation.perplexity import evaluate_perplexities
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from megatron_chameleon.model.gpt import build_model_chunks
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from tests.distributed import cases, methods
from tests.distributed.cases import Places
from tests.families import FAMILIES, LENGTH
from tests.megatron_checkpoint import arguments, logits_of, megatron_model, save_megatron
from tests.small_corpus import VOCAB_SIZE


def read(
    places: Places, name: str, output: str | None = None, checkpoint: Path | None = None
) -> None:
    """Embed each layer and evaluate perplexities in the layout and batch size of a reading.

    Args:
        places: paths.
        name: name of the reading.
        output: name of the results; by default ``name``.
        checkpoint: checkpoint to read; by default that of the run READ.
    """
    output, checkpoint = output or name, checkpoint or places.run(cases.READ)
    for layer in cases.LAYERS:
        options = dataclasses.replace(
            methods.chameleon(places, name, layer),
            checkpoint=checkpoint,
            output=places.mixture(output, layer),
        )
        compute_mixture(options)
    packed = PerplexityOptions(
        corpus=places.corpus,
        checkpoint=checkpoint,
        output=places.evaluation(output),
        evaluation_batch_size=cases.READINGS[name].batch_size,
        parallel=cases.reading_layout(cases.READINGS[name].case),
    )
    by_document = dataclasses.replace(
        packed,
        packing="documents",
        overlap=cases.OVERLAP,
        output=places.evaluation(output, "documents"),
    )
    evaluate_perplexities([packed, by_document])


def read_converted(places: Places) -> None:
    """Embed and evaluate with the checkpoint that was converted to Hugging Face and back."""
    read(places, "one", output="converted", checkpoint=places.from_huggingface("one"))


def write_megatron(places: Places) -> None:
    """Save a model of two tensor-parallel ranks as Megatron-LM does, and its logits."""
    tokenizer = places.corpus / "tokenizer.json"
    args = arguments(FAMILIES["qwen3"], tokenizer, tensor_model_parallel_size=2)
    with distributed(ParallelOptions(tensor_model_parallel_size=2), seed=0) as layout:
        model = megatron_model(args, layout)
        save_megatron(places.megatron, model, args)
        logits = logits_of(model, LENGTH, VOCAB_SIZE)
        if layout.is_main:
            np.save(places.megatron / "written.npy", logits.numpy())


def read_megatron(places: Places) -> None:
    """Read the checkpoint of :func:`write_megatron` on one rank, and write its logits."""
    opened = open_model(places.megatron)
    with distributed(ParallelOptions(), seed=0) as layout:
        model = opened.reader(layout).model
        logits = logits_of(model, LENGTH, VOCAB_SIZE)
        np.save(places.megatron / "read.npy", logits.numpy())


def convert_one(places: Places) -> None:
    """Convert the run READ to a Hugging Face folder and back; copy the folder with more rows."""
    folder = places.huggingface("one")
    convert_to_huggingface(ToHuggingFaceOptions(places.run(cases.READ), folder))
    convert_to_checkpoint(FromHuggingFaceOptions(folder, places.from_huggingface("one")))
    padded = places.huggingface("one-padded")
    shutil.copytree(folder, padded)
    weights, config = padded / "model.safetensors", padded / "config.json"
    tensors = load_file(weights)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = torch.ones(cases.ADDED_ROWS, tensors[name].size(1))
        tensors[name] = torch.cat([tensors[name], more])
    save_file(tensors, weights)
    body = json.loads(config.read_text())
    num_rows = body["vocab_size"] + cases.ADDED_ROWS
    config.write_text(json.dumps({**body, "vocab_size": num_rows}))


def rewrite(places: Places, name: str) -> None:
    """Load the converted checkpoint in a layout over different initial weights, and save it."""
    record = CheckpointRecord.load(places.from_huggingface("one"))
    is_narrow = name == cases.NARROW
    narrow = mock.patch("megatron_chameleon.model.gpt.VOCABULARY_MULTIPLE", cases.NARROW_MULTIPLE)
    with (
        narrow if is_narrow else contextlib.nullcontext(),
        distributed(cases.REWRITTEN[name].parallel, seed=0) as layout,
    ):
        model = build_model_chunks(CheckpointModel(record).config, layout, seed=1)
        load_weights(record, model)
        root, described = places.from_huggingface(name), layout.describe()
        written = dataclasses.replace(record, root=root, layout=described)
        save_checkpoint(model_state(model), written)


def convert_rewritten(places: Places, name: str) -> None:
    """Convert the checkpoint that a layout saved to a Hugging Face folder."""
    options = ToHuggingFaceOptions(places.from_huggingface(name), places.huggingface(name))
    convert_to_huggingface(options)


def write_reference(places: Places) -> None:
    """Write embeddings and losses of the whole model on one rank, one window at a time.

    The file holds embeddings 'NAME/LAYER' [n, h], hidden states 'hidden/LAYER' [s, b, h], losses
    'NAME', and sums of losses and tokens of each document, 'NAME/documents' [2, d].
    """
    corpus = Corpus.load(places.corpus)
    record = CheckpointRecord.load(find_checkpoint(places.run(cases.READ)))
    found: dict[str, NDArray[np.floating]] = {}
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = CheckpointModel(record).reader(layout)
        length = reader.config.max_sequence_length
        for name in corpus.names:
            for layer in cases.LAYERS:
                found[f"{name}/{layer}"] = embed(reader.model, corpus, name, length, layer)
            found[name] = np.array(mean_loss(reader.model, corpus, name, length))
            found[f"{name}/documents"] = document_sums(reader.model, corpus, name, length)
        tokens = torch.randint(0, corpus.tokenizer.vocab_size, (3, length - 5))
        for layer in cases.LAYERS:
            found[f"hidden/{layer}"] = hooked_states(reader.model, tokens, layer).numpy()
            read = reader.hidden_states(tokens, layer)
            assert read is not None
            found[f"reader/{layer}"] = read.numpy()
    np.savez(places.reference, **found)  # type: ignore[arg-type]


@torch.no_grad()
def hooked_states(model: GPTModel, tokens: torch.Tensor, layer: int) -> torch.Tensor:
    """Output [s, b, h] of one layer, recorded by a hook while the whole model runs."""
    caught = []
    handle = model.decoder.layers[layer - 1].register_forward_hook(
        lambda _module, _inputs, output: caught.append(output[0].clone())
    )
    logits(model, tokens)
    handle.remove()
    (states,) = caught
    return states


@torch.no_grad()
def logits(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, v] of tokens [b, s]; v includes the padding of the vocabulary."""
    return model(tokens, torch.arange(tokens.size(1)).expand_as(tokens), None)


def embed(
    model: GPTModel, corpus: Corpus, name: str, length: int, layer: int
) -> NDArray[np.floating]:
    """The mean hidden state of every window of a domain, [n, h], without batches or padding."""
    documents = IndexedDataset(str(corpus.prefix(name, "train")))
    windows = draw_windows(documents.sequence_lengths, length, cases.NUM_WINDOWS, 0, name)
    windows = windows.longest_first()
    vectors = []
    for document, start, count in zip(windows.document, windows.start, windows.length, strict=True):
        tokens = documents.get(int(document), offset=int(start), length=int(count))
        states = hooked_states(model, torch.from_numpy(tokens.astype(np.int64))[None], layer)
        if layer == cases.NORMED_LAYER:
            states = model.decoder.final_layernorm(states).detach()
        vectors.append(states[:, 0].double().mean(dim=0).numpy())
    return np.stack(vectors)


def mean_loss(model: GPTModel, corpus: Corpus, name: str, length: int) -> float:
    """Mean loss of a domain's test tokens except the first, window by window, in float64."""
    documents = IndexedDataset(str(corpus.prefix(name, "test")))
    stream = np.concatenate([documents[i] for i in range(len(documents))])
    windows = [stream[first : first + length + 1] for first in range(0, len(stream) - 1, length)]
    return sum(token_losses(model, corpus, w).sum() for w in windows) / (len(stream) - 1)


def document_sums(model: GPTModel, corpus: Corpus, name: str, length: int) -> NDArray[np.floating]:
    """Sums of losses and of tokens, [2, d], of d test documents.

    Each document is preceded by an end-of-document token.
    """
    documents = IndexedDataset(str(corpus.prefix(name, "test")))
    sums = []
    for number in range(len(documents)):
        text = np.concatenate([[corpus.tokenizer.eod_id], documents[number]])
        start, done, total = 0, 0, 0.0
        while done < len(text) - 1:
            losses = token_losses(model, corpus, text[start : start + length + 1])
            total += float(losses[done - start :].sum())
            done = min(start + length, len(text) - 1)
            start = done - cases.OVERLAP
        sums.append((total, len(text) - 1))
    return np.array(sums).T


def token_losses(
    model: GPTModel, corpus: Corpus, window: NDArray[np.integer]
) -> NDArray[np.floating]:
    """Losses [n - 1] in float64 of the tokens of ``window`` [n] except the first."""
    tokens = torch.from_numpy(window.astype(np.int64))
    scores = logits(model, tokens[None, :-1])[0, :, : corpus.tokenizer.vocab_size].double()
    chosen = scores.gather(1, tokens[1:, None])[:, 0]
    return (scores.logsumexp(dim=1) - chosen).numpy()
