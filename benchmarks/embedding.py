"""Windows embedded per second, compared with the method of Chameleon's authors.

    python benchmarks/embedding.py [--windows 64] [--window-length 512] [--repeats 3]

Theirs: transformers' GPT2Model with all hidden states, in fp32 and batches of 64, on windows that
are decoded to text, tokenized again and padded to the longest. Ours: the code of
tools/compute_mixture.py, in fp32 and with --embedding-dtype bfloat16. All embed the same windows of
text from this machine with the same random weights of the 82m shape; the fp32 vectors must agree.
Results are written to benchmarks/results/embedding-DEVICE.json.
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
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VOCAB_SIZE = 50_257
EOD_TOKEN = "<|endoftext|>"
SIZE = "82m"
THEIR_BATCH = 64
TEXT_BYTES, TRAINING_BYTES = 20_000_000, 5_000_000
# Maximum difference between vectors; their entries are about 0.1.
TOLERANCE = 1e-4


def main() -> None:
    """Prepare the inputs, compare the vectors, time both interleaved, and write the results."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    import torch

    from benchmarks.measure import compared, device_file, format_row, interleaved, machine, put_row
    from megatron_chameleon.parallel.layout import device_name, distributed
    from megatron_chameleon.parallel.options import ParallelOptions

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        task = prepare(folder, arguments.windows, arguments.window_length)
        layout = stack.enter_context(distributed(ParallelOptions(), seed=0))
        name = device_name(layout.device)
        on = machine() | {"device": name, "cuda": torch.version.cuda}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads", flush=True)
        our_vectors, their_vectors = ours(task, layout), theirs(task, layout.device)
        agreement = compare(our_vectors(), *their_vectors())
        rounded = ours(task, layout, bf16=True)
        agreement["bf16_largest_relative_difference"] = distance(rounded(), our_vectors())
        contestants = {"ours": our_vectors, "ours, bf16": rounded, "theirs": their_vectors}
        seconds = interleaved(contestants, arguments.repeats)
        row = compared(
            f"{SIZE}, {len(task.windows)} windows of up to {arguments.window_length} tokens",
            seconds,
            tokens=int(task.windows.length.sum()),
            all_seconds=seconds,
            vectors=agreement,
        )
        row["windows_per_second"] = {
            name: len(task.windows) / seconds for name, seconds in row["seconds"].items()
        }
        print(format_row(row))
        speeds = ", ".join(f"{name} {each:.2f}" for name, each in row["windows_per_second"].items())
        print(
            f"windows per second: {speeds}; {agreement['same_tokens']} of the windows have the "
            f"same tokens, whose vectors differ by {agreement['largest_difference']:.1e} at most"
        )
        print(f"written to {put_row(device_file('embedding', name), on, row)}")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=64, help="windows per run")
    parser.add_argument("--window-length", type=int, default=512, help="maximum tokens per window")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Task:
    """The windows and the models of both."""

    source: Any
    """TokenFile: the domain's training documents."""
    windows: Any
    """The sampled windows, in sampling order."""
    model: Path
    """A Hugging Face GPT-2 folder with its tokenizer."""
    checkpoint: Path
    """The same weights as our checkpoint."""


def prepare(folder: Path, num_windows: int, window_length: int) -> Task:
    """Write text, tokenizer, weights and corpus; sample the windows."""
    from benchmarks.real_text import train_tokenizer_on, write_real_text
    from megatron_chameleon.artifacts import Corpus
    from megatron_chameleon.checkpoint.convert import convert_from_huggingface
    from megatron_chameleon.checkpoint.options import FromHuggingFaceOptions
    from megatron_chameleon.corpus.indexed import open_tokens
    from megatron_chameleon.corpus.options import PreprocessOptions, SourceOptions
    from megatron_chameleon.corpus.preprocess import preprocess_data
    from megatron_chameleon.embedding.windows import draw_windows

    text, model, corpus = folder / "text.jsonl", folder / "model", folder / "corpus"
    write_real_text(text, TEXT_BYTES)
    write_model(model)
    train_tokenizer_on(text, TRAINING_BYTES, VOCAB_SIZE, model / "tokenizer.json")
    with contextlib.redirect_stdout(io.StringIO()):
        preprocess_data(
            PreprocessOptions(
                source=SourceOptions(input=((f"text={text}",),)),
                tokenizer_model=model / "tokenizer.json",
                output=corpus,
            )
        )
        convert_from_huggingface(FromHuggingFaceOptions(model=model, output=folder / "checkpoint"))
    source = open_tokens(Corpus.load(corpus), "text", "train")
    windows = draw_windows(source.lengths, window_length, num_windows, 0, "text")
    return Task(source, windows, model, folder / "checkpoint")


def write_model(folder: Path) -> None:
    """Write a GPT-2 of random weights, with the shape of the 82m."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from megatron_chameleon.model.sizes import model_size

    size = model_size(SIZE)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=1024,
        n_layer=size.num_layers,
        n_embd=size.hidden_size,
        n_head=size.num_attention_heads,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def ours(task: Task, layout: Any, *, bf16: bool = False) -> Callable[[], NDArray[np.float32]]:
    """Embed as tools/compute_mixture.py does, sorted by window length."""
    import numpy as np

    from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
    from megatron_chameleon.checkpoint.load import open_reader
    from megatron_chameleon.embedding.embed import embed_windows
    from megatron_chameleon.methods.chameleon.options import ExtractionOptions
    from megatron_chameleon.progress import progress_bar

    record = CheckpointRecord.load(find_checkpoint(task.checkpoint))
    reader = open_reader(record, layout, bf16=bf16)
    sorted_windows = task.windows.longest_first()
    order = np.argsort(-task.windows.length, kind="stable")
    layer = reader.shape.size.num_layers // 2
    batch_size = ExtractionOptions.embedding_batch_size

    def run() -> NDArray[np.float32]:
        with progress_bar(len(sorted_windows), " windows", quiet=True) as bar:
            found = embed_windows(
                reader, task.source, sorted_windows, layer, batch_size, bar, "text"
            )
        vectors = np.empty_like(found)
        vectors[order] = found
        return vectors

    return run


def theirs(task: Task, device: Any) -> Callable[[], tuple[NDArray[np.float32], NDArray[np.bool_]]]:
    """Embed as the authors do; returns the vectors, and which windows kept their tokens."""
    import numpy as np
    import torch
    from transformers import GPT2Model, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(task.model / "tokenizer.json"), pad_token=EOD_TOKEN
    )
    model = GPT2Model.from_pretrained(task.model).eval().to(device)
    windows, source = task.windows, task.source
    firsts = source.starts[windows.document] + windows.start
    tokens = [
        source.tokens[first : first + length].tolist()
        for first, length in zip(firsts, windows.length, strict=True)
    ]

    @torch.no_grad()
    def run() -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
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


def compare(
    ours: NDArray[np.float32], theirs: NDArray[np.float32], same: NDArray[np.bool_]
) -> dict[str, float]:
    """Check that the vectors agree for windows whose text was tokenized to the same tokens again.

    Raises:
        AssertionError: if they differ.
    """
    import numpy as np

    assert same.any(), "no window kept its tokens"
    largest = float(np.abs(ours[same] - theirs[same]).max())
    assert largest < TOLERANCE, f"vectors differ by {largest}"
    return {"same_tokens": int(same.sum()), "largest_difference": largest}


def distance(rounded: NDArray[np.float32], exact: NDArray[np.float32]) -> float:
    """Largest relative error (L2) of a window's vector."""
    import numpy as np

    lengths = np.linalg.norm(exact, axis=1)
    return float((np.linalg.norm(rounded - exact, axis=1) / lengths).max())


if __name__ == "__main__":
    main()
