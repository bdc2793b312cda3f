"""JSON lines to .bin/.idx: tools/preprocess_data.py compared with Megatron-LM's algorithm.

Both run as commands on the same file, interleaved, and the tokens of all documents are compared.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import compared, format_row, interleaved
from benchmarks.process_tree import peak_bytes_of, seconds_of
from benchmarks.real_text import RealText, read_texts, train_tokenizer_on, write_real_text
from megatron_chameleon.artifacts import SPLITS, Corpus
from megatron_chameleon.corpus.gigatoken import with_gigatoken
from megatron_chameleon.corpus.indexed import HEADER, TYPE_CODES
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 50_257
EOD_TOKEN = "<|endoftext|>"
DOCUMENTS_AT_ONCE = 128
# Nearly all documents in one split; Megatron's script has no splits.
SPLIT = "98,1,1"


def measure(
    num_bytes: int = 200_000_000,
    training_bytes: int = 50_000_000,
    repeats: int = 5,
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """Time both commands, compare their output, and measure the memory of all their processes.

    Args:
        num_bytes: bytes of text.
        training_bytes: bytes of it that the tokenizer is trained on.
        repeats: timed runs of each, interleaved; a further run of each measures its memory.
        folder: working folder, whose text and tokenizer are reused if present.
    """
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary) if folder is None else folder
        text = _prepare(work, num_bytes, training_bytes)
        commands = {"ours": _our_command, "theirs": _their_command}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                given = command(work)
                os.sync()  # or this run waits for the other's dirty pages
                seconds[name].append(seconds_of(given))
        peaks = {name: peak_bytes_of(command(work)) for name, command in commands.items()}
        tokens = compare(work / "corpus", work / "megatron-text")
        encoding = encoding_alone(work, text.text_bytes // 20)
    row = compared(
        f"JSONL to .bin/.idx, {text.text_bytes / 1e6:.0f} MB of text, {VOCAB_SIZE} BPE",
        seconds,
        peak_mb={name: peak / 1e6 for name, peak in peaks.items()},
        all_seconds=seconds,
        documents=text.documents,
        text_bytes=text.text_bytes,
        tokens=tokens,
        encoding_alone_mb_per_s=encoding,
    )
    print(format_row(row))
    print(f"  {row['text_bytes'] / 1e6 / row['seconds']['ours']:.0f} MB/s; " + _memory_of(row))
    speeds = ", ".join(f"{name} {speed:.1f}" for name, speed in encoding.items())
    print(f"  encoding a twentieth of it and nothing else, MB/s: {speeds}")
    return [row]


def compare(corpus_folder: Path, their_prefix: Path) -> int:
    """Check that each of their documents is the next one in one of our splits; return their tokens.

    The texts are all different, so that this says where each went and that none is left over.

    Raises:
        AssertionError: naming the first document that does not.
    """
    corpus = Corpus.load(corpus_folder)
    (name,) = corpus.names
    splits = {split: _documents(corpus.prefix(name, split)) for split in SPLITS}
    next_ones = dict.fromkeys(SPLITS, 0)
    theirs = _documents(their_prefix)
    for number, document in enumerate(theirs):
        for split, ours in splits.items():
            place = next_ones[split]
            if place < len(ours) and np.array_equal(ours[place], document):
                next_ones[split] += 1
                break
        else:
            raise AssertionError(f"document {number} of {their_prefix} is not among ours")
    assert all(next_ones[split] == len(ours) for split, ours in splits.items())
    return sum(map(len, theirs))


def encoding_alone(work: Path, num_bytes: int) -> dict[str, float]:
    """Median MB/s of tokenizing batches of documents in memory, interleaved."""
    texts = list(read_texts(work / "text.jsonl", num_bytes))
    own = load_tokenizer(work / "tokenizer.json", EOD_TOKEN)
    text_bytes = sum(len(text.encode()) for text in texts)
    libraries = {"gigatoken, one core": with_gigatoken(own), "tokenizers, all cores": own}

    def encode(tokenizer: Tokenizer) -> None:
        for start in range(0, len(texts), DOCUMENTS_AT_ONCE):
            tokenizer.encode_documents(texts[start : start + DOCUMENTS_AT_ONCE])

    seconds = interleaved({name: partial(encode, made) for name, made in libraries.items()})
    return {name: text_bytes / 1e6 / statistics.median(times) for name, times in seconds.items()}


def _prepare(work: Path, num_bytes: int, training_bytes: int) -> RealText:
    text_file, tokenizer_file = work / "text.jsonl", work / "tokenizer.json"
    if text_file.exists() and tokenizer_file.exists():
        texts = list(read_texts(text_file))
        return RealText(len(texts), sum(len(text.encode()) for text in texts))
    text = write_real_text(text_file, num_bytes)
    if text.text_bytes < num_bytes:
        print(f"this machine has {text.text_bytes / 1e6:.0f} MB of text, not {num_bytes / 1e6:.0f}")
    train_tokenizer_on(text_file, training_bytes, VOCAB_SIZE, tokenizer_file)
    return text


def _our_command(work: Path) -> list[str]:
    shutil.rmtree(work / "corpus", ignore_errors=True)
    return [
        str(ROOT / "tools/preprocess_data.py"),
        *("--input", f"text={work / 'text.jsonl'}"),
        *("--tokenizer-model", str(work / "tokenizer.json")),
        *("--output", str(work / "corpus")),
        *("--split", SPLIT),
    ]


def _their_command(work: Path) -> list[str]:
    return [
        str(ROOT / "benchmarks/megatron_preprocess.py"),
        str(work / "text.jsonl"),
        str(work / "tokenizer.json"),
        str(work / "megatron-text"),
        str(os.cpu_count()),
    ]


def _memory_of(row: dict[str, Any]) -> str:
    ours, theirs = row["peak_mb"]["ours"], row["peak_mb"]["theirs"]
    return f"peak of all processes {ours:.0f} MB, theirs {theirs:.0f}"


def _documents(prefix: Path) -> list[NDArray[np.uint16]]:
    """The documents of a .bin/.idx pair of uint16 tokens with one sequence per document."""
    index = prefix.with_name(prefix.name + ".idx").read_bytes()
    _magic, _version, code, sequences, _boundaries = HEADER.unpack_from(index)
    assert code == TYPE_CODES["uint16"]
    lengths = np.frombuffer(index, "<i4", sequences, HEADER.size)
    tokens = np.fromfile(prefix.with_name(prefix.name + ".bin"), "<u2")
    assert lengths.sum() == tokens.size
    return np.split(tokens, np.cumsum(lengths)[:-1])
