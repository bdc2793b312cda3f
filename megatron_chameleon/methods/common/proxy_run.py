"""A training run that a method makes, as by tools/pretrain_gpt.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts import TrainingRun
from megatron_chameleon.blend.sampler import check_batch_sizes
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.work_dir import BY_WORK_DIR
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import (
    Layout,
    check_interleaving,
    distributed,
    from_main,
)
from megatron_chameleon.training.pretrain import pretrain
from megatron_chameleon.training.stopping import StopRequests
from megatron_chameleon.training.watch import MakeHook
from megatron_chameleon.training.way_out import WayOut


def training_options(
    proxy: ProxyOptions, corpus: Path, run_dir: Path, mixture: str = "uniform"
) -> PretrainOptions:
    """The run of a proxy on ``corpus``; ``mixture`` is what ``--mixture`` takes."""
    fields = {field.name: getattr(proxy, field.name) for field in dataclasses.fields(ProxyOptions)}
    return PretrainOptions(run_dir=run_dir, corpus=corpus, mixture=mixture, **fields)


def way_out_of(run_dir: Path, elsewhere: str = BY_WORK_DIR) -> WayOut:
    """What to advise where the folder of a run that a method makes holds something else."""
    return WayOut(elsewhere, f"delete {run_dir} to start anew", draws_by_flags=False)


def check_batches(proxy: ProxyOptions, layout: Layout) -> None:
    """Refuse batches that the ranks cannot share, before anything is trained or written.

    Raises:
        UserError: as training would.
    """
    check_batch_sizes(proxy.global_batch_size, proxy.micro_batch_size, layout.data_size)
    microbatches = proxy.global_batch_size // (proxy.micro_batch_size * layout.data_size)
    check_interleaving(proxy.parallel, microbatches)


def train_proxy(
    options: PretrainOptions,
    stops: StopRequests,
    watched_by: MakeHook | None = None,
    *,
    what: str = "the proxy",
    elsewhere: str = BY_WORK_DIR,
) -> bool:
    """Train, or go on training, what ``options`` describe. Every rank calls this.

    Args:
        options: of the run.
        stops: what takes the signals that ask for a stop, while it trains.
        watched_by: makes the hook of the method, if it watches the run.
        what: the run is to the method, to begin a message with.
        elsewhere: how a person chooses another folder, by a flag that the command has.

    Returns:
        Whether the run has come to its end; False if it was asked to stop.

    Raises:
        UserError: as :func:`pretrain`, naming the run.
    """
    way_out = way_out_of(options.run_dir, elsewhere)
    try:
        with stops:  # at other times a signal ends the process
            pretrain(options, watched_by=watched_by, stops=stops, way_out=way_out)
    except UserError as error:
        raise UserError(f"{what}: {error}") from error
    with distributed(forward_only(options.parallel), seed=0):
        return from_main(lambda: is_finished(options.run_dir))


def is_finished(run_dir: Path) -> bool:
    """Whether a run has been trained to its end; one that was stopped at once has no record."""
    return TrainingRun.exists(run_dir) and TrainingRun.load(run_dir).status == "finished"


def forward_only(options: ParallelOptions) -> ParallelOptions:
    """How the ranks share a model that is only read; interleaved stages are for training."""
    names = [field.name for field in dataclasses.fields(ParallelOptions)]
    return ParallelOptions(**{name: getattr(options, name) for name in names})
