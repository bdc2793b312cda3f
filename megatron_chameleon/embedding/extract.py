"""From a proxy and a domain's tokens to one vector per window."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.blend.prefetch import read_ahead
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.corpus.indexed import TokenFile
from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean
from megatron_chameleon.embedding.windows import Windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.readout import Reader, length_multiple, padded_length


def embed_windows(
    reader: Reader,
    tokens: TokenFile,
    windows: Windows,
    layer: int,
    batch_size: int,
    progress: tqdm,
    name: str | None = None,
    *,
    final_norm: bool = False,
) -> NDArray[np.float32]:
    """Embed ``windows``: the mean over tokens of the hidden states after ``layer`` layers.

    Batches are dealt out to data-parallel ranks; the result does not depend on the layout.
    Every rank calls this.

    Args:
        reader: the proxy.
        tokens: the domain's documents.
        windows: which tokens of which document.
        layer: from 1 to num_layers.
        batch_size: windows per forward pass and rank.
        progress: a bar that counts windows.
        name: what messages call the domain; the path of its tokens unless given.
        final_norm: apply the model's final layer norm to the hidden states first.

    Returns:
        [n, h] float32, row i for window i, on every rank.

    Raises:
        UserError: if the proxy's hidden states are not finite, with the domain and the window.
    """
    layout = reader.layout
    vectors = torch.zeros(len(windows), reader.shape.size.hidden_size, device=layout.device)
    norm = _final_norm(reader) if final_norm else None
    spoken = False
    batches = [
        range(first, min(first + batch_size, len(windows)))
        for first in range(0, len(windows), batch_size)
    ]
    own = batches[layout.data_rank :: layout.data_size]
    with read_ahead(
        (_padded(reader, tokens, windows, rows) for rows in own), layout.device
    ) as ahead:
        for number, rows in enumerate(batches):
            progress.update(len(rows))
            if number % layout.data_size != layout.data_rank:
                continue
            batch = next(ahead)
            hidden = reader.hidden_states(batch["tokens"], layer)
            if hidden is not None:
                spoken = True
                vectors[rows.start : rows.stop] = masked_mean(
                    hidden, lengths=batch["lengths"], norm=norm
                )
    whole = reader.sum_over_ranks(vectors, spoken=spoken)
    result: NDArray[np.float32] = whole.cpu().numpy()
    _check_finite(result, windows, layer, name or str(tokens.prefix))
    return result


def _final_norm(reader: Reader) -> FinalNorm:
    (weight, bias), epsilon = reader.final_norm()
    return FinalNorm(weight, bias, epsilon)


def _check_finite(vectors: NDArray[np.float32], windows: Windows, layer: int, name: str) -> None:
    """Raises UserError naming the first window, as the text goes, whose vector is not finite."""
    broken = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if not broken.size:
        return
    first = broken[np.lexsort((windows.start[broken], windows.document[broken]))[0]]
    start, length = int(windows.start[first]), int(windows.length[first])
    raise UserError(
        f"domain '{name}': hidden states after layer {layer} are not finite in {broken.size} of "
        f"{len(windows)} windows (first: tokens {start} to {start + length - 1} of document "
        f"{int(windows.document[first])}, counted from 0); the proxy has diverged: use an earlier "
        "checkpoint or a lower learning rate"
    )


def _padded(reader: Reader, tokens: TokenFile, windows: Windows, rows: range) -> Batch:
    """Tokens [b, s] with zeros to the right, which causal attention does not see; lengths [b]."""
    batch_rows = slice(rows.start, rows.stop)
    lengths = windows.length[batch_rows]
    multiple, longest = length_multiple(reader.layout), reader.shape.max_sequence_length
    width = min(padded_length(int(lengths.max()), multiple), longest)
    batch = np.zeros((len(rows), width), dtype=np.int64)
    firsts = tokens.starts[windows.document[batch_rows]] + windows.start[batch_rows]
    for row, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        batch[row, :length] = tokens.tokens[first : first + length]
    return {"tokens": torch.from_numpy(batch), "lengths": torch.from_numpy(lengths)}
