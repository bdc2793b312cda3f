"""Compare our training speed on this device with that of a plain torch model of equal size.

    python benchmarks/train.py [--size 82m ...] [--peak-tflops T] [--seconds 540] [--compiled]
                               [--documents] [--resume FILE]

On a GPU, GPT-2 sizes 82m, 124m, 684m and 1.2b are timed in bf16 at sequence lengths 512 and 1024,
and llama-130m, llama-350m and llama-1b at 1024, each contestant at its fastest micro-batch size;
kernels of attention and loss are timed separately. On a CPU, a few interleaved steps are timed in
fp32 and bf16: 82m at sequence length 512 and llama-130m at 256. Memory is not measured there, and
the plain model runs eagerly; with --compiled, it is timed compiled as well. With --documents, on a
GPU, our models are timed at sequence length 4096 instead, with documents of 1,024 tokens on average
that are not separated, or are separated by each --document-attention. Results are written to
benchmarks/results/train-DEVICE.json after every row; other rows there are kept, with their dates.
The exit status is 75 if rows were skipped for lack of time.

Speeds are those of whole optimizer steps on random tokens. Model FLOPs exclude padding of heads and
vocabulary and count half of causal attention; MFU is their share of the dense bf16 peak. For
comparison: llm-foundry reports 78,581 tokens/s (MFU 39.8%) for 760M parameters and 48,910 tokens/s
(42.0%) for 1.3B, per H100 at sequence length 1024; its MFU counts all of causal attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from megatron.core.tensor_parallel import layers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from benchmarks.measure import (
    device_file,
    interleaved,
    machine,
    measure_rows,
    milliseconds,
    put_row,
)
from benchmarks.plain_models import PlainModel, plain_optimizer, plain_step
from megatron_chameleon.blend.sampler import read_ahead
from megatron_chameleon.model.config import ModelConfig, preset
from megatron_chameleon.model.cross_entropy import chunked_cross_entropy
from megatron_chameleon.model.flops import (
    DENSE_BF16_PEAK,
    model_flops_utilization,
    training_flops,
)
from megatron_chameleon.model.layers import SDPACoreAttention
from megatron_chameleon.parallel.layout import Layout, device_name, distributed
from megatron_chameleon.parallel.options import TrainingParallelOptions
from megatron_chameleon.training.options import DocumentAttention
from tests.random_training import RandomTraining, random_batches

VOCAB_SIZE = 50_257  # the vocabulary size of GPT-2's tokenizer
GPU_LENGTHS = {
    **dict.fromkeys(("684m", "1.2b", "124m", "82m"), (1024, 512)),
    **dict.fromkeys(("llama-1b", "llama-350m", "llama-130m"), (1024,)),
}
"""Sequence lengths by model size."""
CPU_LENGTHS = {"82m": 512, "llama-130m": 256}
DOCUMENT_SIZES, DOCUMENTS_LENGTH, DOCUMENT_LENGTH = ("124m", "llama-1b"), 4096, 1024
LEAST_REPEATS = 5
CPU_MICRO_BATCH = 2
MICRO_BATCH_TOKENS = (8_192, 16_384, 32_768, 65_536)
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
PADDED_HEAD_DIMS = {"684m": (None, 56, 64), "1.2b": (None,), "124m": (None,)}
KERNEL_TOKENS = 16_384

Row = dict[str, Any]
Rows = dict[str, Callable[[], Row]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model size, and the precision, sequence length and tokens of the steps to time."""

    size: str
    seq_length: int
    bf16: bool
    tokens_per_step: int

    @property
    def config(self) -> ModelConfig:
        """The model."""
        return preset(self.size, VOCAB_SIZE, self.seq_length)

    def num_microbatches(self, micro_batch_size: int) -> int:
        """Micro-batches per step."""
        return max(1, self.tokens_per_step // (micro_batch_size * self.seq_length))

    def __str__(self) -> str:
        return f"{self.size}, sequence {self.seq_length}, {'bf16' if self.bf16 else 'fp32'}"


class Contestant(Protocol):
    """A model that can be trained with any micro-batch size."""

    def run(self, micro_batch_size: int, steps: int, each: Callable[[], object]) -> None:
        """Train for ``steps`` steps, and call ``each`` after each of them."""
        ...


class Ours:
    """Training as tools/pretrain_gpt.py does it, without logs and checkpoints."""

    def __init__(
        self,
        case: Case,
        layout: Layout,
        *,
        compiled: bool = False,
        head_dim_multiple: int = 0,
        documents: DocumentAttention | None = None,
    ) -> None:
        self._case, self._documents = case, documents
        backend = "inductor" if compiled else None
        self._training = RandomTraining(
            case.config,
            layout,
            bf16=case.bf16,
            compiled=backend,
            gradient_accumulation_fusion=layers._grad_accum_fusion_available and backend is None,
        )
        for module in self._training.chunks[0].modules():
            if isinstance(module, SDPACoreAttention) and head_dim_multiple:
                module.head_dim_multiple = head_dim_multiple

    def run(self, micro_batch_size: int, steps: int, each: Callable[[], object]) -> None:
        """See :class:`Contestant`."""
        case, training = self._case, self._training
        passes = training.passes(
            case.num_microbatches(micro_batch_size),
            micro_batch_size,
            document_attention=self._documents or "dense",
        )
        document_length = DOCUMENT_LENGTH if self._documents else 0
        random = random_batches(
            VOCAB_SIZE, micro_batch_size, case.seq_length, document_length=document_length
        )
        with read_ahead(random, training.layout.device) as batches:
            for _ in range(steps):
                training.step(lambda: passes.forward_backward(batches))
                each()


class Plain:
    """Training of the plain model on the same batches."""

    def __init__(self, case: Case, layout: Layout, *, compiled: bool = False) -> None:
        self._case, self._device = case, layout.device
        torch.manual_seed(0)
        self._model = PlainModel(case.config).to(layout.device)
        self._optimizer = plain_optimizer(self._model)
        # Set the stance, since the simulated CUDA device of the tests disables compiling.
        self._stance: Any = "default" if compiled else "force_eager"
        if compiled:
            self._model.compile_regions()

    def run(self, micro_batch_size: int, steps: int, each: Callable[[], object]) -> None:
        """See :class:`Contestant`."""
        case = self._case
        random = random_batches(VOCAB_SIZE, micro_batch_size, case.seq_length)
        with read_ahead(random, self._device) as batches:
            for _ in range(steps):
                step = itertools.islice(batches, case.num_microbatches(micro_batch_size))
                with torch.compiler.set_stance(self._stance):
                    plain_step(self._model, self._optimizer, list(step), bf16=case.bf16)
                each()


def main() -> int:
    """Measure on one rank and write the results."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore")
    on_gpu = torch.cuda.is_available()
    if arguments.compiled and on_gpu:
        sys.exit("--compiled is for CPUs: on a GPU the plain model is always compiled")
    if arguments.documents and not on_gpu:
        sys.exit("--documents is for GPUs: a CPU always uses the dense mask")
    with distributed(TrainingParallelOptions(), seed=0) as layout:
        name = device_name(layout.device)
        # The version is recorded because attention may run in a kernel of cuDNN.
        cudnn = torch.backends.cudnn.version() if on_gpu else None
        on = machine() | {"device": name, "cuda": torch.version.cuda, "cudnn": cudnn}
        print(f"{name}, torch {torch.__version__}; {torch.get_num_threads()} threads")
        tflops = arguments.peak_tflops
        arguments.peak = tflops * 1e12 if tflops else DENSE_BF16_PEAK.get(name)
        make_rows = gpu_rows if on_gpu else cpu_rows
        if arguments.documents:
            make_rows = document_rows
        rows = make_rows(layout, arguments)
        save = partial(put_row, device_file("train", name), on)
        return measure_rows(rows, save, arguments.seconds, arguments.resume)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size",
        nargs="+",
        choices=GPU_LENGTHS if torch.cuda.is_available() else CPU_LENGTHS,
        help="model sizes to measure",
    )
    parser.add_argument("--peak-tflops", type=float, help="peak bf16 TFLOP/s of an unknown device")
    parser.add_argument("--seconds", type=float, default=540, help="time limit of all rows")
    parser.add_argument("--resume", type=Path, help="file of rows to skip; measured rows are added")
    parser.add_argument(
        "--compiled", action="store_true", help="on a CPU, also time the compiled plain model"
    )
    parser.add_argument(
        "--documents", action="store_true", help="on a GPU, time attention within documents"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed steps, 5 or more")
    arguments = parser.parse_args()
    if arguments.repeats < LEAST_REPEATS:
        parser.error(f"--repeats {arguments.repeats}: must be >= {LEAST_REPEATS}")
    if arguments.documents and not {*DOCUMENT_SIZES}.issuperset(arguments.size or ()):
        parser.error(f"--size: --documents measures only {' and '.join(DOCUMENT_SIZES)}")
    return arguments


def cpu_rows(layout: Layout, arguments: argparse.Namespace) -> Rows:
    """Measure the CPU's rows: our model and the plain one (eager by default), interleaved."""
    print("CPU: micro-batch 2, one micro-batch per step, interleaved")

    def row(case: Case) -> Row:
        contestants: dict[str, Contestant] = {
            "ours": Ours(case, layout),
            "plain": Plain(case, layout),
        }
        if arguments.compiled:
            contestants["plain compiled"] = Plain(case, layout, compiled=True)
        return compared(case, time_interleaved(contestants, case, arguments))

    cases = [
        Case(size, length, bf16, CPU_MICRO_BATCH * length)
        for size, length in CPU_LENGTHS.items()
        if size in (arguments.size or CPU_LENGTHS)
        for bf16 in (False, True)
    ]
    return {str(case): partial(row, case) for case in cases}


def time_interleaved(
    contestants: Mapping[str, Contestant], case: Case, arguments: argparse.Namespace
) -> dict[str, Row]:
    """Measure all contestants, interleaved, so that other load affects all of them."""
    for contestant in contestants.values():
        contestant.run(CPU_MICRO_BATCH, 2, lambda: None)
    one_step = {
        name: partial(contestant.run, CPU_MICRO_BATCH, 1, lambda: None)
        for name, contestant in contestants.items()
    }
    seconds = interleaved(one_step, arguments.repeats)
    return {name: figures(case, CPU_MICRO_BATCH, s, arguments.peak) for name, s in seconds.items()}


def gpu_rows(layout: Layout, arguments: argparse.Namespace) -> Rows:
    """Measure kernels, and every size and sequence length at the best micro-batch sizes."""

    def row(case: Case) -> Row:
        contestants: dict[str, Callable[[], Contestant]] = {
            "ours": lambda: Ours(case, layout),
            "ours compiled": lambda: Ours(case, layout, compiled=True),
            "plain compiled": lambda: Plain(case, layout, compiled=True),
        }
        if case.config.kv_channels % 64 and case.seq_length == 1024:
            contestants["ours compiled, heads padded to 64"] = lambda: Ours(
                case, layout, compiled=True, head_dim_multiple=64
            )
        found = {name: time_at_best(make, case, arguments) for name, make in contestants.items()}
        return compared(case, found)

    sizes = arguments.size or GPU_LENGTHS
    cases = [
        Case(size, length, True, 65_536)
        for length in (1024, 512)
        for size, lengths in GPU_LENGTHS.items()
        if size in sizes and length in lengths
    ]
    return kernel_rows() | {str(case): partial(row, case) for case in cases}


def document_rows(layout: Layout, arguments: argparse.Namespace) -> Rows:
    """Measure our training with packed documents, separated or not.

    Model FLOPs and MFU are those of causal attention over whole sequences.
    """

    def row(case: Case) -> Row:
        what, found = f"{case}, documents", {}
        for compiled in (False, True):
            for documents in (None, "dense", "flex"):
                name = f"ours{compiled * ' compiled'}, {documents or 'not separated'}"
                make = partial(Ours, case, layout, compiled=compiled, documents=documents)
                found[name] = time_at_best(make, case, arguments)
                print(f"{what} | {name:34} | {format_figures(found[name])}", flush=True)
        return {"what": what, "contestants": found}

    cases = [
        Case(size, DOCUMENTS_LENGTH, True, 65_536)
        for size in DOCUMENT_SIZES
        if size in (arguments.size or DOCUMENT_SIZES)
    ]
    return {f"{case}, documents": partial(row, case) for case in cases}


def time_at_best(
    make: Callable[[], Contestant], case: Case, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one contestant at its fastest micro-batch size, and the speed of each size.

    Micro-batch sizes increase until a size does not fit or is slower than the previous size.
    """
    torch.compiler.reset()  # a function is compiled for 8 shapes at most
    contestant = make()
    speeds: dict[int, float] = {}
    try:
        for size in (max(1, tokens // case.seq_length) for tokens in MICRO_BATCH_TOKENS):
            try:
                seconds = min(step_seconds(contestant, size, warm_up=1, repeats=2))
            except torch.OutOfMemoryError:
                free_memory()
                break
            speeds[size] = case.num_microbatches(size) * size * case.seq_length / seconds
            if speeds[size] < max(speeds.values()):
                break
        if not speeds:
            return {"out_of_memory": True}
        best = max(speeds, key=speeds.__getitem__)
        torch.cuda.reset_peak_memory_stats()
        times = step_seconds(contestant, best, 2, arguments.repeats)
        return figures(case, best, times, arguments.peak) | {
            "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9,
            "tokens_per_second_by_micro_batch": speeds,
        }
    finally:
        del contestant
        free_memory()


def step_seconds(
    contestant: Contestant, micro_batch_size: int, warm_up: int, repeats: int
) -> list[float]:
    """Seconds of each of ``repeats`` steps after ``warm_up`` steps, with synchronization."""
    marks: list[float] = []

    def mark() -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    contestant.run(micro_batch_size, warm_up + repeats, mark)
    return [end - begin for begin, end in itertools.pairwise(marks[warm_up - 1 :])]


def free_memory() -> None:
    """Free the memory of the last contestant, also after it ran out of memory."""
    gc.collect()
    torch.cuda.empty_cache()


def figures(case: Case, micro_batch_size: int, seconds: list[float], peak: float | None) -> Row:
    """Return the speed and MFU at the median step time; MFU is null if the peak is unknown."""
    tokens = case.num_microbatches(micro_batch_size) * micro_batch_size * case.seq_length
    speed = tokens / statistics.median(seconds)
    per_token = training_flops(case.config, 1, case.seq_length)
    return {
        "micro_batch_size": micro_batch_size,
        "tokens_per_step": tokens,
        "seconds": seconds,
        "tokens_per_second": speed,
        "model_tflops": per_token * speed / 1e12,
        "mfu": model_flops_utilization(per_token, speed, peak),
    }


def compared(case: Case, found: dict[str, Row]) -> Row:
    """Print and return a row; its ratio compares our fastest to the fastest plain model."""
    best = {"ours": 0.0, "plain": 0.0}
    for name, f in found.items():
        side = name.split()[0]
        best[side] = max(best[side], f.get("tokens_per_second", 0.0))
        print(f"{case} | {name:34} | {format_figures(f)}", flush=True)
    ratio = best["ours"] / best["plain"] if best["plain"] else None
    print(f"{case} | ours to plain: {ratio and round(ratio, 3)}", flush=True)
    return {"what": str(case), "ours_to_plain": ratio, "contestants": found}


def format_figures(figures: Row) -> str:
    """A contestant's figures on one line."""
    if "out_of_memory" in figures:
        return "out of memory"
    mfu, memory = figures["mfu"], figures.get("peak_memory_gb")
    return (
        f"micro-batch {figures['micro_batch_size']}, {figures['tokens_per_second']:,.0f} tokens/s, "
        f"{figures['model_tflops']:.2f} model TFLOP/s"
        + (f", MFU {mfu:.1%}" if mfu is not None else "")
        + (f", {memory:.1f} GB at most" if memory is not None else "")
    )


# Kernels of a training step on a GPU, in milliseconds, forward and backward together.


def kernel_rows() -> Rows:
    """Measure rows of attention, by kernel and head padding, and a row of the loss."""

    def row(what: str, measure: Callable[[], dict[str, float | str]]) -> Row:
        times = measure()
        print(what, times, flush=True)
        return {"what": what, "milliseconds": times}

    measured: dict[str, Callable[[], dict[str, float | str]]] = {
        f"attention of {name}": partial(time_attention, name, widths)
        for name, widths in PADDED_HEAD_DIMS.items()
    }
    measured[f"loss of {KERNEL_TOKENS} tokens, bf16 logits"] = time_loss
    return {what: partial(row, what, measure) for what, measure in measured.items()}


def time_attention(size_name: str, widths: tuple[int | None, ...]) -> dict[str, float | str]:
    """Time a model size's causal attention by each kernel, with heads padded to each width."""
    size = preset(size_name, VOCAB_SIZE, 1024)
    shape = (KERNEL_TOKENS // 1024, size.num_attention_heads, 1024, size.kv_channels)
    q, k, v = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    found: dict[str, float | str] = {}
    for width in widths:
        padding = (width or size.kv_channels) - size.kv_channels

        def attend(padding: int = padding) -> None:
            query, key, value = (pad(x, (0, padding)) if padding else x for x in (q, k, v))
            context = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=size.kv_channels**-0.5
            )
            context[..., : size.kv_channels].sum().backward()

        suffix = f"width {width or 'as it is'}"
        found[f"as torch chooses, {suffix}"] = milliseconds(attend)
        for kernel in KERNELS:
            try:
                with sdpa_kernel(kernel):
                    found[f"{kernel.name}, {suffix}"] = milliseconds(attend)
            except RuntimeError as error:  # this kernel does not support the head size
                found[f"{kernel.name}, {suffix}"] = str(error).splitlines()[0]
    return found


def time_loss() -> dict[str, float | str]:
    """Time our loss, torch's on a float32 copy, and torch's compiled, on full-width logits."""
    logits = torch.randn(KERNEL_TOKENS, 50_304, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(VOCAB_SIZE, (KERNEL_TOKENS,), device="cuda")

    def torchs(x: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x.float(), labels)

    losses: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "ours": lambda x: chunked_cross_entropy(x, labels, VOCAB_SIZE).mean(),
        "torch": torchs,
        "torch compiled": torch.compile(torchs, dynamic=False),
    }
    found: dict[str, float | str] = {}
    for name, loss in losses.items():

        def both_ways(loss: Callable[[torch.Tensor], torch.Tensor] = loss) -> None:
            loss(logits.requires_grad_() * 1).backward()

        found[name] = milliseconds(both_ways)
        logits.grad = None
    copy = milliseconds(lambda: logits.detach() * 1)
    found["of each: the copy that the backward pass may overwrite"] = copy
    return found


if __name__ == "__main__":
    sys.exit(main())
