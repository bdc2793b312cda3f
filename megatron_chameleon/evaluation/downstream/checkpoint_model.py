"""The model that lm-eval's own command knows as megatron_chameleon, from its --model_args."""

from __future__ import annotations

import atexit
import contextlib
from pathlib import Path

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.checkpoint.convert import find_tokenizer
from megatron_chameleon.checkpoint.reader import open_reader, shape_of
from megatron_chameleon.corpus.tokenizer import Tokenizer
from megatron_chameleon.errors import UserError
from megatron_chameleon.evaluation.downstream.generation import Generator
from megatron_chameleon.evaluation.downstream.harness_model import HarnessModel
from megatron_chameleon.evaluation.downstream.scoring import Scorer
from megatron_chameleon.evaluation.downstream.shared_model import SharedModel
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.tokenizer import TokenizerChoice
from megatron_chameleon.parallel.layout import Layout, distributed, from_main


class CheckpointModel(HarnessModel):
    """A checkpoint, opened as lm-eval's command opens models: by words.

    Args:
        checkpoint: a run folder (its latest checkpoint) or one checkpoint folder.
        batch_size: sequences of the model's length in a forward pass of a rank.
        tensor_model_parallel_size: ranks that share each layer.
        pipeline_model_parallel_size: stages that the layers are cut into.
        sequence_parallel: split layer norms along the sequence too.
        dtype: float32 or bfloat16.
        tokenizer_model: the tokenizer, or a corpus made with it, where the checkpoint's own is not
            found.
        eod_token: see TokenizerChoice.
        tiktoken_pattern: see TokenizerChoice.
        device: not looked at. lm-eval always gives one, and each rank has a device of its own.

    Raises:
        UserError: for a mistake in these.
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
            raise UserError(f"--batch_size {batch_size}: give a whole number from 1 on")
        if dtype not in ("float32", "bfloat16"):
            raise UserError(f"dtype={dtype}: choose float32 or bfloat16")
        parallel = ParallelOptions(
            tensor_model_parallel_size, pipeline_model_parallel_size, sequence_parallel
        )
        choice = TokenizerChoice(
            tokenizer_model=None if tokenizer_model is None else Path(tokenizer_model),
            eod_token=eod_token,
            tiktoken_pattern=tiktoken_pattern,
        )
        path, bf16 = Path(checkpoint), dtype == "bfloat16"
        with contextlib.ExitStack() as groups:
            layout = groups.enter_context(distributed(parallel, seed=0))
            record = from_main(lambda: CheckpointRecord.load(find_checkpoint(path)))
            shape = shape_of(record)
            check_model_layout(shape.size, parallel, shape.max_sequence_length)
            tokenizer = find_tokenizer(choice, record)
            shared = open_shared_model(record, tokenizer, layout, int(batch_size), bf16=bf16)
            self._groups = groups.pop_all()
        super().__init__(shared, tokenizer)
        atexit.register(self.close)  # lm-eval does not say when it is done with a model

    def close(self) -> None:
        """Leave the process groups; every rank does."""
        self._groups.close()


def open_shared_model(
    record: CheckpointRecord,
    tokenizer: Tokenizer,
    layout: Layout,
    sequences_at_once: int,
    *,
    bf16: bool,
) -> SharedModel:
    """Read the weights of ``record``; every rank calls this."""
    scorer = Scorer(open_reader(record, layout, bf16=bf16), sequences_at_once)
    return SharedModel(scorer, Generator(scorer, tokenizer.eod_id, tokenizer.decode))
