"""Sums of a model's losses over held-out text, exact for any batch size and layout."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.blend.prefetch import read_ahead
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.evaluation.held_out import HeldOutText
from megatron_chameleon.evaluation.scored_text import ClusterMap
from megatron_chameleon.model.flops import forward_flops
from megatron_chameleon.model.readout import Reader, length_multiple, padded_length
from megatron_chameleon.model.sizes import ModelShape


def cluster_losses(
    reader: Reader, text: HeldOutText, clusters: ClusterMap, batch_size: int, progress: tqdm
) -> NDArray[np.float64]:
    """Sums [c] of the negative log-likelihoods that count, in nats, on every rank.

    Batches are dealt out to data-parallel ranks in turn. Each sum is taken in float64.

    Args:
        reader: the model.
        text: windows; they are read longest first.
        clusters: of what they score.
        batch_size: windows per forward pass and rank, of the window length.
        progress: is told how many tokens were scored.
    """
    layout, text = reader.layout, text.longest_first()
    # The last one takes what does not count.
    sums = torch.zeros(clusters.count + 1, dtype=torch.float64, device=layout.device)
    cut = list(batches(text, batch_size, length_multiple(layout)))
    own = cut[layout.data_rank :: layout.data_size]
    with read_ahead((_batch(text, clusters, *each) for each in own), layout.device) as ahead:
        for number, (first, last, _) in enumerate(cut):
            progress.update(int(text.windows.num_scored[first:last].sum()))
            if number % layout.data_size != layout.data_rank:
                continue
            batch = next(ahead)
            losses = reader.token_losses(batch["tokens"], batch["labels"])
            if losses is not None:
                sums.index_add_(0, batch["clusters"].flatten(), losses.double().flatten())
    summed = reader.sum_over_ranks(sums, spoken=layout.is_last_stage)
    return summed[:-1].cpu().numpy()


def _batch(text: HeldOutText, clusters: ClusterMap, first: int, last: int, width: int) -> Batch:
    """Windows ``first`` to ``last`` - 1: tokens, labels and the labels' clusters, [b, width] int64.

    Labels that do not count are of one more cluster.
    """
    tokens, labels, mask = text.batch(first, last, width)
    places = np.where(mask.numpy(), clusters.at(text.positions(first, last, width)), -1)
    places[places < 0] = clusters.count
    return {"tokens": tokens, "labels": labels, "clusters": torch.from_numpy(places)}


def batches(
    text: HeldOutText, batch_size: int, multiple: int = 1
) -> Iterator[tuple[int, int, int]]:
    """Windows that go through the model together: first, last (not one of them), width.

    They are as wide as the first of them, which is the longest, rounded up to ``multiple``, and as
    many as have the tokens of ``batch_size`` windows of the window length.
    """
    lengths, first = text.windows.lengths, 0
    while first < len(lengths):
        width = min(padded_length(int(lengths[first]), multiple), text.window_length)
        last = min(first + batch_size * text.window_length // width, len(lengths))
        yield first, last, width
        first = last


def reading_flops(shape: ModelShape, text: HeldOutText) -> float:
    """Forward FLOPs of all windows of ``text``, context included and what fills them up not."""
    lengths, counts = np.unique(text.windows.lengths, return_counts=True)
    return sum(
        forward_flops(shape, int(count * length), int(length))
        for length, count in zip(lengths, counts, strict=True)
    )
