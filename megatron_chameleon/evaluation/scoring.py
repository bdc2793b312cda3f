"""Log-likelihoods of continuations and greedy generation by a model in any parallel layout.

Sequences that share a prefix, such as the answers to one question, are packed into one row, which
computes the prefix once: a prefix tree with a tree attention mask. Each token has its position in
its own sequence and attends to that sequence only, so packing does not change its result.

lm-eval runs on rank 0: it loads the tasks and samples the few-shot examples there only, so that
ranks cannot disagree on the requests. The other ranks :meth:`Scorer.serve`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from numpy.typing import NDArray
from torch.nn.functional import linear

from megatron_chameleon.blend.sampler import Batch, read_ahead, to_device
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.model.flops import forward_flops, head_forward_flops, layer_forward_flops
from megatron_chameleon.model.readout import Reader, length_multiple, padded_length
from megatron_chameleon.parallel.layout import from_main
from megatron_chameleon.progress import progress_bar

Tokens = NDArray[np.int32]

# Every row of a batch has at least this fraction of the tokens of the longest.
MIN_FILL = 0.75
# Logits computed at a time; on a CPU few enough to spare its memory bandwidth.
LOGITS_ON_CPU, LOGITS_ON_GPU = 1 << 23, 1 << 28


@dataclasses.dataclass(frozen=True)
class Question:
    """A request for the log-likelihood of ``continuation`` after ``context``, both [n] int32.

    The context has at least one token, the continuation at most the model's sequence length.
    """

    context: Tokens
    continuation: Tokens


@dataclasses.dataclass(frozen=True)
class Answers:
    """Results for a list of questions, in their order.

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
        context: [n] int32, at least one token; truncated on the left where it does not fit.
        max_new_tokens: less than the model's sequence length.
        stops: generation ends as soon as the generated text contains one of these.
    """

    context: Tokens
    max_new_tokens: int
    stops: tuple[str, ...]


@dataclasses.dataclass
class Row:
    """A tree of sequences: segments of tokens, each of which continues a path through earlier ones.

    Attributes:
        segments: tokens of each segment, and the places in the row of the path that it continues.
        predicting: index of each sequence, and the places of its tokens that predict something.
        length: tokens in the row.
        is_chain: whether causal attention suffices: each token attends to all earlier ones.
    """

    segments: list[tuple[Tokens, NDArray[np.int64]]] = dataclasses.field(default_factory=list)
    predicting: list[tuple[int, NDArray[np.int64]]] = dataclasses.field(default_factory=list)
    length: int = 0
    is_chain: bool = True

    def add(self, new: Tokens, before: NDArray[np.int64]) -> NDArray[np.int64]:
        """Append the segment ``new`` to the path ``before``; return the extended path."""
        places = np.arange(self.length, self.length + len(new))
        if len(new):
            self.is_chain &= len(before) == self.length
            self.segments.append((new, before))
            self.length += len(new)
        return np.concatenate([before, places])


def pack(
    sequences: Sequence[Tokens], predicting: Sequence[int], longest: int, pairs_per_token: int
) -> list[Row]:
    """Pack every sequence into a row. Sequences share a row where that saves work.

    A shared prefix is computed once, but attention costs as much as over the whole row: a row of n
    tokens takes n * n pairs.

    Args:
        sequences: at least one non-negative token each.
        predicting: for each sequence, how many of its last tokens predict something.
        longest: maximum tokens of a row of several sequences.
        pairs_per_token: pairs of tokens whose attention costs as much as the rest of a layer costs
            for one token.
    """
    rows: list[Row] = []
    previous, path = np.empty(0, np.int32), np.empty(0, np.int64)
    # Sorted by their bytes, the sequences with the longest shared prefixes are neighbours, and a
    # prefix comes before its continuations.
    for number in sorted(range(len(sequences)), key=lambda n: sequences[n].tobytes()):
        tokens = sequences[number]
        length = min(len(previous), len(tokens))
        differs = previous[:length] != tokens[:length]
        shared = int(differs.argmax()) if differs.any() else length
        before = rows[-1].length if rows else 0
        together = before + len(tokens) - shared
        more_pairs = together**2 - before**2 - len(tokens) ** 2
        if not shared or together > longest or more_pairs >= shared * pairs_per_token:
            rows.append(Row())
            shared = 0
        path = rows[-1].add(tokens[shared:], path[:shared])
        rows[-1].predicting.append((number, path[len(path) - predicting[number] :]))
        previous = tokens
    return rows


def batches(
    rows: Sequence[Row], tokens_at_once: int, multiple: int
) -> Iterator[tuple[list[Row], int]]:
    """Batches of rows of similar lengths, and the width that they are padded to.

    The longest come first, so that a batch too large for the memory fails early.

    Args:
        rows: rows to batch.
        tokens_at_once: maximum tokens of a batch, padding included; a longer row is a batch alone.
        multiple: widths are multiples of it.
    """
    batch: list[Row] = []
    width = 0
    for row in sorted(rows, key=lambda row: -row.length):
        is_full = (len(batch) + 1) * width > tokens_at_once
        if batch and (is_full or row.length < MIN_FILL * batch[0].length):
            yield batch, width
            batch = []
        if not batch:
            width = padded_length(row.length, multiple)
        batch.append(row)
    if batch:
        yield batch, width


def batch_tensors(batch: Sequence[Row], width: int) -> Batch:
    """Model inputs of a batch: rows padded on the right to ``width`` tokens.

    Returns:
        tokens and positions [b, width] int64; unless all rows are plain sequences,
        attention_mask [b, 1, width, width] bool, True where attention is masked (Megatron's
        convention).
    """
    tokens = np.zeros((len(batch), width), np.int64)
    positions = np.zeros((len(batch), width), np.int64)
    made = {"tokens": torch.from_numpy(tokens), "positions": torch.from_numpy(positions)}
    hidden = None
    if not all(row.is_chain for row in batch):
        # Padding attends to itself: kernels differ in the result of a softmax over nothing.
        hidden = np.repeat(~np.eye(width, dtype=bool)[None], len(batch), axis=0)
        made["attention_mask"] = torch.from_numpy(hidden)[:, None]
    for number, row in enumerate(batch):
        start = 0
        for new, before in row.segments:
            own = slice(start, start + len(new))
            tokens[number, own] = new
            positions[number, own] = len(before) + np.arange(len(new))
            if hidden is not None:
                hidden[number, own, before] = False
                hidden[number, own, own] = ~np.tri(len(new), dtype=bool)
            start += len(new)
    return made


def prediction_tensors(batch: Sequence[Row], questions: Sequence[Question], width: int) -> Batch:
    """Map predicting tokens of a batch, in rows of ``width`` tokens, to labels and questions.

    Returns:
        places: [p] int64, increasing and distinct: tokens of the flattened batch that predict.
        rows: [m] int64, increasing: the index in ``places`` that predicts each label.
        labels: [m] int64.
        questions: [m] int64, the question of each label.
    """
    parts = [
        (at + number * width, questions[index].continuation, np.full(len(at), index))
        for number, row in enumerate(batch)
        for index, at in row.predicting
    ]
    at, labels, owners = (
        np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True)
    )
    order = np.argsort(at, kind="stable")
    places, rows = np.unique(at[order], return_inverse=True)
    arrays = {"places": places, "rows": rows, "labels": labels[order], "questions": owners[order]}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Scorer:
    """Scores continuations and generates text with a model.

    :meth:`score` and :meth:`generate` are collective. Rank 0's arguments are used; the other ranks
    either make the same calls or :meth:`serve`. All ranks return the results.

    Args:
        reader: the model.
        sequences_at_once: sequences of the model's length per forward pass and rank; shorter ones
            fill the same number of tokens.
        tokenizer: of the model.
    """

    def __init__(self, reader: Reader, sequences_at_once: int, tokenizer: Tokenizer) -> None:
        self.reader = reader
        self.layout = reader.layout
        self.max_length = reader.shape.max_sequence_length
        self.sequences_at_once = sequences_at_once
        self.tokenizer = tokenizer
        self.eod_id = tokenizer.eod_id

    def score(self, questions: Sequence[Question], description: str = "") -> Answers:
        """Score the continuations; ``description`` is for the progress bar.

        Raises:
            UserError: if a likelihood is not finite.
        """
        return self._score(*self._call("score", questions, description)[1:])

    def generate(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
        """Continue each prompt greedily up to a stop or the end of a document.

        There is no key-value cache: each new token costs a forward pass over the unfinished
        sequences. The tasks of the paper generate nothing.

        Returns:
            New tokens of each prompt, the end-of-document token included; forward FLOPs of all
            ranks.
        """
        return self._generate(*self._call("generate", prompts)[1:])

    def serve(self) -> None:
        """Run the collective calls of rank 0 until it calls :meth:`stop`."""
        assert not self.layout.is_main
        while (call := self._call("stop"))[0] != "stop":
            (self._score if call[0] == "score" else self._generate)(*call[1:])

    def stop(self) -> None:
        """End :meth:`serve` on the other ranks; called by rank 0."""
        self._call("stop")

    def _call(self, *call: Any) -> tuple[Any, ...]:
        """Broadcast rank 0's call. A single rank must not: it would wait for its device."""
        return call if self.layout.world_size == 1 else from_main(lambda: call)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, v] float32 logits of ``hidden`` [n, h]; minus infinity for padding of the vocabulary.

        Collective over tensor-parallel ranks of the last pipeline stage.
        """
        logits = linear(hidden, self.reader.model.shared_embedding_or_output_weight()).float()
        if self.layout.tensor_size > 1:
            logits = gather_from_tensor_model_parallel_region(logits)
        logits[:, self.reader.shape.vocab_size :] = -torch.inf
        return logits

    @torch.no_grad()
    def _score(self, questions: Sequence[Question], description: str) -> Answers:
        layout, shape = self.layout, self.reader.shape
        predicting = [len(question.continuation) for question in questions]
        # Projections take 4h(2h + f) FLOPs per token, and attention 4h per pair of tokens.
        pairs_per_token = 2 * shape.size.hidden_size + shape.size.ffn_hidden_size
        sequences = [self._model_input(question) for question in questions]
        rows = pack(sequences, predicting, 2 * self.max_length, pairs_per_token)
        # Log-likelihoods, and the number of tokens that are not the most likely.
        sums = torch.zeros(2, len(questions), dtype=torch.float64, device=layout.device)
        flops, tokens_at_once = 0.0, self.sequences_at_once * self.max_length
        all_batches = list(batches(rows, tokens_at_once, length_multiple(layout)))
        own = (
            {**batch_tensors(batch, width), **prediction_tensors(batch, questions, width)}
            for batch, width in all_batches[layout.data_rank :: layout.data_size]
        )
        is_quiet = not layout.is_main
        bar = progress_bar(len(questions), " requests", description, quiet=is_quiet, delay=2.0)
        with bar, read_ahead(own, layout.device) as ahead:
            for number, (batch, width) in enumerate(all_batches):
                # Each token attends to its whole row, twice the causal half of a row. The output
                # layer runs at the distinct places that predict.
                layer = len(batch) * width * layer_forward_flops(shape, 2 * width)
                predicted = [np.concatenate([at for _, at in row.predicting]) for row in batch]
                places = sum(len(np.unique(at)) for at in predicted)
                flops += shape.size.num_layers * layer + places * head_forward_flops(shape)
                if number % layout.data_size == layout.data_rank:
                    self._score_batch(next(ahead), sums)
                bar.update(sum(len(row.predicting) for row in batch))
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
        """All but the last token, truncated on the left to the model's length."""
        assert len(question.continuation) <= self.max_length
        whole = np.concatenate([question.context, question.continuation])
        return whole[-(self.max_length + 1) :][:-1] if len(question.continuation) else whole[:1]

    def _score_batch(self, batch: Batch, sums: torch.Tensor) -> None:
        """Add the log-likelihoods and misses of a batch to ``sums`` [2, n].

        Logits are computed a few states at a time, and only for the places that predict: for whole
        contexts they would cost as much as the layers of a small model. Of several most likely
        tokens, the first counts.
        """
        hidden = self.reader.final_hidden_states(
            batch["tokens"], batch["positions"], batch.get("attention_mask")
        )
        rows, labels = batch["rows"], batch["labels"]
        if hidden is None or not len(labels):
            return
        states = hidden.transpose(0, 1).flatten(0, 1)[batch["places"]]
        elements = LOGITS_ON_GPU if hidden.is_cuda else LOGITS_ON_CPU
        chunk = max(1, elements // self.reader.shape.vocab_size)
        log_probabilities = torch.zeros(len(rows), device=hidden.device)
        hits = torch.zeros(len(rows), dtype=torch.bool, device=hidden.device)
        for start in range(0, len(states), chunk):
            logits = self._logits(states[start : start + chunk])
            # All labels in every chunk: selecting the chunk's own would synchronise with the host.
            is_own = (rows >= start) & (rows < start + chunk)
            own_rows = (rows - start).clamp(0, len(logits) - 1)
            scores = logits[own_rows, labels] - logits.logsumexp(dim=1)[own_rows]
            log_probabilities = torch.where(is_own, scores, log_probabilities)
            hits |= is_own & (logits.argmax(dim=1)[own_rows] == labels)
        sums[0].index_add_(0, batch["questions"], log_probabilities.double())
        sums[1].index_add_(0, batch["questions"], (~hits).double())

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
        """Continue ``sequences_at_once`` prompts of similar lengths at a time."""
        layout, size = self.layout, self.sequences_at_once
        order = sorted(range(len(prompts)), key=lambda n: len(prompts[n].context))
        new: dict[int, list[int]] = {}
        flops = 0.0
        starts = range(size * layout.data_rank, len(prompts), size * layout.data_size)
        for numbers in (order[start : start + size] for start in starts):
            new |= {n: [] for n in numbers}
            while left := [n for n in numbers if not self._is_finished(prompts[n], new[n])]:
                rooms = [self.max_length - prompts[n].max_new_tokens for n in left]
                sequences = [
                    prompts[n].context[-room:].tolist() + new[n]
                    for n, room in zip(left, rooms, strict=True)
                ]
                for n, token in zip(left, self._next_tokens(sequences), strict=True):
                    new[n].append(token)
                width = max(map(len, sequences))
                positions = len(left) * width
                # The output layer reads one state per sequence.
                unread = (positions - len(left)) * head_forward_flops(self.reader.shape)
                flops += forward_flops(self.reader.shape, positions, width) - unread
        # The ranks of one replica have the same results; one of them counts the FLOPs.
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
        """The most likely token after each sequence, on every rank of the replica."""
        layout = self.layout
        width = padded_length(max(map(len, sequences)), length_multiple(layout))
        tokens = np.zeros((len(sequences), min(width, self.max_length)), np.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        on_device = to_device(torch.from_numpy(tokens), layout.device)
        positions = torch.arange(tokens.shape[1], device=layout.device).expand_as(on_device)
        hidden = self.reader.final_hidden_states(on_device, positions)
        found = torch.zeros(len(sequences), dtype=torch.int64, device=layout.device)
        if hidden is not None:
            last = to_device(torch.tensor([len(s) - 1 for s in sequences]), layout.device)
            states = hidden[last, torch.arange(len(sequences), device=layout.device)]
            found = self._logits(states).argmax(dim=1)
        if layout.pipeline_size > 1:
            last_stage = parallel_state.get_pipeline_model_parallel_last_rank()
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.broadcast(found, src=last_stage, group=group)
        return found.tolist()
