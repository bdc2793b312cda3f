"""Score continuations and generate greedily with a model in any parallel layout.

Sequences that share a prefix, such as the answers to one question, are packed into one row as a
prefix tree with a tree attention mask, so that the prefix is computed only once. Each token has its
position in its own sequence and attends to that sequence only, so packing does not change its
result.

lm-eval runs on rank 0 only. It loads the tasks and samples the few-shot examples there, so that
ranks cannot disagree on the requests. The other ranks call :meth:`Scorer.serve`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from numpy.typing import NDArray
from torch.nn.functional import linear

from megatron_chameleon.blend.sampler import Batch, read_ahead, require_embeddings, to_device
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import forward_flops, head_forward_flops, layer_forward_flops
from megatron_chameleon.model.readout import (
    Reader,
    default_window,
    length_batches,
    length_multiple,
    padded_length,
)
from megatron_chameleon.parallel.layout import from_main
from megatron_chameleon.progress import SECONDS_WITHOUT_BAR, progress_bar

Tokens = NDArray[np.int32]

# Every row of a batch has at least this fraction of the tokens of the longest row.
MIN_FILL = 0.75
# Number of logits computed at a time; smaller on a CPU, to save its memory bandwidth.
LOGITS_ON_CPU, LOGITS_ON_GPU = 1 << 23, 1 << 28


@dataclasses.dataclass(frozen=True)
class Question:
    """Request for the log-likelihood of ``continuation`` after ``context``, both [n] int32.

    The context has at least one token, the continuation at most the model's sequence length.
    """

    context: Tokens
    continuation: Tokens


@dataclasses.dataclass(frozen=True)
class Answers:
    """Results for a list of questions, in the order of the questions.

    Attributes:
        log_likelihoods: [n] float64, in nats.
        is_greedy: [n] bool, whether every token of the continuation is the most likely one.
        num_truncated: questions whose context was truncated on the left to fit the model.
        flops: forward FLOPs of all ranks.
    """

    log_likelihoods: NDArray[np.float64]
    is_greedy: NDArray[np.bool_]
    num_truncated: int
    flops: float


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A context to continue greedily.

    Attributes:
        context: [n] int32, at least one token; truncated on the left if it does not fit.
        max_new_tokens: maximum number of generated tokens; less than the model's sequence length.
        stops: stop sequences; generation ends as soon as the generated text contains one of them.
    """

    context: Tokens
    max_new_tokens: int
    stops: tuple[str, ...]


@dataclasses.dataclass
class Row:
    """A tree of sequences, packed into one row of tokens.

    Attributes:
        paths: for each sequence, its index, the number of leading tokens that it shares with an
            earlier sequence, and the places of all its tokens in the row, [n] int64.
        length: number of tokens in the row.
    """

    paths: list[tuple[int, int, NDArray[np.int64]]] = dataclasses.field(default_factory=list)
    length: int = 0

    @property
    def is_chain(self) -> bool:
        """Whether causal attention suffices because each token attends to all earlier tokens."""
        return all(path[-1] + 1 == len(path) for _, _, path in self.paths)

    def predicting(self, questions: Sequence[Question]) -> list[tuple[int, NDArray[np.int64]]]:
        """Return each question's index, and the places that predict its continuation."""
        return [
            (index, path[len(path) - len(questions[index].continuation) :])
            for index, _, path in self.paths
        ]


def pack(sequences: Sequence[Tokens], longest: int, pairs_per_token: float) -> list[Row]:
    """Pack the sequences into rows. Sequences share a row if that saves computation.

    A shared prefix is computed once, but the mask does not make attention cheaper: a row of n
    tokens has n * n pairs of tokens.

    Args:
        sequences: at least one non-negative token each.
        longest: maximum tokens of a row of several sequences.
        pairs_per_token: number of token pairs whose attention costs as much as the rest of a layer
            costs for one token.
    """
    rows: list[Row] = []
    previous, path = np.empty(0, np.int32), np.empty(0, np.int64)
    # In the order of their bytes, sequences with the longest shared prefixes are neighbours, and a
    # prefix comes before its continuations.
    for index in sorted(range(len(sequences)), key=lambda n: sequences[n].tobytes()):
        tokens = sequences[index]
        length = min(len(previous), len(tokens))
        differs = previous[:length] != tokens[:length]
        shared = int(differs.argmax()) if differs.any() else length
        before = rows[-1].length if rows else 0
        together = before + len(tokens) - shared
        more_pairs = together**2 - before**2 - len(tokens) ** 2
        if not shared or together > longest or more_pairs >= shared * pairs_per_token:
            rows.append(Row())
            before, shared, together = 0, 0, len(tokens)
        path = np.append(path[:shared], np.arange(before, together))
        rows[-1].paths.append((index, shared, path))
        rows[-1].length = together
        previous = tokens
    return rows


def batch_tensors(
    batch: Sequence[Row], sequences: Sequence[Tokens | list[int]], width: int
) -> Batch:
    """Build the model inputs of a batch, with rows padded on the right to ``width`` tokens.

    Returns:
        tokens and positions [b, width] int64; and attention_mask [b, 1, width, width] bool, True
        where attention is masked (Megatron's convention), or None if all rows are plain sequences.
    """
    tokens = np.zeros((len(batch), width), np.int64)
    positions = np.zeros((len(batch), width), np.int64)
    made = {"tokens": torch.from_numpy(tokens), "positions": torch.from_numpy(positions)}
    hidden = None
    if not all(row.is_chain for row in batch):
        # Padding attends to itself, since kernels disagree on the softmax of a fully masked row.
        hidden = np.repeat(~np.eye(width, dtype=bool)[None], len(batch), axis=0)
        made["attention_mask"] = torch.from_numpy(hidden)[:, None]
    for number, row in enumerate(batch):
        end = 0
        for index, shared, path in row.paths:
            begin, end = end, end + len(path) - shared
            own = slice(begin, end)
            tokens[number, own] = sequences[index][shared:]
            positions[number, own] = np.arange(shared, len(path))
            if hidden is not None:
                hidden[number, own, path[:shared]] = False
                hidden[number, own, own] = ~np.tri(end - begin, dtype=bool)
    return made


def prediction_tensors(batch: Sequence[Row], questions: Sequence[Question], width: int) -> Batch:
    """Map predicting tokens of a batch, in rows of ``width`` tokens, to labels and questions.

    Returns:
        places: [p] int64, increasing and distinct: positions in the flattened batch of the tokens
            that predict a label.
        rows: [m] int64, increasing: the index in ``places`` that predicts each label.
        labels: [m] int64.
        questions: [m] int64, the question of each label.
    """
    parts = [
        (at + number * width, questions[index].continuation, np.full(len(at), index))
        for number, row in enumerate(batch)
        for index, at in row.predicting(questions)
    ]
    at, labels, owners = (
        np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True)
    )
    order = np.argsort(at, kind="stable")
    places, rows = np.unique(at[order], return_inverse=True)
    arrays = {"places": places, "rows": rows, "labels": labels[order], "questions": owners[order]}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Scorer:
    """Scorer of continuations and greedy text generator on top of a model.

    :meth:`score` and :meth:`generate` are collective. Rank 0's arguments are used on all ranks; the
    other ranks either make the same calls or call :meth:`serve`. All ranks return the results.

    Args:
        reader: reads the model's outputs.
        sequences_at_once: number of sequences of the model's length (with rotary positions, of at
            most DEFAULT_WINDOW_LIMIT tokens) per forward pass and rank; shorter sequences are
            batched up to the same number of tokens.
        tokenizer: the model's tokenizer.
    """

    def __init__(self, reader: Reader, sequences_at_once: int, tokenizer: Tokenizer) -> None:
        self.reader = reader
        self.layout = reader.layout
        self.max_length = reader.config.max_sequence_length
        self.sequences_at_once = sequences_at_once
        self.tokenizer = tokenizer
        self.eod_id = tokenizer.eod_id

    def score(self, questions: Sequence[Question], description: str = "") -> Answers:
        """Score the continuations; ``description`` labels the progress bar.

        Raises:
            UserError: if a log-likelihood is not finite.
        """
        return self._score(*self._call("score", questions, description)[1:])

    def generate(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
        """Continue each prompt greedily up to a stop sequence or the end of a document.

        There is no key-value cache: each new token costs a forward pass over the unfinished
        sequences. No task of the paper generates text.

        Returns:
            The new tokens of each prompt, including the end-of-document token, and the forward
            FLOPs of all ranks.
        """
        return self._generate(*self._call("generate", prompts)[1:])

    def serve(self) -> None:
        """Join the collective calls of rank 0 until rank 0 calls :meth:`stop`."""
        assert not self.layout.is_main
        while (call := self._call("stop"))[0] != "stop":
            (self._score if call[0] == "score" else self._generate)(*call[1:])

    def stop(self) -> None:
        """End :meth:`serve` on the other ranks. Only rank 0 calls this method."""
        self._call("stop")

    def _call(self, *call: Any) -> tuple[Any, ...]:
        """Broadcast rank 0's call.

        A single rank has nothing to broadcast, and a broadcast would wait for its device.
        """
        return call if self.layout.world_size == 1 else from_main(lambda: call)

    def _states(self, batch: Batch) -> torch.Tensor | None:
        """Compute final hidden states [p, h] of a batch; None before the last pipeline stage."""
        hidden = self.reader.final_hidden_states(
            batch["tokens"], batch["positions"], batch.get("attention_mask")
        )
        return None if hidden is None else hidden.transpose(0, 1).flatten(0, 1)[batch["places"]]

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute float32 logits [n, v] of ``states`` [n, h]; minus infinity for padding tokens.

        Collective over tensor-parallel ranks of the last pipeline stage.
        """
        model = self.reader.model
        is_tied = model.share_embeddings_and_output_weights
        rows = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
        logits = linear(states, rows).float() / self.reader.config.mup_width_mult
        if self.layout.tensor_size > 1:
            logits = gather_from_tensor_model_parallel_region(logits)
        logits[:, self.reader.config.vocab_size :] = -torch.inf
        return logits

    @torch.no_grad()
    def _score(self, questions: Sequence[Question], description: str) -> Answers:
        layout, shape = self.layout, self.reader.config
        # A pair of tokens takes 4 FLOPs per element of the queries.
        pairs_per_token = layer_forward_flops(shape, 0) / (4 * shape.query_size)
        sequences = [self._model_input(question) for question in questions]
        window = default_window(shape)
        tokens_at_once, longest = self.sequences_at_once * window, 2 * self.max_length
        rows = sorted(pack(sequences, 2 * window, pairs_per_token), key=lambda row: -row.length)
        lengths, multiple = [row.length for row in rows], length_multiple(layout)
        all_batches = list(length_batches(lengths, tokens_at_once, multiple, longest, MIN_FILL))
        own = (
            batch_tensors(rows[first:last], sequences, width)
            | prediction_tensors(rows[first:last], questions, width)
            for first, last, width in all_batches[layout.data_rank :: layout.data_size]
        )
        # Row 0: log-likelihoods. Row 1: the number of tokens that are not the most likely token.
        sums, flops = torch.zeros(2, len(questions), dtype=torch.float64, device=layout.device), 0.0
        is_quiet = not layout.is_main
        bar = progress_bar(
            len(questions), " requests", description, quiet=is_quiet, delay=SECONDS_WITHOUT_BAR
        )
        checked = require_embeddings(own, shape.vocab_size)
        with bar, read_ahead(checked, layout.device) as ahead:
            for number, (first, last, width) in enumerate(all_batches):
                # Attention is computed over whole rows, at twice the cost of their causal half. The
                # output layer runs once for every place that predicts a label.
                layer = (last - first) * width * layer_forward_flops(shape, 2 * width)
                flops += shape.num_layers * layer
                for row in rows[first:last]:
                    places = np.concatenate([at for _, at in row.predicting(questions)])
                    flops += len(np.unique(places)) * head_forward_flops(shape)
                    bar.update(len(row.paths))
                if number % layout.data_size == layout.data_rank:
                    self._score_batch(next(ahead), sums)
        sums = self.reader.sum_over_ranks(sums, has_result=layout.is_last_stage)
        log_likelihoods, misses = sums.cpu().numpy()
        if not np.isfinite(log_likelihoods).all():
            raise UserError(
                "a log-likelihood is not finite: the model has diverged; evaluate an earlier "
                "checkpoint"
            )
        lengths = [len(q.context) + len(q.continuation) for q in questions]
        truncated = sum(length > self.max_length + 1 for length in lengths)
        return Answers(log_likelihoods, misses == 0, truncated, flops)

    def _model_input(self, question: Question) -> Tokens:
        """Return all but the last token, truncated on the left to the model's length."""
        assert len(question.continuation) <= self.max_length
        whole = np.concatenate([question.context, question.continuation])
        return whole[-(self.max_length + 1) :][:-1] if len(question.continuation) else whole[:1]

    def _score_batch(self, batch: Batch, sums: torch.Tensor) -> None:
        """Add the log-likelihoods and misses of a batch to ``sums`` [2, n].

        Logits are computed for a few states at a time, and only for states that predict a label:
        for whole contexts, logits would cost as much as the layers of a small model. If several
        tokens are the most likely, the first counts as the greedy choice.
        """
        states, rows, labels = self._states(batch), batch["rows"], batch["labels"]
        if states is None or not len(labels):
            return
        elements = LOGITS_ON_GPU if states.is_cuda else LOGITS_ON_CPU
        chunk = max(1, elements // self.reader.config.vocab_size)
        log_probabilities = torch.zeros(len(rows), device=states.device)
        hits = torch.zeros(len(rows), dtype=torch.bool, device=states.device)
        for start in range(0, len(states), chunk):
            logits = self._logits(states[start : start + chunk])
            # Every chunk processes all labels: selecting only the chunk's labels would synchronise
            # with the host.
            is_own = (rows >= start) & (rows < start + chunk)
            own_rows = (rows - start).clamp(0, len(logits) - 1)
            scores = logits[own_rows, labels] - logits.logsumexp(dim=1)[own_rows]
            log_probabilities = torch.where(is_own, scores, log_probabilities)
            hits |= is_own & (logits.argmax(dim=1)[own_rows] == labels)
        sums[0].index_add_(0, batch["questions"], log_probabilities.double())
        sums[1].index_add_(0, batch["questions"], (~hits).double())

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
        """Generate for ``sequences_at_once`` prompts of similar lengths at a time."""
        layout, size = self.layout, self.sequences_at_once
        order = sorted(range(len(prompts)), key=lambda n: len(prompts[n].context))
        new: dict[int, list[int]] = {}
        flops = 0.0
        starts = range(size * layout.data_rank, len(prompts), size * layout.data_size)
        for numbers in (order[start : start + size] for start in starts):
            new |= {n: [] for n in numbers}
            while left := [n for n in numbers if not self._is_finished(prompts[n], new[n])]:
                rooms = {n: self.max_length - prompts[n].max_new_tokens for n in left}
                sequences = [prompts[n].context[-rooms[n] :].tolist() + new[n] for n in left]
                for n, token in zip(left, self._next_tokens(sequences), strict=True):
                    new[n].append(token)
                width = max(map(len, sequences))
                positions = len(left) * width
                # The output layer processes one state per sequence.
                unread = (positions - len(left)) * head_forward_flops(self.reader.config)
                flops += forward_flops(self.reader.config, positions, width) - unread
        # The ranks of one replica have the same results, so only one of them counts the FLOPs.
        is_counted = layout.tensor_rank == 0 and layout.is_last_stage
        everywhere: list[Any] = [None] * layout.world_size
        dist.all_gather_object(everywhere, (new, flops if is_counted else 0.0))
        merged = {n: tokens for each, _ in everywhere for n, tokens in each.items()}
        return [merged[n] for n in range(len(prompts))], sum(each for _, each in everywhere)

    def _is_finished(self, prompt: Prompt, new: list[int]) -> bool:
        if len(new) >= prompt.max_new_tokens or new[-1:] == [self.eod_id]:
            return True
        text = self.tokenizer.decode(new)
        return any(stop in text for stop in prompt.stops)

    def _next_tokens(self, sequences: Sequence[list[int]]) -> list[int]:
        """Return the most likely token after each sequence, on every rank of the replica."""
        layout = self.layout
        lengths = [len(sequence) for sequence in sequences]
        width = min(padded_length(max(lengths), length_multiple(layout)), self.max_length)
        rows = [Row([(n, 0, np.arange(length))], length) for n, length in enumerate(lengths)]
        (batch,) = require_embeddings(
            iter([batch_tensors(rows, sequences, width)]), self.reader.config.vocab_size
        )
        batch["places"] = torch.arange(len(rows)) * width + torch.tensor(lengths) - 1
        states = self._states({key: to_device(each, layout.device) for key, each in batch.items()})
        found = torch.zeros(len(sequences), dtype=torch.int64, device=layout.device)
        if states is not None:
            found = self._logits(states).argmax(dim=1)
        if layout.pipeline_size > 1:
            last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(found, src=last_stage, group=group)
        return found.tolist()
