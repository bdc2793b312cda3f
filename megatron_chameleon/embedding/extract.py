"""From a proxy and a domain's tokens to one vector per window."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.corpus.indexed_reader import TokenFile
from megatron_chameleon.embedding.pooling import FinalNorm, masked_mean
from megatron_chameleon.embedding.windows import Windows
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.readout import Reader


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
    for number, first in enumerate(range(0, len(windows), batch_size)):
        rows = range(first, min(first + batch_size, len(windows)))
        progress.update(len(rows))
        if number % layout.data_size != layout.data_rank:
            continue
        batch, lengths = _pad(tokens, windows, rows, _multiple(reader))
        hidden = reader.hidden_states(batch.to(layout.device), layer)
        if hidden is not None:
            spoken = True
            vectors[first : first + len(rows)] = masked_mean(
                hidden, lengths=lengths.to(layout.device), norm=norm
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


def _multiple(reader: Reader) -> int:
    """Sequence lengths must be a multiple of this: sequence parallelism cuts them up."""
    return reader.layout.tensor_size if reader.layout.sequence_parallel else 1


def _pad(
    tokens: TokenFile, windows: Windows, rows: range, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [b, s] with zeros to the right, and lengths [b]. Causal attention sees no zero."""
    drawn = slice(rows.start, rows.stop)
    lengths = windows.length[drawn]
    width = -(-int(lengths.max()) // multiple) * multiple
    batch = np.zeros((len(rows), width), dtype=np.int64)
    firsts = tokens.starts[windows.document[drawn]] + windows.start[drawn]
    for row, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        batch[row, :length] = tokens.tokens[first : first + length]
    return torch.from_numpy(batch), torch.from_numpy(lengths)
