"""Compare our data layer with megatron.core's code and Megatron-LM's preprocessing.

    python benchmarks/data.py [--only index batches build preprocess]

Each row is printed and written, with a description of the machine, to benchmarks/results/data.json,
where it replaces the older row. Use an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
import torch
import torch.distributed as dist
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from numpy.typing import NDArray
from torch.utils.data import default_collate

from benchmarks.measure import compared, format_row, interleaved, machine, put_row
from benchmarks.process_tree import peak_bytes_of, seconds_of
from benchmarks.real_text import read_texts, train_tokenizer_on, write_real_text
from megatron_chameleon.artifacts import SPLITS, Corpus, TokenizerIdentity
from megatron_chameleon.blend import BlendedTokens, MixtureSchedule
from megatron_chameleon.blend.megatron_order import BlendedIndex, build_blending_indices
from megatron_chameleon.blend.options import Permutation
from megatron_chameleon.blend.order import BlendOrder
from megatron_chameleon.corpus.data_path import DataPath
from megatron_chameleon.corpus.domains import Domains, DomainTokens, open_data_path
from megatron_chameleon.corpus.gigatoken import with_gigatoken
from megatron_chameleon.corpus.indexed import HEADER, MAGIC, TYPE_CODES, VERSION, IndexedWriter
from megatron_chameleon.corpus.tokenizer import Tokenizer, load_tokenizer
from tests.unit.blend.inputs import dataset_config

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE, EOD, EOD_TOKEN = 50_257, 50_256, "<|endoftext|>"
IDENTITY = TokenizerIdentity("tokenizers", "tokenizer.json", "0" * 64, VOCAB_SIZE, EOD)

Row = dict[str, Any]


def main() -> None:
    """Measure the selected rows."""
    measures: dict[str, Callable[[], Iterator[Row]]] = {
        "index": measure_index,
        "batches": measure_batches,
        "build": measure_build,
        "preprocess": measure_preprocess,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=measures, default=measures, help="rows to run")
    only = parser.parse_args().only
    on = machine()
    print(", ".join(f"{name} {value}" for name, value in on.items() if name != "packages"))
    for name, measure in measures.items():
        if name in only:
            for row in measure():
                print(format_row(row) if "times_faster" in row else row, flush=True)
                path = put_row("data", on, row)
    print(f"written to {path}")


# Blended index: Megatron's C++ helper, our exact copy of it, and the closed form up to 15T tokens.

# Number of domains -> number of samples. With 1000 domains, fewer samples are timed, since the
# compiled helper takes a microsecond per sample.
BLENDS = {7: 20_000_000, 17: 20_000_000, 1000: 2_000_000}
INDEX_REPEATS = 9
LOCATED_AT_ONCE = 8192


def measure_index() -> Iterator[Row]:
    """Time the three orders, after compiling the kernels and checking the outputs."""
    for num_domains, num_samples in BLENDS.items():
        yield time_megatron_order(num_domains, num_samples)
    for num_domains in (*BLENDS, 5000):
        yield time_closed_form(num_domains)
    with tempfile.TemporaryDirectory() as folder:
        permutations: tuple[Permutation, ...] = ("epoch", "feistel")
        small = sparse_domains(Path(folder), 3, 15 * 10**9, 1000)
        for permutation in permutations:  # compiles the kernels
            time_first_and_last(small, permutation)
        large = sparse_domains(Path(folder), 1000, 15 * 10**12, 1_000_000)
        for permutation in permutations:
            yield time_first_and_last(large, permutation)


def time_megatron_order(num_domains: int, num_samples: int) -> Row:
    """Time Megatron's compiled helper and ours, on one thread."""
    weights = random_weights(num_domains)
    theirs, ours = touched_arrays(num_samples), touched_arrays(num_samples)
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: build_blending_indices(weights, num_samples, ours),
        "theirs": lambda: helpers.build_blending_indices(
            *theirs, weights, num_domains, num_samples, False
        ),
    }
    for run in runs.values():
        run()
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(found, expected)
    what = f"Megatron's blended index, {num_domains} domains, {num_samples:,} samples, one thread"
    return compared(what, interleaved(runs, INDEX_REPEATS))


def time_closed_form(num_domains: int, num_samples: int = 2_000_000) -> Row:
    """Time the order per sample late in a run; find the maximum deviation from the weights."""
    weights = random_weights(num_domains)
    first, deviation = 2**35, 0.0
    starts = range(first, first + num_samples, LOCATED_AT_ONCE)
    blended = BlendOrder(weights.tolist())
    counts = blended.counts(first)
    for start in starts:
        domains, _ = blended.locate(np.arange(start, start + LOCATED_AT_ONCE))
        counts += np.bincount(domains, minlength=num_domains)
        expected = weights * float(start + LOCATED_AT_ONCE)
        deviation = max(deviation, float(np.abs(counts - expected).max()))

    ready, read = [], []
    for _ in range(INDEX_REPEATS):  # CPU time of one thread, which other processes do not change
        begin = time.process_time()
        BlendOrder(weights.tolist())
        ready.append(time.process_time() - begin)
        begin = time.process_time()
        for start in starts:
            blended.locate(np.arange(start, start + LOCATED_AT_ONCE))
        read.append(time.process_time() - begin)
    return {
        "what": f"closed-form order, {num_domains} domains",
        "repeats": INDEX_REPEATS,
        "seconds_until_ready": float(np.median(ready)),
        "nanoseconds_a_sample": float(np.median(read)) / num_samples * 1e9,
        "largest_deviation_in_samples": deviation,
    }


def time_first_and_last(data: Domains, permutation: Permutation) -> Row:
    """Time opening all files and reading the first batch or, as on resuming, the last batch."""
    seq_length, batch_size = 4096, 512
    schedule = MixtureSchedule.fixed(random_weights(len(data.domains)).tolist())
    num_samples = sum(data.tokens.values()) // seq_length
    before, seconds, peak = psutil.Process().memory_info().rss, {}, 0
    for name, start in (("first", 0), ("last", num_samples - batch_size)):
        begin = time.perf_counter()
        samples = BlendedTokens(data, schedule, num_samples, seq_length, 1234, permutation)
        samples.open()
        samples.batch(range(start, start + batch_size))
        seconds[name] = time.perf_counter() - begin
        peak = max(peak, psutil.Process().memory_info().rss)
    index_bytes = sum(os.path.getsize(f"{domain.prefix}.idx") for domain in data.domains)
    return {
        "what": f"{sum(data.tokens.values()):,} tokens in {len(data.domains)} domains, "
        f"--permutation {permutation}",
        "seconds_until_batch": seconds,
        "memory_per_byte_of_idx": (peak - before) / index_bytes,
    }


def sparse_domains(
    folder: Path, num_domains: int, num_tokens: int, document_length: int
) -> Domains:
    """Write domains whose documents have equal length, with the tokens in sparse files."""
    documents = num_tokens // num_domains // document_length
    lengths = np.full(documents, document_length, "<i4")
    pointers = 2 * document_length * np.arange(documents, dtype="<i8")
    header = HEADER.pack(MAGIC, VERSION, TYPE_CODES["uint16"], documents, documents + 1)
    index = header + lengths.tobytes() + pointers.tobytes()
    index += np.arange(documents + 1, dtype="<i8").tobytes()
    domains = {}
    for number in range(num_domains):
        prefix = folder / f"d{number}"
        Path(f"{prefix}.idx").write_bytes(index)
        Path(f"{prefix}.bin").touch()
        os.truncate(f"{prefix}.bin", 2 * documents * document_length)
        domains[prefix.name] = DomainTokens(
            name=prefix.name,
            prefix=prefix,
            first=0,
            stop=documents,
            tokens=documents * document_length,
            order_key=prefix.name,
            vocab_size=IDENTITY.vocab_size,
        )
    return Domains(list(domains), IDENTITY, {"train": domains})


def random_weights(num_domains: int) -> NDArray[np.float64]:
    """Return random weights that depend only on the number of domains."""
    return np.random.default_rng(0).dirichlet(np.ones(num_domains))


def touched_arrays(num_samples: int) -> BlendedIndex:
    """Return arrays whose pages are mapped, since first writes to pages would dominate the time."""
    return np.full(num_samples, -1, np.int16), np.full(num_samples, -1, np.int64)


# Datasets: batches of samples, and the time until the first sample without cached indices.


def measure_batches() -> Iterator[Row]:
    """Time reading a batch in one gather, compared with collating Megatron's items.

    Both run on one thread, with all tokens in the page cache. Their batches must be equal.
    """
    batch_size, batches, repeats = 64, 40, 7
    num_samples = batch_size * batches * (repeats + 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with synthetic_domains(100_000) as (folder, data_path):
        for file in folder.glob("*.bin"):
            file.read_bytes()
        for seq_length in (512, 2048):
            our_dataset = our_samples(data_path, num_samples, seq_length)
            cache = folder / f"cache-{seq_length}"
            their_dataset = megatron_samples(data_path, num_samples, seq_length, cache)
            readers: dict[str, Callable[[range], Any]] = {
                "ours": our_dataset.batch,
                "theirs": lambda ids, samples=their_dataset: default_collate(  # type: ignore[misc]
                    [samples[i] for i in ids]
                ),
            }
            for start in range(0, batch_size * batches, batch_size):  # the first reads also warm up
                found, expected = (r(range(start, start + batch_size)) for r in readers.values())
                assert torch.equal(found["domain"], expected.pop("dataset_id"))
                for name, part in expected.items():
                    assert torch.equal(found[name], part), name

            def repeat(read: Callable[[range], Any], starts: Iterator[int]) -> None:
                """Read the next batches, as training does."""
                for first in itertools.islice(starts, batches):
                    read(range(first, first + batch_size))

            runs = {
                name: partial(repeat, read, itertools.count(batch_size * batches, batch_size))
                for name, read in readers.items()
            }
            row = compared(
                f"batches of {batch_size} at sequence {seq_length}", interleaved(runs, repeats)
            )
            speeds = {name: batch_size * batches / each for name, each in row["seconds"].items()}
            yield row | {"samples_per_second": speeds}
    torch.set_num_threads(threads)


def measure_build() -> Iterator[Row]:
    """Time building a dataset from .bin/.idx files in the page cache, and compare samples.

    Megatron's builder writes its indices to a folder. Our dataset keeps them in memory; it is also
    timed with a cache folder.
    """
    num_documents, num_samples, seq_length = 1_000_000, 20_000_000, 512
    # Short documents: the time to build depends on their number, not on their tokens.
    with synthetic_domains(num_documents, median_length=60) as (folder, data_path):
        cache, own_cache = folder / "theirs", folder / "ours"

        def ours() -> BlendedTokens:
            return our_samples(data_path, num_samples, seq_length)

        def ours_with_cache() -> BlendedTokens:
            shutil.rmtree(own_cache, ignore_errors=True)
            return our_samples(data_path, num_samples, seq_length, own_cache)

        def theirs() -> Any:
            shutil.rmtree(cache, ignore_errors=True)
            return megatron_samples(data_path, num_samples, seq_length, cache)

        our_dataset, their_dataset = ours(), theirs()
        for index in np.random.default_rng(0).integers(0, num_samples, 2000).tolist():
            found, expected = our_dataset[index], their_dataset[index]
            assert int(found["domain"]) == expected["dataset_id"]
            assert bool((found["tokens"] == expected["tokens"]).all())
        runs = {"ours": ours, "ours, written to a cache": ours_with_cache, "theirs": theirs}
        what = f"cold build, 7 domains, {num_documents:,} documents, {num_samples:,} samples"
        yield compared(what, interleaved(runs))


@contextlib.contextmanager
def synthetic_domains(num_documents: int, median_length: int = 400) -> Iterator[tuple[Path, str]]:
    """Create 7 domains of random tokens and a process group; yield the folder and --data-path.

    Lengths are log-normal, approximately as in web text; sizes of domains differ by up to 4 times.
    Megatron's blended dataset requires the process group, which has one process.
    """
    rng, num_domains = np.random.default_rng(0), 7
    sizes = np.linspace(1.0, 4.0, num_domains)
    counts = np.floor(sizes / sizes.sum() * num_documents).astype(int)
    counts[-1] += num_documents - counts.sum()
    words = []
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            weights = np.random.default_rng(1).dirichlet(np.ones(num_domains))
            for number, count in enumerate(counts.tolist()):
                lengths = rng.lognormal(np.log(median_length), 1.0, count)
                lengths = np.clip(lengths, 2, 20_000).astype(np.int32)
                tokens = rng.integers(0, EOD, lengths.sum(), dtype=np.uint16)
                tokens[np.cumsum(lengths) - 1] = EOD
                writer = IndexedWriter(Path(folder) / f"domain{number}", "uint16")
                writer.add_tokens(tokens.tobytes())
                writer.add_lengths(lengths)
                writer.finish()
                words += [str(weights[number]), f"{folder}/domain{number}"]
            yield Path(folder), " ".join(words)
    finally:
        dist.destroy_process_group()


def our_samples(
    data_path: str, num_samples: int, seq_length: int, cache: Path | None = None
) -> BlendedTokens:
    """Build the samples of ``data_path`` as the trainer does."""
    path = DataPath.parse(data_path)
    data = open_data_path(path, "1", IDENTITY)
    schedule = MixtureSchedule.fixed(path.weights or ())
    return BlendedTokens(data, schedule, num_samples, seq_length, seed=1234, cache=cache)


def megatron_samples(data_path: str, num_samples: int, seq_length: int, cache: Path) -> Any:
    """Build the train split of ``data_path`` with Megatron's BlendedMegatronDatasetBuilder."""
    config = dataset_config(
        IDENTITY,
        random_seed=1234,
        sequence_length=seq_length,
        blend=get_blend_from_list(data_path.split()),
        split="1",
        path_to_cache=str(cache),
    )
    sizes = [num_samples, 0, 0]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]


# JSON lines to .bin/.idx: tools/preprocess_data.py compared with Megatron-LM's algorithm.


def measure_preprocess(num_bytes: int = 200_000_000, repeats: int = 5) -> Iterator[Row]:
    """Time both commands in turn, compare the documents they write, and measure their memory.

    The tokenizer is trained on a quarter of the text; a twentieth of the text is also encoded in
    memory.
    """
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        text = write_real_text(work / "text.jsonl", num_bytes)
        tokenizer = work / "tokenizer.json"
        train_tokenizer_on(work / "text.jsonl", num_bytes // 4, VOCAB_SIZE, tokenizer)
        scripts = {
            "ours": [
                *("tools/preprocess_data.py", "--input", f"text={work / 'text.jsonl'}"),
                *("--tokenizer-model", str(tokenizer), "--output", str(work / "corpus")),
                # Nearly all documents are in one split, since Megatron's script has no splits.
                *("--overwrite", "--split", "98,1,1"),
            ],
            "theirs": [
                *("benchmarks/megatron_preprocess.py", str(work / "text.jsonl"), str(tokenizer)),
                *(str(work / "megatron-text"), str(os.cpu_count())),
            ],
        }
        commands = {name: [str(ROOT / path), *more] for name, (path, *more) in scripts.items()}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                os.sync()  # otherwise this run would wait for dirty pages of the previous run
                seconds[name].append(seconds_of(command))
        peaks = {name: peak_bytes_of(command) / 1e6 for name, command in commands.items()}
        yield compared(
            f"JSONL to .bin/.idx, {text.text_bytes / 1e6:.0f} MB of text, {VOCAB_SIZE} BPE",
            seconds,
            peak_mb=peaks,
            all_seconds=seconds,
            documents=text.documents,
            text_bytes=text.text_bytes,
            tokens=compare_documents(work / "corpus", work / "megatron-text"),
            encoding_alone_mb_per_s=encoding_speeds(work, text.text_bytes // 20),
        )


def compare_documents(corpus_folder: Path, their_prefix: Path) -> int:
    """Check that our splits hold their documents in their order; return the number of tokens.

    The texts are all different, so the split of each document is unambiguous.

    Raises:
        AssertionError: naming the first document that is missing.
    """
    corpus = Corpus.load(corpus_folder)
    (name,) = corpus.names
    splits = {split: IndexedDataset(str(corpus.prefix(name, split))) for split in SPLITS}
    position = dict.fromkeys(SPLITS, 0)
    theirs = IndexedDataset(str(their_prefix))
    for number in range(len(theirs)):
        for split, ours in splits.items():
            place = position[split]
            if place < len(ours) and np.array_equal(ours[place], theirs[number]):
                position[split] += 1
                break
        else:
            raise AssertionError(f"document {number} of {their_prefix} is missing in our output")
    assert all(position[split] == len(ours) for split, ours in splits.items())
    return int(theirs.sequence_lengths.sum())


def encoding_speeds(work: Path, num_bytes: int) -> dict[str, float]:
    """Measure both tokenizers' median MB/s on batches of 128 documents in memory, interleaved."""
    texts = list(read_texts(work / "text.jsonl", num_bytes))
    own = load_tokenizer(work / "tokenizer.json", EOD_TOKEN)
    text_bytes = sum(len(text.encode()) for text in texts)
    libraries = {"gigatoken, one core": with_gigatoken(own), "tokenizers, all cores": own}

    def encode(tokenizer: Tokenizer) -> None:
        for start in range(0, len(texts), 128):
            tokenizer.encode_documents(texts[start : start + 128])

    seconds = interleaved({name: partial(encode, made) for name, made in libraries.items()})
    return {name: text_bytes / 1e6 / statistics.median(times) for name, times in seconds.items()}


if __name__ == "__main__":
    main()
