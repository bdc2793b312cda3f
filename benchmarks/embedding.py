"""Measure windows embedded per second by our code and by the method of Chameleon's authors.

    python benchmarks/embedding.py [--windows 64] [--window-length 512] [--repeats 3]

"theirs" is the authors' method: transformers' GPT2Model with all hidden states, in fp32 and batches
of 64, on windows that are decoded to text, tokenized again and padded to the longest. "ours" is the
code of tools/compute_mixture.py, in fp32 and with --embedding-dtype bfloat16. Both embed the same
windows of text from this machine with the same random weights of the 82m shape; the fp32 vectors
must agree. Results are written to benchmarks/results/embedding-DEVICE.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GPT2Model, PreTrainedTokenizerFast

from benchmarks.measure import compared, device_file, format_row, interleaved, machine, put_row
from benchmarks.real_text import read_texts, write_real_text
from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord
from megatron_chameleon.checkpoint.open_model import CheckpointModel
from megatron_chameleon.corpus.domains import open_domains
from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
from megatron_chameleon.corpus.preprocess import preprocess_data
from megatron_chameleon.corpus.windows import draw_windows
from megatron_chameleon.embedding.embed import embed_windows
from megatron_chameleon.methods.chameleon import ExtractionOptions
from megatron_chameleon.model.config import preset
from megatron_chameleon.model.readout import check_layer
from megatron_chameleon.parallel.layout import Layout, device_name, distributed
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.progress import progress_bar
from tests.text_checkpoint import EOD_TOKEN, TextCheckpoint, write_text_checkpoint

SIZE = "82m"
THEIR_BATCH = 64
TEXT_BYTES = 20_000_000
# Maximum difference between vectors; their entries are about 0.1.
TOLERANCE = 1e-4

Vectors = NDArray[np.float32]


def main() -> None:
    """Prepare the inputs, compare the vectors, time both interleaved, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=64, help="windows per run")
    parser.add_argument("--window-length", type=int, default=512, help="tokens per window")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each method")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        task = prepare(folder, arguments.windows, arguments.window_length)
        layout = stack.enter_context(distributed(ParallelOptions(), seed=0))
        name = device_name(layout.device)
        on = machine() | {"device": name, "cuda": torch.version.cuda}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads", flush=True)
        our_vectors, their_vectors = ours(task, layout), theirs(task, layout.device)
        rounded_vectors = ours(task, layout, bf16=True)
        exact, (others, same) = our_vectors(), their_vectors()
        assert same.any(), "no window has the same tokens in both methods"
        difference = float(np.abs(exact[same] - others[same]).max())
        assert difference < TOLERANCE, f"vectors differ by {difference}"
        errors = np.linalg.norm(rounded_vectors() - exact, axis=1) / np.linalg.norm(exact, axis=1)
        contestants = {"ours": our_vectors, "ours, bf16": rounded_vectors, "theirs": their_vectors}
        seconds = interleaved(contestants, arguments.repeats)
        row = compared(
            f"{SIZE}, {len(task.windows)} windows of up to {arguments.window_length} tokens",
            seconds,
            tokens=int(task.windows.length.sum()),
            all_seconds=seconds,
            vectors={
                "same_tokens": int(same.sum()),
                "largest_difference": difference,
                "bf16_largest_relative_difference": float(errors.max()),
            },
        )
        speeds = {name: len(task.windows) / each for name, each in row["seconds"].items()}
        print(format_row(row))
        per_second = ", ".join(f"{name} {each:.2f}" for name, each in speeds.items())
        print(
            f"windows per second: {per_second}; {same.sum()} of the windows have the same tokens, "
            f"whose vectors differ by {difference:.1e} at most"
        )
        row["windows_per_second"] = speeds
        print(f"written to {put_row(device_file('embedding', name), on, row)}")


@dataclasses.dataclass(frozen=True)
class Task:
    """Windows of training documents in sampling order, and the model that embeds them."""

    source: Any
    windows: Any
    model: TextCheckpoint


def prepare(folder: Path, num_windows: int, window_length: int) -> Task:
    """Write text, tokenizer, weights and corpus; sample the windows."""
    text, corpus = folder / "text.jsonl", folder / "corpus"
    write_real_text(text, TEXT_BYTES)
    with contextlib.redirect_stdout(io.StringIO()):
        model = write_model(folder, text)
        preprocess_data(
            PreprocessOptions(
                source=SourceOptions(input=((f"text={text}",),)),
                tokenizer_model=model.tokenizer,
                output=corpus,
            )
        )
    source = open_domains(Corpus.load(corpus)).open("text", "train")
    windows = draw_windows(source.lengths, window_length, num_windows, 0, "text")
    return Task(source, windows, model)


def write_model(folder: Path, text: Path) -> TextCheckpoint:
    """Write random weights of the 82m shape, and a tokenizer trained on ``text``."""
    size = preset(SIZE, vocab_size=50_257, max_sequence_length=1024)
    return write_text_checkpoint(
        folder,
        read_texts(text, TEXT_BYTES // 4),
        vocab_size=size.vocab_size,
        n_positions=size.max_sequence_length,
        n_layer=size.num_layers,
        n_embd=size.hidden_size,
        n_head=size.num_attention_heads,
    )


def ours(task: Task, layout: Layout, *, bf16: bool = False) -> Callable[[], Vectors]:
    """Embed as tools/compute_mixture.py does, sorted by window length."""
    reader = CheckpointModel(CheckpointRecord.load(task.model.checkpoint)).reader(layout, bf16=bf16)
    windows = task.windows.longest_first()
    order = np.argsort(-task.windows.length, kind="stable")
    layer = check_layer(reader.config.num_layers, None)
    batch = ExtractionOptions.embedding_batch_size

    def run() -> Vectors:
        with progress_bar(len(windows), " windows", quiet=True) as bar:
            found = embed_windows(reader, task.source, windows, layer, batch, bar, "text")
        vectors = np.empty_like(found)
        vectors[order] = found
        return vectors

    return run


def theirs(task: Task, device: torch.device) -> Callable[[], tuple[Vectors, NDArray[np.bool_]]]:
    """Embed as Chameleon's authors do; return vectors, and whether each window kept its tokens."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(task.model.tokenizer), pad_token=EOD_TOKEN
    )
    model = GPT2Model.from_pretrained(task.model.exported).eval().to(device)
    windows, source = task.windows, task.source
    firsts = source.starts[windows.document] + windows.start
    tokens = [
        source.tokens[first : first + length].tolist()
        for first, length in zip(firsts, windows.length, strict=True)
    ]

    @torch.no_grad()
    def run() -> tuple[Vectors, NDArray[np.bool_]]:
        vectors, same = [], []
        for first in range(0, len(tokens), THEIR_BATCH):
            rows = tokens[first : first + THEIR_BATCH]
            batch = tokenizer(
                tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False),
                padding=True,
                truncation=True,
                max_length=max(map(len, rows)),
                return_tensors="pt",
            ).to(device)
            hidden = model(**batch, output_hidden_states=True).hidden_states
            mask = batch["attention_mask"][:, :, None]
            means = (hidden[len(hidden) // 2] * mask).sum(1) / mask.sum(1)
            vectors.append(means.cpu().numpy())
            for row, ids, kept in zip(rows, batch["input_ids"], mask[:, :, 0], strict=True):
                same.append(ids[kept.bool()].tolist() == row)
        return np.concatenate(vectors), np.array(same)

    return run


if __name__ == "__main__":
    main()
