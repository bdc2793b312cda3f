"""The program that torchrun starts on four ranks: all sections in turn, in the same processes.

    torchrun --nproc-per-node 4 ranks.py ROOT [core] [sweep]

runs the core sections, those of SWEEP, or both, and what they need. Starting ranks takes much
longer than a section. A section for fewer ranks is done by the first of them while the others
proceed to the next section that needs them. The product sets up and destroys process groups,
section by section.

Imports of the product are in the functions: a rank imports what its sections need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from megatron_chameleon.console import open_output
from tests.distributed.cases import (
    BAD,
    BAD_STEPS,
    DISCOVERING,
    DOGE,
    DOGE_AGAIN,
    DOREMI,
    DOREMI_AGAIN,
    DOWNSTREAM,
    FULL_FROM,
    FULL_UNTIL,
    HOOKED,
    HOOKED_AGAIN,
    MAX_RANKS,
    NARROW_MULTIPLE,
    NARROW_RUN,
    ONLINE,
    ONLINE_AGAIN,
    PEAKS,
    READINGS,
    RESUMED,
    RESUMED_DRY,
    REWRITTEN,
    RUNS,
    RUNS_APART,
    RUNS_BF16,
    RUNS_CHANGING,
    RUNS_DRY,
    SAVE_INTERVAL,
    SAVING,
    SWEEP,
    TP2,
    TUNED,
    TUNED_FROM_CHECKPOINT,
    UNFIXED,
    Case,
    Places,
    bad_options,
    one_rank,
    online_options,
    plain_run,
    saving_options,
    training_options,
    tuning_options,
)
from tests.full_disk import largest_file_size

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer import MegatronOptimizer

    from megatron_chameleon.model.memory import TrainingSetup
    from megatron_chameleon.parallel.layout import Layout
    from megatron_chameleon.training.hook import TrainingHook
    from megatron_chameleon.training.plan import TrainingPlan

SECONDS_TO_WAIT_FOR_OTHERS = 1200.0
SMALLER_THAN_WEIGHTS = 50_000
"""Bytes that a file may have on a full disk."""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the work: its name, its ranks, what each of them does, and sections it needs."""

    name: str
    ranks: int
    work: Callable[[Places], None]
    needs: tuple[str, ...] = ()


def all_sections() -> Iterator[Section]:
    """Every section, after those that it needs."""
    for name, case in {**RUNS, **RUNS_BF16, **RUNS_APART, **RUNS_CHANGING, **RUNS_DRY}.items():
        needs = (name.removesuffix("-dry"),) if name in RUNS_DRY else ()
        yield Section(name, case.ranks, run(train, name, case), needs)
    yield Section(NARROW_RUN, TP2.ranks, run(train_narrow))
    for name, case in BAD.items():
        yield Section(name, case.ranks, run(train_bad, name), (plain_run(name),))
    for name, (hook, case) in HOOKED.items():
        yield Section(name, case.ranks, run(train_hooked, name, hook, case))
    for name, (origin, case) in HOOKED_AGAIN.items():
        work = run(train_hooked, name, HOOKED[origin][0], case, cut=origin)
        yield Section(name, case.ranks, work, (origin,))
    for name, case in ONLINE.items():
        yield Section(name, case.ranks, run(train_online, name, case))
    for name, (origin, case) in ONLINE_AGAIN.items():
        yield Section(name, case.ranks, run(train_online, name, case, cut=origin), (origin,))
    for name, case in DOREMI.items():
        yield Section(name, case.ranks, run("methods.doremi", name, case), ("one",))
    for name, (origin, case) in DOREMI_AGAIN.items():
        yield Section(name, case.ranks, run("methods.doremi", name, case, cut=origin), (origin,))
    for name, case in DOGE.items():
        yield Section(name, case.ranks, run("methods.doge", name, case))
    for name, (origin, case) in DOGE_AGAIN.items():
        yield Section(name, case.ranks, run("methods.doge", name, case, cut=origin), (origin,))
    for name, saving in SAVING.items():
        ranks = RUNS[saving.origin].ranks
        yield Section(name, ranks, run(train_saving, name), (saving.origin,))
    for name, (origin, case) in RESUMED.items():
        yield Section(name, case.ranks, run(train, name, case, cut=origin), (origin,))
    for name, origin in RESUMED_DRY.items():
        case = RUNS_DRY[f"{origin}-dry"]
        yield Section(name, case.ranks, run(train, name, case, cut=origin), (origin,))
    for name in UNFIXED:
        yield Section(name, 2, run(resume_unfixed, name, cut="dp2-sharded"), ("dp2-sharded",))
    for name, case in PEAKS.items():
        yield Section(name, case.ranks, run(measure_peak, name))
    yield Section("reference", 1, run("readings.write_reference"), ("one",))
    for name, reading in READINGS.items():
        work = run("readings.read", name)
        yield Section(f"read-{name}", reading.case.ranks, work, ("one", "reference"))
    for name, case in DISCOVERING.items():
        yield Section(name, case.ranks, run("methods.discover", name), ("one",))
    yield Section("convert-one", 1, run("readings.convert_one"), ("one",))
    yield Section(
        TUNED_FROM_CHECKPOINT, 1, run(train_tuned, TUNED_FROM_CHECKPOINT), ("convert-one",)
    )
    for name, case in TUNED.items():
        yield Section(name, case.ranks, run(train_tuned, name), (TUNED_FROM_CHECKPOINT,))
    for name, case in REWRITTEN.items():
        work = run("readings.rewrite", name)
        yield Section(f"rewrite-{name}", case.ranks, work, ("convert-one",))
        work = run("readings.convert_rewritten", name)
        yield Section(f"convert-{name}", 1, work, (f"rewrite-{name}",))
    work = run("readings.read_converted")
    yield Section("read-converted", 1, work, ("convert-one", "read-one"))
    yield Section("downstream-one", 1, run("downstream.write_and_answer"))
    for name in DOWNSTREAM:
        work = run("downstream.answer", name)
        yield Section(f"downstream-{name}", MAX_RANKS, work, ("downstream-one",))


def run(
    work: Callable[..., None] | str, *arguments: Any, cut: str | None = None
) -> Callable[[Places], None]:
    """Bind all arguments of a section's work except the paths.

    Args:
        work: a function of this file, or "module.function" of this folder, imported when called.
        arguments: after the paths.
        cut: the run that it resumes from the middle; the first argument is the new run's name.
    """

    def bound(places: Places) -> None:
        function = work
        if isinstance(function, str):
            module, _, name = function.partition(".")
            function = getattr(importlib.import_module(f"tests.distributed.{module}"), name)
        if cut:
            folder = places.proxy if cut.startswith(("doremi", "doge")) else places.run
            cut_run(folder(cut), folder(arguments[0]))
        function(places, *arguments)

    return bound


def train(places: Places, name: str, case: Case) -> None:
    """Train, or resume the run in the folder."""
    from megatron_chameleon.training.trainer import pretrain

    pretrain(training_options(places, name, case))


def train_narrow(places: Places) -> None:
    """The only difference is the number of rows that pad the embedding."""
    with mock.patch("megatron_chameleon.model.gpt.VOCABULARY_MULTIPLE", NARROW_MULTIPLE):
        train(places, NARROW_RUN, TP2)


def cut_run(origin: Path, target: Path, step: int = SAVE_INTERVAL) -> None:
    """Copy a finished run on rank 0, as if it had been killed after saving ``step``.

    The metrics are copied whole: a killed run leaves lines beyond its last checkpoint.
    """
    from megatron_chameleon.artifacts import TrainingRun
    from megatron_chameleon.artifacts.checkpoint import step_folder
    from megatron_chameleon.artifacts.training_run import METRICS_NAME

    if not is_first_rank():
        return
    saved = step_folder(origin, step)
    shutil.copytree(saved, target / saved.relative_to(origin))
    shutil.copy(origin / METRICS_NAME, target / METRICS_NAME)
    run = TrainingRun.load(origin)
    dataclasses.replace(run, root=target, status="running", step=step).save()


def train_bad(places: Places, name: str) -> None:
    """Train with a NaN gradient on the last rank only, in two steps."""
    from megatron_chameleon.training.trainer import pretrain

    steps = itertools.count(1)
    on_last_rank = int(os.environ["RANK"]) == BAD[name].ranks - 1

    def poison(model: Sequence[torch.nn.Module]) -> Any:
        if next(steps) not in BAD_STEPS or not on_last_rank:
            return None
        matrix = [p for p in model[-1].parameters() if p.dim() == 2][-1]  # sharded
        return matrix.register_hook(lambda gradient: gradient * float("nan"))

    with around_steps(poison):
        pretrain(bad_options(places, name))


@contextlib.contextmanager
def around_steps(before: Callable[[Sequence[torch.nn.Module]], Any]) -> Iterator[None]:
    """Call ``before(model)`` before each training step of the block; remove the hook it returns."""
    from megatron_chameleon.training import step

    def train_step(model: Sequence[torch.nn.Module], *others: Any) -> Any:
        handle = before(model)
        result = step.train_step(model, *others)
        if handle:
            handle.remove()
        return result

    with mock.patch("megatron_chameleon.training.trainer.train_step", train_step):
        yield


def train_saving(places: Places, name: str) -> None:
    """Train; in some cases one rank's disk is full during some of the steps."""
    from megatron_chameleon.training.trainer import pretrain

    saving = SAVING[name]
    is_mine = saving.full_rank == int(os.environ["RANK"])
    steps = itertools.count(1)
    with contextlib.ExitStack() as full:

        def fill(_model: object) -> None:
            step = next(steps)
            if is_mine and step == FULL_FROM:
                full.enter_context(largest_file_size(SMALLER_THAN_WEIGHTS))
            if is_mine and step == FULL_UNTIL:
                full.close()

        with around_steps(fill):
            case = RUNS[saving.origin]
            pretrain(saving_options(places, name, case, async_save=saving.async_save))


def resume_unfixed(places: Places, name: str) -> None:
    """Resume with a distributed optimizer without some of the fixes of its loading."""
    from megatron_chameleon.checkpoint import optimizer_fixes

    fixes: dict[str, Callable[[MegatronOptimizer], None]] = {
        "no-fix": lambda optimizer: None,
        "zero-state-only": optimizer_fixes.create_zero_state,
        "shared-step-count": prepare_with_shared_step_count,
    }
    with mock.patch("megatron_chameleon.checkpoint.load.prepare_for_loading", fixes[name]):
        try:
            train(places, name, RUNS["dp2-sharded"])
        except Exception as error:
            if is_first_rank():
                places.found(name, "txt").parent.mkdir(exist_ok=True)
                places.found(name, "txt").write_text(f"{type(error).__name__}: {error}")


def prepare_with_shared_step_count(optimizer: MegatronOptimizer) -> None:
    """Apply all fixes but the one that gives each parameter its own step count."""
    from megatron_chameleon.checkpoint.optimizer_fixes import prepare_for_loading

    prepare_for_loading(optimizer)
    for part in optimizer.chained_optimizers:
        share_step_count(part)


def share_step_count(optimizer: MegatronOptimizer) -> None:
    fixed = optimizer._set_main_param_and_optimizer_states

    def set_state(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        shared = state["step"]
        fixed(parameter, tensors)
        state["step"] = shared

    optimizer._set_main_param_and_optimizer_states = set_state


def peak_setup(name: str) -> TrainingSetup:
    """A model whose layers and logits take more memory than its parameters."""
    from megatron_chameleon.model.memory import TrainingSetup
    from megatron_chameleon.model.sizes import ModelShape, ModelSize

    parallel = PEAKS[name].parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    size = ModelSize(num_layers=4, num_attention_heads=4, hidden_size=128, ffn_hidden_size=512)
    return TrainingSetup(
        shape=ModelShape(size, vocab_size=1000, max_sequence_length=256),
        parallel=parallel,
        data_parallel_size=PEAKS[name].ranks // model_ranks,
        micro_batch_size=4,
        num_microbatches=2,
        bf16=False,
    )


def measure_peak(places: Places, name: str) -> None:
    """Take two steps on every rank; rank 0 writes the peak of each."""
    import torch.distributed as dist

    from megatron_chameleon.parallel.layout import distributed
    from tests.peak_memory import peak_of_training

    setup = peak_setup(name)
    with distributed(setup.parallel, seed=0) as layout:
        measured = [0] * layout.world_size
        dist.all_gather_object(measured, peak_of_training(setup, layout))
        if layout.is_main:
            places.found(name).parent.mkdir(exist_ok=True)
            places.found(name).write_text(json.dumps(measured))


def train_hooked(places: Places, name: str, hook: str, case: Case) -> None:
    from megatron_chameleon.artifacts.files import write_json
    from megatron_chameleon.blend.options import DataOptions
    from megatron_chameleon.training.trainer import pretrain
    from tests.distributed.toy_hooks import HOOKS

    hooks: list[TrainingHook] = []

    def make(plan: TrainingPlan, layout: Layout) -> TrainingHook:
        hooks.append(HOOKS[hook](plan, layout))
        return hooks[0]

    options = training_options(places, name, case)
    pretrain(dataclasses.replace(options, data=DataOptions(permutation=case.permutation)), make)
    folder = places.hook_flops(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{os.environ['RANK']}.json", hooks[0].flops)


def train_online(places: Places, name: str, case: Case) -> None:
    from megatron_chameleon.methods.chameleon.hook import OnlineChameleon
    from megatron_chameleon.training.trainer import pretrain

    pretrain(online_options(places, name, case), OnlineChameleon)


def train_tuned(places: Places, name: str) -> None:
    from megatron_chameleon.training.trainer import pretrain

    pretrain(tuning_options(places, name))


def is_first_rank() -> bool:
    return os.environ["RANK"] == "0"


class Ranks:
    """Lets some of the processes of this launch meet for a section.

    torchrun's store serves one process group only: the second would find the addresses of the
    first. So each section gets its own store, at a port that the first rank chooses.
    """

    def __init__(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self.rank = int(os.environ["RANK"])
        self._ports = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=SECONDS_TO_WAIT_FOR_OTHERS),
        )
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    def join(self, section: Section) -> bool:
        """Make this process one of the section's ranks; False if it has none for it."""
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


def needed_sections(kinds: Sequence[str]) -> list[Section]:
    """Return the sections of some kinds, in order, with those they need or are compared with."""
    sections = {section.name: section for section in all_sections()}
    assert sections.keys() >= SWEEP, SWEEP - sections.keys()
    wanted: set[str] = set()

    def want(name: str) -> None:
        if name in sections and name not in wanted:
            wanted.add(name)
            for other in (*sections[name].needs, one_rank(name)):
                want(other)

    for name in sections:
        if ("sweep" if name in SWEEP else "core") in kinds:
            want(name)
    return [section for section in sections.values() if section.name in wanted]


def main(places: Places, kinds: Sequence[str]) -> None:
    ranks = Ranks()
    for section in needed_sections(kinds):
        if not ranks.join(section):
            continue
        start = time.perf_counter()
        section.work(places)
        gc.freeze()  # the next section collects only its own garbage
        if is_first_rank():
            print(f"section {section.name}: {time.perf_counter() - start:.1f} s", flush=True)
            places.done(section.name).parent.mkdir(exist_ok=True)
            places.done(section.name).touch()


if __name__ == "__main__":
    open_output()  # like the tools: a rank whose disk is full cannot write its log either
    main(Places(Path(sys.argv[1])), sys.argv[2:])
