"""Run sections: small runs that the ranks execute one after another in the same processes.

A section with fewer ranks runs on the first processes, while the others proceed to the next section
that needs them. Each section sets up and destroys its own process groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.artifacts.training_run import METRICS_NAME
from megatron_chameleon.console import open_output
from megatron_chameleon.corpus.indexed import map_file
from megatron_chameleon.methods.online.options import hook_class
from megatron_chameleon.model.memory import TrainingSetup
from megatron_chameleon.parallel.layout import distributed
from megatron_chameleon.training.reload import ReloadedMixture
from megatron_chameleon.training.trainer import Trainer, pretrain
from tests.communication import CountedCollectives
from tests.distributed import cases, methods, readings
from tests.distributed.cases import Again, Case, Places
from tests.families import FAMILIES
from tests.full_disk import largest_file_size
from tests.peak_memory import peak_of_training
from tests.recorded_batches import recorded_batches

SECONDS_TO_WAIT_FOR_OTHERS = 1200.0
SMALLER_THAN_WEIGHTS = 50_000
"""Maximum file size in bytes on the full disk."""


@dataclasses.dataclass(frozen=True)
class Section:
    """One test run: its name, its number of ranks, and the function that each rank calls."""

    name: str
    ranks: int
    work: Callable[[Places], None]


def all_sections() -> Iterator[Section]:
    """Yield all sections; each comes after the sections whose results it reads."""
    for name, case in cases.UNINTERRUPTED.items():
        yield Section(name, case.ranks, run(train, name, case))
    dry = dataclasses.replace(cases.DP2_SHARDED, dry_first_step="on")
    yield Section(cases.DRY_RUN, dry.ranks, run(train, cases.DRY_RUN, dry))
    for name, case in cases.BAD.items():
        yield Section(name, case.ranks, run(train_bad, name))
    trainings: list[tuple[Callable[..., None], dict[str, Case], Again]] = [
        (train_online, cases.ONLINE, cases.ONLINE_AGAIN),
        (train_reloaded, cases.RELOADED, {}),
        (methods.doremi, cases.DOREMI, cases.DOREMI_AGAIN),
        (methods.doge, cases.DOGE, cases.DOGE_AGAIN),
        (train, {}, cases.RESUMED),
    ]
    for work, whole, resumed in trainings:
        for name, case in whole.items():
            yield Section(name, case.ranks, run(work, name, case))
        for name, (origin, case) in resumed.items():
            yield Section(name, case.ranks, run(work, name, case, cut=origin))
    yield Section(
        cases.NO_GAIN, cases.DP2.ranks, run(methods.doge_without_gain, cases.NO_GAIN, cases.DP2)
    )
    for name, saving in cases.SAVING.items():
        yield Section(name, cases.RUNS[saving.origin].ranks, run(train_saving, name))
    for name, case in cases.PEAKS.items():
        yield Section(name, case.ranks, run(measure_peak, name))
    yield Section("reference", 1, run(readings.write_reference))
    for name, reading in cases.READINGS.items():
        yield Section(f"read-{name}", reading.case.ranks, run(readings.read, name))
    for name, case in cases.DISCOVERING.items():
        yield Section(name, case.ranks, run(methods.discover, name))
    for name, case in cases.EMBEDDING.items():
        yield Section(name, case.ranks, run(methods.embed_with_bert, name))
    yield Section("convert-one", 1, run(readings.convert_one))
    for name, case in {cases.TUNED_FROM_CHECKPOINT: cases.ONE, **cases.TUNED}.items():
        yield Section(name, case.ranks, run(train_tuned, name))
    for name, case in cases.REWRITTEN.items():
        yield Section(f"rewrite-{name}", case.ranks, run(readings.rewrite, name))
        yield Section(f"convert-{name}", 1, run(readings.convert_rewritten, name))
    yield Section("read-converted", 1, run(readings.read_converted))
    yield Section("write-megatron", 2, run(readings.write_megatron))
    yield Section("read-megatron", 1, run(readings.read_megatron))
    yield Section("downstream-one", 1, run(answer_downstream))
    for name in cases.DOWNSTREAM:
        yield Section(f"downstream-{name}", cases.MAX_RANKS, run(answer_downstream, name))


def run(
    work: Callable[..., None], *arguments: Any, cut: str | None = None
) -> Callable[[Places], None]:
    """Bind all arguments of a section's work except the paths.

    Args:
        work: called with the paths and ``arguments``.
        arguments: further arguments of ``work``, after the paths.
        cut: name of a run to resume from its middle; ``arguments[0]`` is the name of the new run.
    """

    def bound(places: Places) -> None:
        if cut:
            origin, target = places.run(cut), places.run(arguments[0])
            if cut.startswith(("doremi", "doge")):
                cut_run(origin / "proxy", target / "proxy", cases.PROXY_SAVE_INTERVAL)
            else:
                cut_run(origin, target, cases.SAVE_INTERVAL)
        work(places, *arguments)

    return bound


def train(places: Places, name: str, case: Case) -> None:
    """Train, or resume the run in the folder."""
    rank = int(os.environ["RANK"])
    with counted_step(places.communication(name, rank)), opened_files(places.opened(name, rank)):
        if name not in (cases.TRACED, cases.RETRACED):
            pretrain(cases.training_options(places, name, case))
            return
        with recorded_batches() as windows:
            pretrain(cases.training_options(places, name, case))
    path = places.batches(name, rank)  # data parallelism only
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps([*windows.items()]))


@contextlib.contextmanager
def counted_step(path: Path) -> Iterator[None]:
    """Count the communication of COUNTED_STEP within the block, and write it to ``path``."""
    steps, counted = itertools.count(1), CountedCollectives()
    original = Trainer.run_step

    def run_step(trainer: Trainer) -> None:
        with counted if next(steps) == cases.COUNTED_STEP else contextlib.nullcontext():
            original(trainer)

    with mock.patch.object(Trainer, "run_step", run_step):
        yield
    counted.write(path)


@contextlib.contextmanager
def opened_files(path: Path) -> Iterator[None]:
    """Write to ``path`` the token files that are opened within the block before the first step."""
    opened: list[str] = []

    def opening(file: Path) -> NDArray[np.uint8]:
        opened.append(file.name)
        return map_file(file)

    def run(trainer: Trainer, original: Callable[[Trainer], None] = Trainer.run) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(opened))
        original(trainer)

    with (
        mock.patch("megatron_chameleon.corpus.indexed.map_file", opening),
        mock.patch.object(Trainer, "run", run),
    ):
        yield


def cut_run(origin: Path, target: Path, step: int) -> None:
    """Copy a finished run on rank 0, as if it had been killed after saving ``step``.

    All metrics are copied, because a killed run leaves metrics of steps after its last checkpoint.
    """
    if not is_first_rank():
        return
    saved = step_folder(origin, step)
    shutil.copytree(saved, target / saved.relative_to(origin))
    shutil.copy(origin / METRICS_NAME, target / METRICS_NAME)
    run = TrainingRun.load(origin)
    dataclasses.replace(run, root=target, status="running", step=step).save()


def train_bad(places: Places, name: str) -> None:
    """Train with a NaN gradient in BAD_STEPS, on the last rank only."""
    steps = itertools.count(1)
    on_last_rank = int(os.environ["RANK"]) == cases.BAD[name].ranks - 1

    def poison(model: Sequence[torch.nn.Module]) -> Any:
        if next(steps) not in cases.BAD_STEPS or not on_last_rank:
            return None
        # Choose a matrix, because tensor parallelism shards matrices. Its gradient is added to
        # main_grad within the matrix product.
        matrix = [p for p in model[-1].parameters() if p.dim() == 2][-1]

        def spoil(gradient: torch.Tensor) -> None:
            matrix.main_grad.fill_(float("nan"))  # type: ignore[attr-defined]

        return matrix.register_hook(spoil)

    with around_steps(poison):
        pretrain(cases.bad_options(places, name))


@contextlib.contextmanager
def around_steps(before: Callable[[Sequence[torch.nn.Module]], Any]) -> Iterator[None]:
    """Call ``before(model)`` before each step within the block.

    ``before`` returns the handle of a hook, which is removed after the step.
    """
    original = Trainer.run_step

    def run_step(trainer: Trainer) -> None:
        handle = before(trainer.model.chunks)
        original(trainer)
        if handle:
            handle.remove()

    with mock.patch.object(Trainer, "run_step", run_step):
        yield


def train_saving(places: Places, name: str) -> None:
    """Train; the disk of one rank is full from step FULL_FROM to the step before FULL_UNTIL."""
    saving = cases.SAVING[name]
    is_mine = saving.full_rank == int(os.environ["RANK"])
    steps = itertools.count(1)
    with contextlib.ExitStack() as full:

        def fill(_model: object) -> None:
            step = next(steps)
            if is_mine and step == cases.FULL_FROM:
                full.enter_context(largest_file_size(SMALLER_THAN_WEIGHTS))
            if is_mine and step == cases.FULL_UNTIL:
                full.close()

        with around_steps(fill):
            case = cases.RUNS[saving.origin]
            pretrain(cases.saving_options(places, name, case, async_save=saving.async_save))


def peak_setup(name: str) -> TrainingSetup:
    """Setup of a model whose activations and logits take more memory than its parameters."""
    case = cases.PEAKS[name]
    parallel = case.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return TrainingSetup(
        config=dataclasses.replace(
            FAMILIES["gpt2" if case.model == "nano" else case.model],
            hidden_size=128,
            ffn_hidden_size=384,
            kv_channels=32,
            vocab_size=1000,
            max_sequence_length=512,
        ),
        parallel=parallel,
        data_parallel_size=case.ranks // model_ranks,
        micro_batch_size=4,
        num_microbatches=2,
        bf16=False,
        seq_length=256,
    )


def measure_peak(places: Places, name: str) -> None:
    """Take two steps on every rank; rank 0 writes the peak memory of each rank."""
    setup = peak_setup(name)
    with distributed(setup.parallel, seed=0) as layout:
        measured = [0] * layout.world_size
        dist.all_gather_object(measured, peak_of_training(setup, layout))
        if layout.is_main:
            places.peaks(name).parent.mkdir(exist_ok=True)
            places.peaks(name).write_text(json.dumps(measured))


def train_online(places: Places, name: str, case: Case) -> None:
    options = cases.online_options(places, name, case)
    pretrain(options, hook_class(options.online.online))


def train_reloaded(places: Places, name: str, case: Case) -> None:
    def read(hook: ReloadedMixture, when: str) -> None:
        raise AssertionError(f"rank {os.environ['RANK']} reads the mixture {when}")

    only_rank_0 = mock.patch.object(ReloadedMixture, "_read", read)
    with contextlib.nullcontext() if is_first_rank() else only_rank_0:
        pretrain(cases.reload_options(places, name, case))


def train_tuned(places: Places, name: str) -> None:
    pretrain(cases.tuning_options(places, name))


def answer_downstream(places: Places, name: str | None = None) -> None:
    # Import this module after the fork, because pyarrow starts a thread.
    from tests.distributed import downstream

    if name is None:
        downstream.write_and_answer(places)
    else:
        downstream.answer(places, name)


def is_first_rank() -> bool:
    return os.environ["RANK"] == "0"


class Ranks:
    """Connect the processes of this launch that take part in a section.

    torchrun's store serves only one process group, because a second group would read the addresses
    of the first group from it. So each section gets its own store at a port that rank 0 chooses.
    """

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self._ports = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=SECONDS_TO_WAIT_FOR_OTHERS),
        )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    def join(self, section: Section) -> bool:
        """Set the environment for the section; return whether this process takes part."""
        if self.rank >= section.ranks:
            return False
        if self.rank == 0:
            self._ports.set(section.name, str(free_port()))
        os.environ["MASTER_PORT"] = self._ports.get(section.name).decode()
        os.environ["WORLD_SIZE"] = str(section.ranks)
        return True


def free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_sections(places: Places) -> None:
    """Run all sections that this rank takes part in."""
    open_output()  # as in tools, since a rank with a full disk cannot write its log
    ranks = Ranks()
    for section in all_sections():
        if not ranks.join(section):
            continue
        start = time.perf_counter()
        section.work(places)
        gc.freeze()  # later garbage collections then skip this section's objects
        if is_first_rank():
            print(f"section {section.name}: {time.perf_counter() - start:.1f} s", flush=True)
            places.done(section.name).parent.mkdir(exist_ok=True)
            places.done(section.name).touch()
