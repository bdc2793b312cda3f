"""Evaluate models as lm-eval models."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron_chameleon.checkpoint.open_model import open_model
from megatron_chameleon.checkpoint.options import TokenizerChoice
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.scoring import Prompt, Question, Scorer, Tokens
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.parallel.options import ParallelOptions


class ScorerLM(TemplateLM):
    """lm-eval model that sends its requests to a :class:`Scorer`.

    lm-eval runs as a single rank; the scorer distributes the work. Every rank gets the results of
    rank 0's requests.

    Attributes:
        num_truncated: number of requests since :meth:`reset` whose contexts were truncated.
        flops: FLOPs of the requests since :meth:`reset`.
        digest: SHA-256 of the requests since :meth:`reset`.
        description: text next to the progress bar.
        failed: whether a call of the scorer raised an error; other ranks may then wait in a
            collective.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.failed = False
        self._encoded: dict[str, Tokens] = {}
        self.reset("")

    def reset(self, description: str) -> None:
        """Reset the counts and the digest before the next task."""
        self.num_truncated, self.flops, self.digest = 0, 0.0, hashlib.sha256()
        self.description = description

    @property
    def eot_token_id(self) -> int:
        """End-of-document token: it replaces an empty context, and ends a generation."""
        return self.scorer.eod_id

    @property
    def max_length(self) -> int:
        """The model's sequence length."""
        return self.scorer.max_length

    @property
    def tokenizer_name(self) -> str:
        """Name that identifies the tokenizer in lm-eval's request cache."""
        return f"megatron_chameleon-{self.scorer.tokenizer.sha256}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_more: Any
    ) -> Sequence[int]:
        """Encode a text without special tokens: corpora have no beginning-of-text token."""
        if string in self._encoded:
            return self._encoded[string]  # type: ignore[return-value]
        return self._encode([string])[0].tolist()

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, without end-of-document tokens."""
        return self.scorer.tokenizer.decode([t for t in tokens if t != self.eot_token_id])

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy decoding yields the continuation) of each request.

        Each distinct text is encoded once, all in one batch; TemplateLM splits them into pairs.

        Raises:
            UserError: if a continuation is longer than the model's sequence length.
        """
        self._record(requests)
        pairs = [request.args for request in requests]
        texts = list(dict.fromkeys(t for c, more in pairs for t in (c.rstrip(), c + more)))
        self._encoded = dict(zip(texts, self._encode(texts), strict=True))
        try:
            return super().loglikelihood(requests, disable_tqdm=True)
        finally:
            self._encoded = {}

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of whole texts, in windows of the model's sequence length."""
        self._record(requests)
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=tokens.tolist(),
                    prefix_token=self.eot_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for tokens in self._encode([request.args[0] for request in requests])
        ]
        answers = iter(self._score([window for each in windows for window in each]))
        return [sum(next(answers)[0] for _ in each) for each in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate greedy continuations, each up to its first stop sequence.

        Raises:
            UserError: if a task requests sampling, or more tokens than the model has positions.
        """
        self._record(requests)
        prompts = []
        texts = [request.args[0] for request in requests]
        for request, tokens in zip(requests, self._encode(texts), strict=True):
            settings = normalize_gen_kwargs(request.args[1])
            if settings["do_sample"]:
                raise UserError(
                    "the task samples (do_sample), and only greedy generation is supported; remove "
                    "the task, or pass --gen_kwargs do_sample=False to lm-eval's own command"
                )
            if settings["max_gen_toks"] >= self.max_length:
                raise UserError(
                    f"the task generates up to {settings['max_gen_toks']} tokens, and the model's "
                    f"sequence length is {self.max_length}; remove the task"
                )
            # The end-of-document token ends a generation by its id, not its text.
            stops = [stop for stop in handle_stop_sequences(settings["until"], eos=None) if stop]
            context = tokens if len(tokens) else np.array([self.eot_token_id], dtype=np.int32)
            prompts.append(Prompt(context, settings["max_gen_toks"], tuple(stops)))
        self.failed = True
        generated, flops = self.scorer.generate(prompts)
        self.failed = False
        self.flops += flops
        return [
            postprocess_generated_text(self.tok_decode(new), list(prompt.stops), None)
            for prompt, new in zip(prompts, generated, strict=True)
        ]

    def get_model_info(self) -> dict[str, Any]:
        """Return model metadata for lm-eval's results."""
        reader = self.scorer.reader
        return {
            "model_num_parameters": reader.config.num_parameters,
            "model_dtype": str(reader.model.config.params_dtype),
            "model_layout": reader.layout.describe(),
        }

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], Sequence[int], Sequence[int]]], **_more: Any
    ) -> list[tuple[float, bool]]:
        return self._score([(context, continuation) for _, context, continuation in requests])

    def _score(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[float, bool]]:
        # asarray does not copy, so that questions share the memory of their contexts.
        questions = [
            Question(
                np.asarray(context if len(context) else [self.eot_token_id], dtype=np.int32),
                np.asarray(continuation, dtype=np.int32),
            )
            for context, continuation in pairs
        ]
        longest = max((len(question.continuation) for question in questions), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a continuation has {longest} tokens, more than the model's sequence length of "
                f"{self.max_length}; remove the task"
            )
        self.failed = True
        answers = self.scorer.score(questions, self.description)
        self.failed = False
        assert len(answers.is_greedy) == len(questions), "ranks made different requests"
        self.flops += answers.flops
        self.num_truncated += answers.num_truncated
        return list(zip(answers.log_likelihoods.tolist(), answers.is_greedy.tolist(), strict=True))

    def _encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoder = self.scorer.tokenizer.encoder
        return [ids.astype(np.int32) for ids in encoder.encode_batch(texts)]

    def _record(self, requests: Sequence[Instance]) -> None:
        for request in requests:
            line = json.dumps([request.request_type, *request.args], sort_keys=True)
            self.digest.update(line.encode() + b"\n")


class CheckpointLM(ScorerLM):
    """A model that lm-eval's own command opens, with the arguments of --model_args.

    Args:
        checkpoint: any model; see :func:`~megatron_chameleon.checkpoint.open_model.open_model`.
        batch_size: sequences of the model's length per forward pass and rank.
        tensor_model_parallel_size: see ParallelOptions.
        pipeline_model_parallel_size: see ParallelOptions.
        sequence_parallel: see ParallelOptions.
        dtype: float32 or bfloat16.
        tokenizer_model: tokenizer, or a corpus made with it, if the checkpoint's is not found.
        eod_token: see TokenizerChoice.
        tiktoken_pattern: see TokenizerChoice.
        device: ignored; lm-eval always passes a device, but each rank uses its own.

    Raises:
        UserError: for invalid arguments.
    """

    def __init__(
        self,
        checkpoint: str,
        batch_size: int | str = 1,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        dtype: str = "float32",
        tokenizer_model: str | None = None,
        eod_token: str | None = None,
        tiktoken_pattern: str | None = None,
        device: str | None = None,
    ) -> None:
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UserError(f"--batch_size {batch_size}: must be >= 1")
        if dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype={dtype}: must be float32 or bfloat16")
        parallel = ParallelOptions(
            tensor_model_parallel_size, pipeline_model_parallel_size, sequence_parallel
        )
        choice = TokenizerChoice(
            tokenizer_model=None if tokenizer_model is None else Path(tokenizer_model),
            eod_token=eod_token,
            tiktoken_pattern=tiktoken_pattern,
        )
        path = Path(checkpoint)
        with contextlib.ExitStack() as groups:
            layout = groups.enter_context(distributed(parallel, seed=0))
            model, tokenizer = from_main(
                lambda: open_model(path, tokenizer=choice).with_own_vocabulary()
            )
            check_model_layout(model.config, parallel, model.config.max_sequence_length)
            reader = model.reader(layout, bf16=dtype == "bfloat16")
            scorer = Scorer(reader, int(batch_size), tokenizer)
            self._groups = groups.pop_all()
        super().__init__(scorer)
        atexit.register(self.close)  # close at exit, since lm-eval does not close models

    def close(self) -> None:
        """Destroy the process groups. Collective."""
        self._groups.close()
        # On Python 3.13 and later, a forked process clears the exit handlers of its parent. If they
        # held the last reference to a process group, its destructor would wait for threads that do
        # not exist in the forked process.
        atexit.unregister(self.close)
