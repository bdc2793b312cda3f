"""From the strings of lm-eval's requests to tokens, each string encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_chameleon.evaluation.downstream.prefix_rows import Tokens
from megatron_chameleon.evaluation.downstream.scoring import Question

EncodeBatch = Callable[[Sequence[str]], Sequence[np.ndarray]]


def encode_pairs(
    encode_batch: EncodeBatch, pairs: Sequence[tuple[str, str]], prefix: int
) -> list[Question]:
    """Questions for (context, continuation) pairs, by the rules of lm-eval's TemplateLM.

    Both are encoded together, and the tokens of the continuation are those behind as many as the
    context has alone. Spaces at the end of a context belong to the continuation, as in the text
    that the tokenizer was made from. An empty context is the token ``prefix``.

    Args:
        encode_batch: the tokens of texts, and nothing added.
        pairs: any number of them.
        prefix: what stands for nothing: the end of a document.
    """
    moved = [_move_spaces(context, continuation) for context, continuation in pairs]
    strings = dict.fromkeys(s for context, rest in moved for s in (context, context + rest))
    encoded = zip(strings, encode_batch(list(strings)), strict=True)
    # One array for a context that several requests have.
    tokens = {string: np.asarray(ids, dtype=np.int32) for string, ids in encoded}
    start = np.array([prefix], dtype=np.int32)
    questions = []
    for context, continuation in moved:
        before, whole = tokens[context], tokens[context + continuation]
        if context:
            questions.append(Question(before, whole[len(before) :]))
        elif whole[:1] == [prefix]:
            questions.append(Question(whole[:1], whole[1:]))
        else:
            questions.append(Question(start, whole))
    return questions


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def rolling_questions(tokens: Tokens, prefix: int, max_length: int) -> list[Question]:
    """Questions whose continuations are all of ``tokens``, each with as much context as fits.

    The windows are lm-eval's: the last one is as long as the model can look at, and asks for what
    is left.
    """
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows = get_rolling_token_windows(
        token_list=tokens.tolist(), prefix_token=prefix, max_seq_len=max_length, context_len=1
    )
    return [
        Question(np.array(context, dtype=np.int32), np.array(continuation, dtype=np.int32))
        for context, continuation in map(make_disjoint_window, windows)
    ]
