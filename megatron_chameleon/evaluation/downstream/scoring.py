"""Log-likelihoods of continuations after contexts, in any layout; all ranks work on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_chameleon.blend.prefetch import read_ahead
from megatron_chameleon.blend.sampler import Batch
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.label_scores import OutputWeights, score_labels
from megatron_chameleon.evaluation.downstream.prefix_rows import (
    Packing,
    Row,
    Tokens,
    batches,
    pack,
)
from megatron_chameleon.model.flops import head_forward_flops
from megatron_chameleon.model.readout import Reader, length_multiple, padded_length
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.progress import progress_bar

SHOWN_AFTER_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Question:
    """Tokens, int32: how likely is ``continuation`` after ``context``?

    The context has at least one token, the continuation at most as many as the model can look at.
    """

    context: Tokens
    continuation: Tokens


@dataclasses.dataclass(frozen=True)
class Answers:
    """What the model says to questions, in their order.

    Attributes:
        log_likelihoods: [n] float64, in nats.
        is_greedy: [n] bool: whether each token of the continuation is the likeliest there.
        num_truncated: questions whose context lost its beginning, since the model is too short.
        flops: forward floating-point operations that all ranks did together.
    """

    log_likelihoods: NDArray[np.float64]
    is_greedy: NDArray[np.bool_]
    num_truncated: int
    flops: float


class Scorer:
    """Answers questions with a model.

    Args:
        reader: the model.
        sequences_at_once: sequences of the model's length in a forward pass of a rank; of shorter
            ones as many as have so many tokens.
    """

    def __init__(self, reader: Reader, sequences_at_once: int) -> None:
        self.reader = reader
        self.tokens_at_once = sequences_at_once * self.max_length

    @property
    def max_length(self) -> int:
        """Tokens that the model can look at."""
        return self.reader.shape.max_sequence_length

    def output_weights(self) -> OutputWeights:
        """This rank's part of the output layer; the last stage alone has one."""
        weight = self.reader.model.shared_embedding_or_output_weight()
        tensor = parallel_state.get_tensor_model_parallel_group()
        return OutputWeights(
            weight=weight,
            first=self.reader.layout.tensor_rank * weight.size(0),
            vocab_size=self.reader.shape.vocab_size,
            group=tensor if self.reader.layout.tensor_size > 1 else None,
        )

    @torch.no_grad()
    def score(self, questions: Sequence[Question], description: str = "") -> Answers:
        """Answer ``questions``, which are the same on all ranks; all of them get the answers.

        Raises:
            UserError: if a likelihood is not finite.
        """
        asked = [self._asked(question) for question in questions]
        predicting = [len(question.continuation) for question in questions]
        rows = pack(asked, predicting, Packing.of(self.reader.shape)) if asked else []
        layout = self.reader.layout
        # Log-likelihoods, and how many tokens were not the likeliest.
        sums = torch.zeros(2, len(questions), dtype=torch.float64, device=layout.device)
        flops = 0.0
        cut = list(batches(rows, self.tokens_at_once, length_multiple(layout)))
        own = cut[layout.data_rank :: layout.data_size]
        with (
            self._progress(len(questions), description) as bar,
            read_ahead((self._inputs(batch, questions) for batch in own), layout.device) as ahead,
        ):
            for number, batch in enumerate(cut):
                flops += batch_flops(self.reader.shape, batch, self._width(batch))
                if number % layout.data_size == layout.data_rank:
                    self._score_batch(next(ahead), sums)
                _advance(bar, batch)
        sums = self.reader.sum_over_ranks(sums, spoken=layout.is_last_stage)
        log_likelihoods, misses = sums.cpu().numpy()
        _check_finite(log_likelihoods)
        lost = [len(q.context) + len(q.continuation) > self.max_length + 1 for q in questions]
        return Answers(log_likelihoods, misses == 0, sum(lost), flops)

    def _progress(self, total: int, description: str) -> tqdm:
        quiet = not self.reader.layout.is_main
        return progress_bar(total, " requests", description, quiet=quiet, delay=SHOWN_AFTER_SECONDS)

    def _asked(self, question: Question) -> Tokens:
        """What the model reads: all but the last token, as much of the end as it can look at."""
        assert len(question.continuation) <= self.max_length
        whole = np.concatenate([question.context, question.continuation])
        return whole[-(self.max_length + 1) :][:-1] if len(question.continuation) else whole[:1]

    def _inputs(self, batch: Sequence[Row], questions: Sequence[Question]) -> Batch:
        """What :meth:`_score_batch` takes: of :func:`batch_tensors`, and of the predictions."""
        width = self._width(batch)
        predictions = Predictions.of(batch, questions, width)
        arrays = {name: torch.from_numpy(part) for name, part in vars(predictions).items()}
        return {**batch_tensors(batch, width), **arrays}

    def _score_batch(self, batch: Batch, sums: torch.Tensor) -> None:
        """Add what the model says to ``batch`` to ``sums`` [2, n]."""
        hidden = self.reader.final_hidden_states(
            batch["tokens"], batch["positions"], batch.get("hidden_from")
        )
        if hidden is None or not len(batch["labels"]):
            return
        states = hidden.transpose(0, 1).flatten(0, 1)[batch["places"]]
        scores, hits = score_labels(self.output_weights(), states, batch["rows"], batch["labels"])
        sums[0].index_add_(0, batch["asked"], scores.double())
        sums[1].index_add_(0, batch["asked"], (~hits).double())

    def _width(self, batch: Sequence[Row]) -> int:
        """To how many tokens the rows of ``batch`` are padded."""
        return padded_length(batch[0].length, length_multiple(self.reader.layout))


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Which token of a batch predicts which label of which question.

    Attributes:
        places: [p] int64, rising, without repetition: tokens of the batch, row after row.
        rows: [m] int64, rising: the number of the place that predicts each label.
        labels: [m] int64.
        asked: [m] int64, the question of which the label is.
    """

    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    labels: NDArray[np.int64]
    asked: NDArray[np.int64]

    @classmethod
    def of(cls, batch: Sequence[Row], questions: Sequence[Question], width: int) -> Predictions:
        """Those of ``batch``, in rows of ``width`` tokens."""
        parts = [
            (at + number * width, questions[asked].continuation, np.full(len(at), asked))
            for number, row in enumerate(batch)
            for asked, at in row.predicting
        ]
        at, labels, asked = (
            np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True)
        )
        order = np.argsort(at, kind="stable")
        places, rows = np.unique(at[order], return_inverse=True)
        return cls(places, rows, labels[order], asked[order])


def batch_tensors(batch: Sequence[Row], width: int) -> Batch:
    """What the model reads of ``batch``: rows padded on the right to ``width`` tokens.

    Returns:
        tokens and positions, [b, width] int64; and hidden_from [b, 1, width, width] bool, which
        tokens are hidden from which, unless all rows are plain sequences.
    """
    tokens = np.zeros((len(batch), width), np.int64)
    positions = np.zeros((len(batch), width), np.int64)
    for row, filled, at in zip(batch, tokens, positions, strict=True):
        filled[: row.length] = row.all_tokens()
        at[: row.length] = row.positions()
    made = {"tokens": torch.from_numpy(tokens), "positions": torch.from_numpy(positions)}
    if not all(row.is_chain for row in batch):
        # What fills up sees itself: kernels differ in what a softmax over nothing gives.
        seen = np.repeat(np.eye(width, dtype=bool)[None], len(batch), axis=0)
        for row, seen_in_row in zip(batch, seen, strict=True):
            seen_in_row[: row.length, : row.length] = row.visible()
        made["hidden_from"] = torch.from_numpy(~seen)[:, None]
    return made


def batch_flops(shape: ModelShape, batch: Sequence[Row], width: int) -> float:
    """Forward FLOPs of a batch as it is computed.

    Of all its tokens, those that fill up included, each looking at the whole row; and of the output
    layer at the places that predict something.
    """
    packing = Packing.of(shape)
    layer = len(batch) * (width * packing.token_work + width**2 * packing.pair_work)
    places = sum(len(np.unique(np.concatenate([at for _, at in r.predicting]))) for r in batch)
    return shape.size.num_layers * layer + places * head_forward_flops(shape)


def _advance(bar: tqdm, batch: Sequence[Row]) -> None:
    bar.update(sum(len(row.predicting) for row in batch))


def _check_finite(log_likelihoods: NDArray[np.float64]) -> None:
    if not np.isfinite(log_likelihoods).all():
        raise UserError(
            "a log-likelihood is not finite: the model has diverged; evaluate an earlier checkpoint"
        )
