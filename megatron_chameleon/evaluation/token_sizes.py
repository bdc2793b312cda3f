"""The bytes of text that each token stands for, by the tokenizer of a corpus."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import CheckpointRecord, Corpus
from megatron_chameleon.checkpoint.recorded_tokenizer import RecordedTokenizer
from megatron_chameleon.corpus.regroup import token_bytes
from megatron_chameleon.corpus.tokenizer import corpus_tokenizer
from megatron_chameleon.errors import UserError


@dataclasses.dataclass(frozen=True)
class TokenSizes:
    """Bytes of each token, [vocab_size] int32, or None and in ``problem`` why nobody knows."""

    sizes: NDArray[np.int32] | None
    problem: str = ""


def token_sizes(corpus: Corpus, record: CheckpointRecord) -> TokenSizes:
    """By the corpus's copy of its tokenizer, or else by the one that the checkpoint names.

    Without a tokenizer, losses and perplexities can be had all the same.
    """
    problems = []
    for place in dict.fromkeys([None, RecordedTokenizer.of(record).place]):
        try:
            return TokenSizes(token_bytes(corpus_tokenizer(corpus, place)))
        except UserError as error:
            problems.append(str(error))
    return TokenSizes(None, problems[0])
