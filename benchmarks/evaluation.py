"""Downstream requests answered per second, compared with lm-eval's model for transformers.

    python benchmarks/evaluation.py [--documents 4] [--shots 0 5] [--repeats 3]

Both answer the same requests: those of lm-eval for all thirteen tasks, on synthetic documents of
about the real length in the schemas of the datasets. Theirs is lm-eval's model "hf" on the
checkpoint exported by tools/convert_checkpoint.py, in fp32 and batches of --their-batch-size; ours
is the model of tools/evaluate.py downstream. Both map strings to log-likelihoods, encoding
included; all answers are compared. The model has the 82m shape and random weights. Results are
written to benchmarks/results/evaluation-DEVICE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

VOCAB_SIZE = 50_257
SIZE = "82m"
TEXT_BYTES = 5_000_000
TOLERANCE = 1e-4
Pairs = list[tuple[float, bool]]


def main() -> None:
    """Prepare the inputs, compare the answers, time both interleaved, and write the results."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    import torch

    from benchmarks.measure import compared, device_file, format_row, interleaved, machine, put_row
    from megatron_chameleon.parallel.layout import device_name, distributed
    from megatron_chameleon.parallel.options import ParallelOptions

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = prepare(folder, arguments.documents + max(arguments.shots) + 1)
        layout = stack.enter_context(distributed(ParallelOptions(), seed=0))
        name = device_name(layout.device)
        on = machine() | {"device": name, "cuda": torch.version.cuda}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads", flush=True)
        models = {
            "ours": our_model(places, layout),
            "theirs": their_model(places, layout.device, arguments.their_batch_size),
        }
        for shots in arguments.shots:
            requests = make_requests(places, shots, arguments.documents)
            contestants = {who: answering(model, requests) for who, model in models.items()}
            agreement = compare(*(run() for run in contestants.values()))
            seconds = interleaved(contestants, arguments.repeats)
            row = compared(
                f"{SIZE}, thirteen tasks with {shots} shots",
                seconds,
                requests=len(requests),
                documents_of_each_task=arguments.documents,
                their_batch_size=arguments.their_batch_size,
                all_seconds=seconds,
                answers=agreement,
            )
            add_speeds(row)
            print(format_row(row), format_speeds(row), sep="\n")
            print(f"written to {put_row(device_file('evaluation', name), on, row)}")


def add_speeds(row: dict[str, Any]) -> None:
    """Add requests per second, by the median time."""
    row["requests_per_second"] = {
        who: row["requests"] / seconds for who, seconds in row["seconds"].items()
    }


def format_speeds(row: dict[str, Any]) -> str:
    """Requests per second, and the largest difference between answers."""
    speeds = ", ".join(f"{who} {each:.1f}" for who, each in row["requests_per_second"].items())
    return (
        f"requests per second: {speeds}; answers differ by "
        f"{row['answers']['largest_difference']:.1e} at most"
    )


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=4, help="documents per task")
    parser.add_argument(
        "--shots", type=int, nargs="+", default=[0, 5], help="few-shot examples, one row each"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each")
    parser.add_argument(
        "--their-batch-size", type=int, default=8, help="batch size of lm-eval's model"
    )
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Places:
    """The input files of both."""

    checkpoint: Path
    """The checkpoint, for ours."""
    exported: Path
    """The same weights for transformers, with the tokenizer."""
    tokenizer: Path
    """The tokenizer.json of both."""
    data: Path
    """The datasets of the tasks."""


def prepare(folder: Path, documents: int) -> Places:
    """Write weights, tokenizer and datasets with ``documents`` documents per split."""
    import datasets

    from benchmarks.embedding import EOD_TOKEN, write_model
    from benchmarks.real_text import train_tokenizer_on, write_real_text
    from megatron_chameleon.checkpoint.convert import (
        convert_from_huggingface,
        convert_to_huggingface,
    )
    from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions, ToHuggingFaceOptions
    from tests.fixtures.task_data import write_task_data

    assert FromHuggingFaceOptions.eod_token == EOD_TOKEN
    datasets.disable_progress_bars()
    text, model = folder / "text.jsonl", folder / "model"
    write_real_text(text, TEXT_BYTES)
    write_model(model)
    train_tokenizer_on(text, TEXT_BYTES, VOCAB_SIZE, model / "tokenizer.json")
    checkpoint, exported = folder / "checkpoint", folder / "exported"
    with contextlib.redirect_stdout(io.StringIO()):
        convert_from_huggingface(FromHuggingFaceOptions(model=model, output=checkpoint))
        convert_to_huggingface(ToHuggingFaceOptions(checkpoint=checkpoint, output=exported))
    data = write_task_data(folder / "data", documents)
    return Places(checkpoint, exported, model / "tokenizer.json", data)


def make_requests(places: Places, shots: int, documents: int) -> list[Instance]:
    """lm-eval's requests for ``documents`` documents of each of the thirteen tasks."""
    from megatron_chameleon.evaluation.options import PAPER_TASKS
    from megatron_chameleon.evaluation.tasks import TaskLibrary

    library = TaskLibrary(PAPER_TASKS, places.data)
    requests: list[Instance] = []
    with contextlib.redirect_stderr(io.StringIO()):
        for name in PAPER_TASKS:
            loaded = library.load(name)
            loaded.set_shots(shots, seed=0)
            loaded.task.build_all_requests(limit=documents, rank=0, world_size=1)
            requests += loaded.task.instances
    return requests


def our_model(places: Places, layout: Any) -> Any:
    """The model of tools/evaluate.py downstream, with its default batch size."""
    from benchmarks.embedding import EOD_TOKEN
    from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
    from megatron_chameleon.checkpoint.load import open_reader
    from megatron_chameleon.corpus.tokenizer import load_tokenizer
    from megatron_chameleon.evaluation.lm_eval_model import ScorerLM
    from megatron_chameleon.evaluation.options import DownstreamOptions
    from megatron_chameleon.evaluation.scoring import Scorer

    tokenizer = load_tokenizer(places.tokenizer, EOD_TOKEN)
    record = CheckpointRecord.load(places.checkpoint)
    size = DownstreamOptions.evaluation_batch_size
    return ScorerLM(Scorer(open_reader(record, layout), size, tokenizer))


def their_model(places: Places, device: Any, batch_size: int) -> Any:
    """lm-eval's own model, which shares the context of single-token answers."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(places.exported), device=str(device), dtype="float32", batch_size=batch_size)


def answering(model: Any, requests: Sequence[Instance]) -> Callable[[], Pairs]:
    """A function that answers all requests, without a progress bar."""

    def run() -> Pairs:
        with contextlib.redirect_stderr(io.StringIO()):
            answers: Pairs = model.loglikelihood(list(requests), disable_tqdm=True)
        return answers

    return run


def compare(ours: Pairs, theirs: Pairs) -> dict[str, float]:
    """Check that all answers agree.

    Raises:
        AssertionError: if one differs.
    """
    largest = max(abs(one[0] - other[0]) for one, other in zip(ours, theirs, strict=True))
    assert largest < TOLERANCE, f"log-likelihoods differ by {largest}"
    assert [pair[1] for pair in ours] == [pair[1] for pair in theirs], "greedy answers differ"
    return {"largest_difference": largest}


if __name__ == "__main__":
    main()
