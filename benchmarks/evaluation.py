"""Measure downstream requests per second of our model and of lm-eval's transformers model.

    python benchmarks/evaluation.py [--documents 4] [--shots 0 5] [--repeats 3]

Both models answer lm-eval's requests for all thirteen tasks, on synthetic documents with the
schemas of the datasets and with about the same lengths. "theirs" is lm-eval's model "hf" on the
checkpoint exported by tools/convert_checkpoint.py, in fp32 and batches of --their-batch-size;
"ours" is the model of tools/evaluate.py downstream. Both map strings to log-likelihoods, and the
time includes encoding; all answers are compared. The model has the 82m shape and random weights.
Results are written to benchmarks/results/evaluation-DEVICE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from benchmarks.embedding import SIZE, TEXT_BYTES, write_model
from benchmarks.measure import compared, device_file, format_row, interleaved, machine, put_row
from benchmarks.real_text import write_real_text
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.corpus.tokenizer import load_tokenizer
from megatron_chameleon.evaluation.lm_eval_model import ScorerLM
from megatron_chameleon.evaluation.options import PAPER_TASKS, DownstreamOptions
from megatron_chameleon.evaluation.scoring import Scorer
from megatron_chameleon.evaluation.tasks import TaskLibrary
from megatron_chameleon.parallel.layout import device_name, distributed
from megatron_chameleon.parallel.options import ParallelOptions
from tests.fixtures.task_data import write_task_data
from tests.text_checkpoint import EOD_TOKEN

TOLERANCE = 1e-4


def main() -> None:
    """Prepare the inputs, compare the answers, time both interleaved, and write the results."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_real_text(folder / "text.jsonl", TEXT_BYTES)
        with contextlib.redirect_stdout(io.StringIO()):
            model = write_model(folder, folder / "text.jsonl")
        num_documents = arguments.documents + max(arguments.shots) + 1
        data = write_task_data(folder / "data", num_documents)
        layout = stack.enter_context(distributed(ParallelOptions(), seed=0))
        name = device_name(layout.device)
        on = machine() | {"device": name, "cuda": torch.version.cuda}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads", flush=True)
        reader = CheckpointModel(CheckpointRecord.load(model.checkpoint)).reader(layout)
        tokenizer = load_tokenizer(model.tokenizer, EOD_TOKEN)
        batch_size = DownstreamOptions.evaluation_batch_size
        models: dict[str, Any] = {
            "ours": ScorerLM(Scorer(reader, batch_size, tokenizer)),
            # lm-eval's model evaluates the shared context of single-token answers once.
            "theirs": HFLM(
                str(model.exported),
                device=str(layout.device),
                dtype="float32",
                batch_size=arguments.their_batch_size,
            ),
        }
        for shots in arguments.shots:
            requests = make_requests(data, shots, arguments.documents)
            runs = {who: partial(answer, model, requests) for who, model in models.items()}
            difference = compare(*(run() for run in runs.values()))
            seconds = interleaved(runs, arguments.repeats)
            row = compared(
                f"{SIZE}, thirteen tasks with {shots} shots",
                seconds,
                requests=len(requests),
                documents_of_each_task=arguments.documents,
                their_batch_size=arguments.their_batch_size,
                all_seconds=seconds,
                answers={"largest_difference": difference},
            )
            speeds = {who: len(requests) / each for who, each in row["seconds"].items()}
            row["requests_per_second"] = speeds
            print(format_row(row))
            per_second = ", ".join(f"{who} {each:.1f}" for who, each in speeds.items())
            print(f"requests per second: {per_second}; answers differ by {difference:.1e} at most")
            print(f"written to {put_row(device_file('evaluation', name), on, row)}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=4, help="documents per task")
    parser.add_argument(
        "--shots", type=int, nargs="+", default=[0, 5], help="numbers of few-shot examples"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each model")
    parser.add_argument(
        "--their-batch-size", type=int, default=8, help="batch size of lm-eval's model"
    )
    return parser.parse_args()


def make_requests(data: Path, shots: int, documents: int) -> list[Instance]:
    """lm-eval's requests for ``documents`` documents of each of the thirteen tasks."""
    library = TaskLibrary(PAPER_TASKS, data)
    requests: list[Instance] = []
    with contextlib.redirect_stderr(io.StringIO()):
        for name in PAPER_TASKS:
            loaded = library.load(name)
            loaded.set_shots(shots, seed=0)
            loaded.task.build_all_requests(limit=documents, rank=0, world_size=1)
            requests += loaded.task.instances
    return requests


def answer(model: Any, requests: list[Instance]) -> list[tuple[float, bool]]:
    """Answer each request with its log-likelihood and whether greedy decoding would produce it."""
    with contextlib.redirect_stderr(io.StringIO()):
        answers: list[tuple[float, bool]] = model.loglikelihood(list(requests), disable_tqdm=True)
    return answers


def compare(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> float:
    """Check that all answers agree; returns the largest difference.

    Raises:
        AssertionError: if one differs.
    """
    largest = max(abs(one[0] - other[0]) for one, other in zip(ours, theirs, strict=True))
    assert largest < TOLERANCE, f"log-likelihoods differ by {largest}"
    assert [pair[1] for pair in ours] == [pair[1] for pair in theirs], "greedy answers differ"
    return largest


if __name__ == "__main__":
    main()
