"""The read-outs by a slow plain way: the whole model on one rank, one window at a time."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.checkpoint.load import open_reader
from megatron_chameleon.embedding.windows import draw_windows
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.parallel.layout import distributed
from tests.distributed.layout_cases import LAYERS, NORMED_LAYER, NUM_WINDOWS, OVERLAP, Places


def write_plain_readout(places: Places) -> None:
    """Embeddings 'NAME/LAYER' [n, h], hidden states 'hidden/LAYER' [s, b, h], losses 'NAME'.

    And sums of losses and tokens of each document by itself, 'NAME/documents' [2, d].
    """
    corpus = Corpus.load(places.corpus)
    record = CheckpointRecord.load(find_checkpoint(places.run("one")))
    found: dict[str, NDArray[np.floating]] = {}
    with distributed(ParallelOptions(), seed=0) as layout:
        reader = open_reader(record, layout)
        length = reader.shape.max_sequence_length
        for name in corpus.names:
            for layer in LAYERS:
                found[f"{name}/{layer}"] = embed(reader.model, corpus, name, length, layer)
            found[name] = np.array(mean_loss(reader.model, corpus, name, length))
            found[f"{name}/documents"] = document_sums(reader.model, corpus, name, length)
        tokens = torch.randint(0, corpus.tokenizer.vocab_size, (3, length - 5))
        for layer in LAYERS:
            found[f"hidden/{layer}"] = hooked_states(reader.model, tokens, layer).numpy()
            read = reader.hidden_states(tokens, layer)
            assert read is not None
            found[f"reader/{layer}"] = read.numpy()
    np.savez(places.reference, **found)  # type: ignore[arg-type]


@torch.no_grad()
def hooked_states(model: GPTModel, tokens: torch.Tensor, layer: int) -> torch.Tensor:
    """Output [s, b, h] of one layer, caught by a hook while the whole model runs."""
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
    """Logits [b, s, v] of tokens [b, s], rows that pad the vocabulary included."""
    return model(tokens, torch.arange(tokens.size(1)).expand_as(tokens), None)


def embed(
    model: GPTModel, corpus: Corpus, name: str, length: int, layer: int
) -> NDArray[np.floating]:
    """The mean hidden state of every window of a domain, [n, h], without batches or padding."""
    documents = IndexedDataset(str(corpus.prefix(name, "train")))
    windows = draw_windows(documents.sequence_lengths, length, NUM_WINDOWS, 0, name)
    windows = windows.longest_first()
    vectors = []
    for document, start, count in zip(windows.document, windows.start, windows.length, strict=True):
        tokens = documents.get(int(document), offset=int(start), length=int(count))
        states = hooked_states(model, torch.from_numpy(tokens.astype(np.int64))[None], layer)
        if layer == NORMED_LAYER:
            states = model.decoder.final_layernorm(states).detach()
        vectors.append(states[:, 0].double().mean(dim=0).numpy())
    return np.stack(vectors)


def mean_loss(model: GPTModel, corpus: Corpus, name: str, length: int) -> float:
    """Mean loss of a domain's test tokens but the first, window by window, in float64."""
    documents = IndexedDataset(str(corpus.prefix(name, "test")))
    stream = np.concatenate([documents[i] for i in range(len(documents))])
    windows = [stream[first : first + length + 1] for first in range(0, len(stream) - 1, length)]
    return sum(token_losses(model, corpus, w).sum() for w in windows) / (len(stream) - 1)


def document_sums(model: GPTModel, corpus: Corpus, name: str, length: int) -> NDArray[np.floating]:
    """Sums of losses and tokens, [2, d], of test documents after an end-of-document token each."""
    documents = IndexedDataset(str(corpus.prefix(name, "test")))
    sums = []
    for number in range(len(documents)):
        text = np.concatenate([[corpus.tokenizer.eod_id], documents[number]])
        start, done, total = 0, 0, 0.0
        while done < len(text) - 1:
            losses = token_losses(model, corpus, text[start : start + length + 1])
            total += float(losses[done - start :].sum())
            done = min(start + length, len(text) - 1)
            start = done - OVERLAP
        sums.append((total, len(text) - 1))
    return np.array(sums).T


def token_losses(
    model: GPTModel, corpus: Corpus, window: NDArray[np.integer]
) -> NDArray[np.floating]:
    """Losses [n - 1] in float64 of the tokens of ``window`` [n] but the first."""
    tokens = torch.from_numpy(window.astype(np.int64))
    scores = logits(model, tokens[None, :-1])[0, :, : corpus.tokenizer.vocab_size].double()
    chosen = scores.gather(1, tokens[1:, None])[:, 0]
    return (scores.logsumexp(dim=1) - chosen).numpy()
