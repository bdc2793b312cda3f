"""What torchrun starts on four ranks: every layout in turn, in the same processes.

Starting ranks takes far longer than what they do here, so all sections share one start. A section
for fewer ranks is done by the first of them while the others go ahead to the next section that
needs them. Process groups are made and taken down by the product itself, section by section.

Imports wait for their functions: a rank has what its sections need, when it comes to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from megatron_chameleon.console import open_output
from tests.distributed.discover_cases import DISCOVERING, discover_options
from tests.distributed.doge_cases import DOGE, DOGE_AGAIN
from tests.distributed.doge_ranks import find_doge, resume_doge
from tests.distributed.doremi_cases import DOREMI, DOREMI_AGAIN
from tests.distributed.doremi_ranks import find_doremi, resume_doremi
from tests.distributed.hooked_cases import HOOKED, HOOKED_AGAIN
from tests.distributed.hooked_ranks import resume_hooked, train_hooked
from tests.distributed.layout_cases import (
    DP2_SHARDED,
    LAYERS,
    NARROW_MULTIPLE,
    NARROW_RUN,
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
    TP2,
    TUNED,
    TUNED_FROM_CHECKPOINT,
    UNREPAIRED,
    Case,
    Places,
    by_document_options,
    mixture_options,
    perplexity_options,
    training_options,
)
from tests.distributed.online_cases import ONLINE, ONLINE_AGAIN
from tests.distributed.online_ranks import resume_online, train_online
from tests.distributed.peak_cases import PEAKS, measure_peak
from tests.distributed.saving_cases import SAVING
from tests.distributed.saving_ranks import train_saving
from tests.distributed.watched_cases import WATCHED
from tests.distributed.watched_ranks import train_watched

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer import MegatronOptimizer

SECONDS_TO_WAIT_FOR_OTHERS = 1200.0


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the work: its name, the ranks it takes and what each of them does."""

    name: str
    ranks: int
    work: Callable[[], None]


def all_sections(places: Places) -> Iterator[Section]:
    """Everything that the tests look at, in an order in which nothing is needed too early."""
    for name, case in {**RUNS, **RUNS_BF16, **RUNS_APART, **RUNS_CHANGING, **RUNS_DRY}.items():
        yield Section(name, case.ranks, partial(train, places, name, case))
    yield Section(NARROW_RUN, TP2.ranks, partial(train_narrow, places))
    for name, case in WATCHED.items():
        yield Section(name, case.ranks, partial(train_watched, places, name))
    for name, (_, case) in HOOKED.items():
        yield Section(name, case.ranks, partial(train_hooked, places, name))
    for name, (_, (_, case)) in HOOKED_AGAIN.items():
        yield Section(name, case.ranks, partial(resume_hooked, places, name))
    for name, case in ONLINE.items():
        yield Section(name, case.ranks, partial(train_online, places, name))
    for name, (_, case) in ONLINE_AGAIN.items():
        yield Section(name, case.ranks, partial(resume_online, places, name))
    for name, case in DOREMI.items():
        yield Section(name, case.ranks, partial(find_doremi, places, name))
    for name, (_, case) in DOREMI_AGAIN.items():
        yield Section(name, case.ranks, partial(resume_doremi, places, name))
    for name, (case, _) in DOGE.items():
        yield Section(name, case.ranks, partial(find_doge, places, name))
    for name, (_, case) in DOGE_AGAIN.items():
        yield Section(name, case.ranks, partial(resume_doge, places, name))
    for name, saving in SAVING.items():
        yield Section(name, saving.case.ranks, partial(train_saving, places, name))
    for name, (origin, case) in RESUMED.items():
        yield Section(name, case.ranks, partial(resume, places, name, origin, case))
    for name, origin in RESUMED_DRY.items():
        case = RUNS_DRY[f"{origin}-dry"]
        yield Section(name, case.ranks, partial(resume, places, name, origin, case))
    for name, case in PEAKS.items():
        yield Section(name, case.ranks, partial(measure_peak, places, name))
    for name in UNREPAIRED:
        yield Section(name, DP2_SHARDED.ranks, partial(resume_unrepaired, places, name))
    for name, reading in READINGS.items():
        ranks = reading.case.ranks
        for layer in LAYERS:
            yield Section(f"embed-{name}-{layer}", ranks, partial(embed, places, name, layer))
        yield Section(f"evaluate-{name}", ranks, partial(evaluate, places, name))
    for name, case in DISCOVERING.items():
        yield Section(f"discover-{name}", case.ranks, partial(discover, places, name))
    yield Section("reference", 1, partial(read_plainly, places))
    yield Section("convert-one", 1, partial(convert_run, places))
    yield Section("pad", 1, partial(pad_folder, places))
    for name in (*TUNED, TUNED_FROM_CHECKPOINT):
        ranks = TUNED[name].ranks if name in TUNED else 1
        yield Section(name, ranks, partial(train_tuned, places, name))
    for name, case in REWRITTEN.items():
        yield Section(f"rewrite-{name}", case.ranks, partial(rewrite, places, name))
        yield Section(f"convert-{name}", 1, partial(convert_rewritten, places, name))
    yield Section("evaluate-converted", 1, partial(evaluate_converted, places))
    for layer in LAYERS:
        yield Section(f"embed-converted-{layer}", 1, partial(embed_converted, places, layer))


def train(places: Places, name: str, case: Case) -> None:
    from megatron_chameleon.training.pretrain import pretrain

    pretrain(training_options(places, name, case))


def train_narrow(places: Places) -> None:
    """The only difference is the number of rows that pad the embedding."""
    with mock.patch("megatron_chameleon.model.gpt.VOCABULARY_MULTIPLE", NARROW_MULTIPLE):
        train(places, NARROW_RUN, TP2)


def resume(places: Places, name: str, origin: str, case: Case) -> None:
    """Go on from the middle of ``origin`` in another folder and layout."""
    if is_first_rank():
        cut_run(places.run(origin), places.run(name), SAVE_INTERVAL)
    train(places, name, case)


def cut_run(origin: Path, target: Path, step: int) -> None:
    """Copy a finished run as it was when it was killed after saving ``step``.

    The metrics are all there: lines beyond the checkpoint are what a killed run leaves behind.
    """
    from megatron_chameleon.artifacts import TrainingRun
    from megatron_chameleon.artifacts.checkpoint import step_folder
    from megatron_chameleon.artifacts.training_run import METRICS_NAME

    saved = step_folder(origin, step)
    shutil.copytree(saved, target / saved.relative_to(origin))
    shutil.copy(origin / METRICS_NAME, target / METRICS_NAME)
    run = TrainingRun.load(origin)
    dataclasses.replace(run, root=target, status="running", step=step).save()


def resume_unrepaired(places: Places, name: str) -> None:
    """Go on with a distributed optimizer whose loading is not wholly repaired."""
    from megatron_chameleon.checkpoint import optimizer_fixes

    repairs: dict[str, Callable[[MegatronOptimizer], None]] = {
        "no-repair": lambda optimizer: None,
        "zero-state-only": optimizer_fixes.create_zero_state,
        "shared-step-count": prepare_but_share_step_count,
    }
    with mock.patch("megatron_chameleon.checkpoint.load.prepare_for_loading", repairs[name]):
        try:
            resume(places, name, "dp2-sharded", DP2_SHARDED)
        except Exception as error:
            if is_first_rank():
                places.failure(name).parent.mkdir(exist_ok=True)
                places.failure(name).write_text(f"{type(error).__name__}: {error}")


def prepare_but_share_step_count(optimizer: MegatronOptimizer) -> None:
    """All repairs but the one by which each parameter gets a step count of its own."""
    from megatron_chameleon.checkpoint.optimizer_fixes import prepare_for_loading

    prepare_for_loading(optimizer)
    for part in optimizer.chained_optimizers:
        share_step_count(part)


def share_step_count(optimizer: MegatronOptimizer) -> None:
    repaired = optimizer._set_main_param_and_optimizer_states

    def set_state(parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = optimizer.model_param_group_index_map[parameter]
        state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][order]]
        shared = state["step"]
        repaired(parameter, tensors)
        state["step"] = shared

    optimizer._set_main_param_and_optimizer_states = set_state


def embed(places: Places, name: str, layer: int) -> None:
    from megatron_chameleon.methods.leverage.compute import compute_mixture

    compute_mixture(mixture_options(places, name, layer))


def discover(places: Places, name: str) -> None:
    from megatron_chameleon.methods.discovery.discover import discover_domains

    discover_domains(discover_options(places, name))


def evaluate(places: Places, name: str) -> None:
    from megatron_chameleon.evaluation.perplexity import evaluate_perplexities

    evaluate_perplexities([perplexity_options(places, name), by_document_options(places, name)])


def read_plainly(places: Places) -> None:
    from tests.distributed.plain_readout import write_plain_readout

    write_plain_readout(places)


def convert_run(places: Places) -> None:
    from tests.distributed import conversions

    conversions.convert_run(places)


def pad_folder(places: Places) -> None:
    from tests.distributed import conversions

    conversions.pad_folder(places)


def train_tuned(places: Places, name: str) -> None:
    from tests.distributed import conversions

    conversions.train_tuned(places, name)


def rewrite(places: Places, name: str) -> None:
    from tests.distributed import conversions

    conversions.rewrite(places, name)


def convert_rewritten(places: Places, name: str) -> None:
    from tests.distributed import conversions

    conversions.convert_rewritten(places, name)


def evaluate_converted(places: Places) -> None:
    from tests.distributed import conversions

    conversions.evaluate_converted(places)


def embed_converted(places: Places, layer: int) -> None:
    from tests.distributed import conversions

    conversions.embed_converted(places, layer)


def is_first_rank() -> bool:
    return os.environ["RANK"] == "0"


class Ranks:
    """The processes of this start, and how some of them find each other for a section.

    torchrun's own store serves one process group only: the addresses of the first would be found
    by the second. So each section gets a store of its own, at a port that the first rank chooses.
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
        """Make this process one of the section's ranks; False if it is none of them."""
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


def main(places: Places) -> None:
    ranks = Ranks()
    for section in all_sections(places):
        if not ranks.join(section):
            continue
        start = time.perf_counter()
        section.work()
        gc.freeze()  # a run collects at its end: it need not look again at what stays
        if is_first_rank():
            print(f"section {section.name}: {time.perf_counter() - start:.1f} s", flush=True)
            places.done(section.name).parent.mkdir(exist_ok=True)
            places.done(section.name).touch()


if __name__ == "__main__":
    open_output()  # as the tools do: a rank whose disk is full cannot write its log either
    main(Places(Path(sys.argv[1])))
