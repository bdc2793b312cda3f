"""lm-eval's view of our models: strings in, log-likelihoods and texts out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.generation import Prompt
from megatron_chameleon.evaluation.downstream.prefix_rows import Tokens
from megatron_chameleon.evaluation.downstream.request_tokens import (
    encode_pairs,
    rolling_questions,
)
from megatron_chameleon.evaluation.downstream.scoring import Answers, Question
from megatron_chameleon.evaluation.downstream.shared_model import SharedModel


@dataclasses.dataclass
class Tally:
    """What was asked since the last :meth:`HarnessModel.new_tally`, and what it cost."""

    requests: int = 0
    truncated: int = 0
    flops: float = 0.0
    digest: Any = dataclasses.field(default_factory=hashlib.sha256)

    def note(self, requests: Sequence[Instance]) -> None:
        """Count ``requests``, and let the digest depend on each of them."""
        self.requests += len(requests)
        for request in requests:
            line = json.dumps([request.request_type, *request.args], sort_keys=True)
            self.digest.update(line.encode() + b"\n")


class HarnessModel(TemplateLM):
    """A language model as lm-eval knows them.

    Every rank gets the answers to what rank 0 asks. lm-eval is told of one rank: which rank works
    on what is the model's own business.

    Attributes:
        tally: of what was asked.
        description: what the progress bar says.
        failed: whether answering was broken off, and ranks may be waiting for each other.
    """

    def __init__(self, shared: SharedModel, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.shared = shared
        self.own_tokenizer = tokenizer
        self.tally = Tally()
        self.description = ""
        self.failed = False

    @property
    def eot_token_id(self) -> int:
        """The end of a document: what stands for an empty context, and ends a generation."""
        return self.own_tokenizer.eod_id

    @property
    def max_length(self) -> int:
        """Tokens that the model can look at."""
        return self.shared.scorer.max_length

    @property
    def tokenizer_name(self) -> str:
        """By which lm-eval tells caches of requests apart."""
        return f"megatron_chameleon-{self.own_tokenizer.sha256}"

    def new_tally(self, description: str) -> None:
        """Begin to count anew; ``description`` is for the progress bar."""
        self.tally, self.description = Tally(), description

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_more: Any
    ) -> list[int]:
        """Tokens of a text, and nothing added: corpora have no token at their beginnings."""
        tokens: list[int] = self._encode([string])[0].tolist()
        return tokens

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without what ends a document."""
        return self.own_tokenizer.decode([t for t in tokens if t != self.eot_token_id])

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is what greedy decoding gives) of each continuation.

        Raises:
            UserError: if a continuation is longer than the model can look at.
        """
        self.tally.note(requests)
        pairs = [request.args for request in requests]
        return _pairs_of(self._answers(encode_pairs(self._encode, pairs, self.eot_token_id)))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of each text from its beginning, in windows of the model's length."""
        self.tally.note(requests)
        texts = self._encode([request.args[0] for request in requests])
        windows = [rolling_questions(t, self.eot_token_id, self.max_length) for t in texts]
        answers = self._answers(list(itertools.chain.from_iterable(windows)))
        ends = np.cumsum([0, *map(len, windows)])
        sums = np.concatenate([[0.0], np.cumsum(answers.log_likelihoods)])[ends]
        found: list[float] = np.diff(sums).tolist()
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """What greedy decoding goes on with, up to the first of the stops.

        Raises:
            UserError: if a task wants to sample, or more tokens than the model has positions.
        """
        self.tally.note(requests)
        tokens = self._encode([request.args[0] for request in requests])
        asked = zip(tokens, (request.args[1] for request in requests), strict=True)
        prompts = [self._prompt(context, settings) for context, settings in asked]
        with self._noting_failure():
            generated = self.shared.generate(prompts)
        self.tally.flops += generated.flops
        return [
            postprocess_generated_text(self.tok_decode(new), list(prompt.stops), None)
            for prompt, new in zip(prompts, generated.tokens, strict=True)
        ]

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's own results say of the model."""
        reader = self.shared.scorer.reader
        return {
            "model_num_parameters": reader.shape.num_parameters,
            "model_dtype": str(reader.model.config.params_dtype),
            "model_layout": reader.layout.describe(),
        }

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_more: Any
    ) -> list[tuple[float, bool]]:
        questions = [
            Question(np.array(context, dtype=np.int32), np.array(rest, dtype=np.int32))
            for _, context, rest in requests
        ]
        return _pairs_of(self._answers(questions))

    def _answers(self, questions: Sequence[Question]) -> Answers:
        longest = max((len(question.continuation) for question in questions), default=0)
        if longest > self.max_length:
            raise UserError(
                f"a continuation has {longest} tokens, and the model looks at {self.max_length} at "
                "most; leave the task out"
            )
        with self._noting_failure():
            answers = self.shared.score(questions, self.description)
        assert len(answers.is_greedy) == len(questions), "ranks ask for different things"
        self.tally.flops += answers.flops
        self.tally.truncated += answers.num_truncated
        return answers

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        self.failed = True
        yield
        self.failed = False

    def _encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [ids.astype(np.int32) for ids in self.own_tokenizer.encoder.encode_batch(texts)]

    def _prompt(self, tokens: Tokens, settings: dict[str, Any]) -> Prompt:
        wanted = normalize_gen_kwargs(settings)
        if wanted["do_sample"]:
            raise UserError(
                "a task wants to sample (do_sample), and generation is greedy here; leave the task "
                "out, or give --gen_kwargs do_sample=False where lm-eval's own command runs"
            )
        if wanted["max_gen_toks"] >= self.max_length:
            raise UserError(
                f"a task generates up to {wanted['max_gen_toks']} tokens, and the model looks at "
                f"{self.max_length} in all; leave the task out"
            )
        if not len(tokens):
            tokens = np.array([self.eot_token_id], dtype=np.int32)
        # The end of a document ends a generation by its id, in whatever words a text may say it.
        stops = [stop for stop in handle_stop_sequences(wanted["until"], eos=None) if stop]
        return Prompt(tokens, wanted["max_gen_toks"], tuple(stops))


def _pairs_of(answers: Answers) -> list[tuple[float, bool]]:
    found = zip(answers.log_likelihoods.tolist(), answers.is_greedy.tolist(), strict=True)
    return list(found)
