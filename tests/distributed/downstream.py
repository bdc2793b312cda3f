"""Score, generate and run the downstream evaluation of a text model in a parallel layout."""

from __future__ import annotations

import numpy as np

from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.evaluation.downstream import evaluate_downstream
from megatron_chameleon.evaluation.options import DownstreamOptions
from megatron_chameleon.evaluation.scoring import Prompt, Question, Scorer
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.parallel.options import ParallelOptions
from tests.distributed.cases import DOWNSTREAM, Places
from tests.fixtures.task_data import write_task_data
from tests.text_checkpoint import write_text_checkpoint


def write_and_answer(places: Places) -> None:
    """Write a checkpoint of a text model and task data, and answer the tasks on one rank."""
    places.downstream.mkdir()
    write_text_checkpoint(places.downstream)
    write_task_data(places.downstream / "data", 4)
    answer(places, "one")


def make_questions() -> list[Question]:
    """Contexts of many lengths, some with a common prefix, each with three continuations."""
    rng = np.random.default_rng(0)

    def sample(length: int) -> np.ndarray:
        return rng.integers(0, 400, length).astype(np.int32)

    prefix, questions = sample(90), []
    for length in (1, 2, 13, 60, 150, 251, 300):
        for context in (sample(length), np.concatenate([prefix, sample(length)])):
            questions += [Question(context, sample(each)) for each in (1, 1, 5)]
    return questions


def make_prompts() -> list[Prompt]:
    """Prompts of several lengths; there are more prompts than data-parallel ranks."""
    rng = np.random.default_rng(1)
    lengths = (1, 3, 40, 41, 200, 300)
    return [Prompt(rng.integers(0, 400, n).astype(np.int32), 4 + n % 3, ()) for n in lengths]


def answer(places: Places, name: str) -> None:
    """Score, generate and evaluate; rank 0 writes the results."""
    folder = places.downstream
    options = DownstreamOptions(
        checkpoint=folder / "checkpoint",
        output=folder / f"{name}.json",
        tasks=("copa",),
        shots=(0, 1),
        data_dir=folder / "data",
        evaluation_batch_size=1,
        parallel=DOWNSTREAM.get(name, ParallelOptions()),
    )
    with distributed(options.parallel, seed=0) as layout:
        record = CheckpointRecord.load(options.checkpoint)
        tokenizer = CheckpointModel(record, options.tokenizer).tokenizer()
        batch = 4 if layout.world_size == 1 else 1
        scorer = Scorer(CheckpointModel(record).reader(layout), batch, tokenizer)
        if layout.is_main:
            answers = scorer.score(make_questions())
            generated, flops = scorer.generate(make_prompts())
            scorer.stop()
            np.savez(
                folder / f"{name}.npz",
                log_likelihoods=answers.log_likelihoods,
                is_greedy=answers.is_greedy,
                generated=np.array([str(tokens) for tokens in generated]),
                flops_of_generation=flops,
            )
        else:
            scorer.serve()
    evaluate_downstream(options)
