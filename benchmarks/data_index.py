"""Megatron's blended index and its compiled helper; the closed form up to 15T tokens."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from megatron.core.datasets import helpers
from numpy.typing import NDArray

from benchmarks.measure import compared, format_row, interleaved
from benchmarks.synthetic_domains import IDENTITY
from megatron_chameleon.blend import BlendedTokens, DomainData, MixtureSchedule, TokenData
from megatron_chameleon.blend.megatron_order import BlendedIndex, build_blending_indices
from megatron_chameleon.blend.options import Permutation
from megatron_chameleon.blend.order import BlendOrder
from megatron_chameleon.corpus.indexed import HEADER, MAGIC, TYPE_CODES, VERSION

# Domains -> samples. With 1000 domains the compiled helper takes a microsecond per sample.
BLENDS = {7: 20_000_000, 17: 20_000_000, 1000: 2_000_000}
REPEATS = 9
READ_AT_ONCE = 8192
SEQ_LENGTH = 4096


def measure(
    num_domains: int = 1000,
    num_tokens: int = 15_000_000_000_000,
    document_length: int = 1_000_000,
) -> list[dict[str, Any]]:
    """Time all of them, after compiling the kernels and checking the outputs."""
    permutation: Permutation
    rows = [_megatron(domains, num_samples) for domains, num_samples in BLENDS.items()]
    rows += [_closed_form(domains) for domains in (*BLENDS, 5000)]
    with tempfile.TemporaryDirectory() as folder:
        for permutation in ("epoch", "feistel"):  # to load the kernels
            _first_and_last(_sparse_domains(Path(folder), 3, num_tokens // 1000, 1000), permutation)
        data = _sparse_domains(Path(folder), num_domains, num_tokens, document_length)
        for permutation in ("epoch", "feistel"):
            rows.append(_first_and_last(data, permutation))
            print(rows[-1], flush=True)
    return rows


def _megatron(num_domains: int, num_samples: int) -> dict[str, Any]:
    weights = _weights(num_domains)
    theirs, ours = _touched(num_samples), _touched(num_samples)
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
    row = compared(
        f"Megatron's blended index, {num_domains} domains, {num_samples:,} samples, one thread",
        interleaved(runs, REPEATS),
    )
    print(format_row(row), flush=True)
    return row


def _closed_form(num_domains: int, num_samples: int = 2_000_000) -> dict[str, Any]:
    """Nanoseconds per sample, read in order far into a run, and the maximum deviation."""
    weights = _weights(num_domains)
    blended = BlendOrder(weights.tolist())
    first, deviation = 2**35, 0.0
    counts = blended.counts(first)
    for start in range(first, first + num_samples, READ_AT_ONCE):
        domains, _ = blended.locate(np.arange(start, start + READ_AT_ONCE))
        counts += np.bincount(domains, minlength=num_domains)
        expected = weights * float(start + READ_AT_ONCE)
        deviation = max(deviation, float(np.abs(counts - expected).max()))

    ready, read = [], []
    for _ in range(REPEATS):  # CPU time of one thread, which other processes do not change
        begin = time.process_time()
        BlendOrder(weights.tolist())
        ready.append(time.process_time() - begin)
        begin = time.process_time()
        for start in range(first, first + num_samples, READ_AT_ONCE):
            blended.locate(np.arange(start, start + READ_AT_ONCE))
        read.append(time.process_time() - begin)
    row = {
        "what": f"closed-form order, {num_domains} domains",
        "repeats": REPEATS,
        "seconds_until_ready": float(np.median(ready)),
        "nanoseconds_a_sample": float(np.median(read)) / num_samples * 1e9,
        "largest_deviation_in_samples": deviation,
    }
    print(row, flush=True)
    return row


def _first_and_last(data: TokenData, permutation: Permutation) -> dict[str, Any]:
    """Time from opening all files to the first batch, and to the last one, as when resuming."""
    schedule = MixtureSchedule.fixed(_weights(len(data.domains)).tolist())
    num_samples = sum(data.tokens.values()) // SEQ_LENGTH
    before, seconds = psutil.Process().memory_info().rss, {}
    peak = 0
    for name, start in (("first", 0), ("last", num_samples - 512)):
        begin = time.perf_counter()
        samples = BlendedTokens(data, schedule, num_samples, SEQ_LENGTH, 1234, permutation)
        samples.batch(range(start, start + 512))
        seconds[name] = time.perf_counter() - begin
        peak = max(peak, psutil.Process().memory_info().rss)
    index_bytes = sum(os.path.getsize(f"{domain.prefix}.idx") for domain in data.domains)
    return {
        "what": f"{sum(data.tokens.values()):,} tokens in {len(data.domains)} domains, "
        f"--permutation {permutation}",
        "seconds_until_batch": seconds,
        "memory_per_byte_of_idx": (peak - before) / index_bytes,
    }


def _sparse_domains(
    folder: Path, num_domains: int, num_tokens: int, document_length: int
) -> TokenData:
    """Domains of documents of equal length, with tokens in sparse files."""
    documents = num_tokens // num_domains // document_length
    lengths = np.full(documents, document_length, "<i4")
    pointers = 2 * document_length * np.arange(documents, dtype="<i8")
    header = HEADER.pack(MAGIC, VERSION, TYPE_CODES["uint16"], documents, documents + 1)
    index = header + lengths.tobytes() + pointers.tobytes()
    index += np.arange(documents + 1, dtype="<i8").tobytes()
    domains = []
    for number in range(num_domains):
        prefix = folder / f"d{number}"
        Path(f"{prefix}.idx").write_bytes(index)
        Path(f"{prefix}.bin").touch()
        os.truncate(f"{prefix}.bin", 2 * documents * document_length)
        domains.append(
            DomainData(
                name=prefix.name,
                prefix=prefix,
                first=0,
                stop=documents,
                tokens=documents * document_length,
                order_key=prefix.name,
                vocab_size=IDENTITY.vocab_size,
            )
        )
    return TokenData(str(folder), tuple(domains), IDENTITY, "0" * 64)


def _weights(num_domains: int) -> NDArray[np.float64]:
    return np.random.default_rng(0).dirichlet(np.ones(num_domains))


def _touched(num_samples: int) -> BlendedIndex:
    """Arrays with mapped pages: the first write to a page would dominate the time."""
    return np.full(num_samples, -1, np.int16), np.full(num_samples, -1, np.int64)
