"""Set up process groups: from torchrun's ranks to megatron's parallel state."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megatron_chameleon.errors import UserError, first_line
from megatron_chameleon.parallel.cpu import install_cpu_stand_in, unusable_gpu
from megatron_chameleon.parallel.options import ParallelOptions
from megatron_chameleon.parallel.releases import release_problem

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Layout:
    """This rank's coordinates in the parallel layout.

    ``world_size`` is the product of the tensor, pipeline and data sizes. ``virtual_size`` is the
    number of virtual pipeline stages per rank.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    sequence_parallel: bool
    use_distributed_optimizer: bool
    device: torch.device
    virtual_size: int = 1
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens, in its first model chunk."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss, in its last model chunk."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def describe(self) -> dict[str, int | bool | str]:
        """Describe the layout without this rank's coordinates, for artifacts."""
        return {
            "world_size": self.world_size,
            "tensor_model_parallel_size": self.tensor_size,
            "pipeline_model_parallel_size": self.pipeline_size,
            "num_virtual_stages_per_pipeline_rank": self.virtual_size,
            "data_parallel_size": self.data_size,
            "sequence_parallel": self.sequence_parallel,
            "use_distributed_optimizer": self.use_distributed_optimizer,
            "device": device_name(self.device),
        }


@contextlib.contextmanager
def distributed(options: ParallelOptions, seed: int) -> Iterator[Layout]:
    """Set up process groups and random state for a ``with`` block, and destroy the groups after it.

    Without torchrun, the block runs as a single rank.

    Raises:
        UserError: if ``options`` do not fit the number of ranks, or the installed megatron-core is
            not supported.
    """
    problem = release_problem()
    if problem is not None:
        raise UserError(problem)
    # torchrun sets RANK and WORLD_SIZE; a scheduler may set only WORLD_SIZE, even for one process.
    world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    check_layout(options, world_size)
    training = options.for_training()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # This setting lets tensor-parallel communication overlap with computation on the GPU; megatron
    # requires it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = _prepare_device()
    on_gpu, alone = device.type == "cuda", world_size == 1
    timeout = datetime.timedelta(minutes=options.distributed_timeout_minutes)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=torch._C._distributed_c10d.HashStore() if alone else _new_store(timeout),
        rank=0 if alone else int(os.environ["RANK"]),
        world_size=world_size,
        device_id=device if on_gpu else None,
        timeout=timeout,
    )
    _create_model_parallel_groups(options)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    layout = Layout(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=options.tensor_model_parallel_size,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=options.pipeline_model_parallel_size,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        sequence_parallel=options.sequence_parallel,
        use_distributed_optimizer=training.use_distributed_optimizer,
        device=device,
        virtual_size=training.num_virtual_stages_per_pipeline_rank,
        overlap_grad_reduce=training.overlap_grad_reduce,
        overlap_param_gather=training.overlap_param_gather,
    )
    try:
        yield layout
    except BaseException:
        # Over NCCL, destroying the groups could block while other ranks wait in a collective, and
        # this rank's error would not be reported. The process is about to end anyway.
        if device.type == "cpu":
            destroy_groups()
        raise
    destroy_groups()


def seed_dropout(layout: Layout, seed: int, step: int) -> None:
    """Seed this rank's generators for the dropout of one step.

    The masks of a step are a function of the seed, the step and the layout, so that a resumed run
    samples the same masks. Tensor-parallel ranks share the default generator, which drops out whole
    hidden states, and have different tracked generators, which drop out their shards. Other ranks
    share no generator.

    Args:
        layout: layout of this rank.
        seed: random seed of the run.
        step: number of steps done.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    index = (seed, step, layout.pipeline_rank, layout.data_rank)
    # megatron adds numbers to the seed, which must stay below 2^63.
    number = int(np.random.SeedSequence(index).generate_state(1, np.uint64)[0] >> np.uint64(2))
    torch.manual_seed(number)
    model_parallel_cuda_manual_seed(number)


def _create_model_parallel_groups(options: ParallelOptions) -> None:
    from megatron.core import parallel_state

    virtual = options.for_training().num_virtual_stages_per_pipeline_rank
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        # megatron expects None for a pipeline without interleaving.
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=options.distributed_timeout_minutes,
    )


GROUP_DESCRIPTIONS = {
    "tensor": "TENSOR_MODEL_PARALLEL_GROUP",
    "pipeline": "PIPELINE_MODEL_PARALLEL_GROUP",
    "data": "DATA_PARALLEL_GROUP_WITH_CP",
    "embedding": "EMBEDDING_GROUP",
}
"""Our name of a kind of process groups -> megatron's description of these groups."""


def rank_groups(options: ParallelOptions, world_size: int) -> dict[str, list[list[int]]]:
    """Build the process groups of ``world_size`` ranks in this process, by torch's fake backend.

    megatron creates every group on every rank, so one process can list the groups of all ranks. No
    rank communicates. This process must not have process groups of its own, and ``options`` must
    fit ``world_size`` (see check_layout).

    Returns:
        Kind of the groups ("tensor", "pipeline", "data", "embedding") -> ranks of each group, in
        megatron's order. The embedding groups are the first and last stage of each pipeline.
    """
    # This import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    groups: dict[str, list[list[int]]] = {kind: [] for kind in GROUP_DESCRIPTIONS}
    kinds = {description: kind for kind, description in GROUP_DESCRIPTIONS.items()}
    new_group = dist.new_group

    def record_group(ranks: list[int], *, group_desc: str | None = None, **settings: Any) -> Any:
        if group_desc in kinds:
            groups[kinds[group_desc]].append(list(ranks))
        return new_group(ranks, group_desc=group_desc, **settings)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        dist.new_group = record_group  # type: ignore[assignment]
        _create_model_parallel_groups(options)
    finally:
        dist.new_group = new_group
        destroy_groups()
    return groups


def destroy_groups() -> None:
    """Destroy the process groups. Collective."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def check_layout(options: ParallelOptions, world_size: int) -> None:
    """Raise UserError if ``options`` do not fit ``world_size`` ranks."""
    tensor, pipeline = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    if world_size % (tensor * pipeline):
        raise UserError(
            f"{world_size} rank(s) cannot be laid out as tensor {tensor} x pipeline {pipeline} "
            "(--tensor-model-parallel-size, --pipeline-model-parallel-size); use a multiple of "
            f"{tensor * pipeline} ranks (torchrun --nproc-per-node; plan_run --world-size)"
        )


def from_main(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0 and broadcast the pickled result to all ranks. Collective.

    Raises:
        UserError: on every rank, if ``make`` raises a UserError on rank 0. If only rank 0 raised
            it, the other ranks would wait for a rank that has exited.
    """
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box = [make()]
        except UserError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], UserError):
        raise box[0]
    made: T = box[0]
    return made


def on_every_rank(check: Callable[[], object]) -> None:
    """Call ``check`` on every rank. Collective.

    Raises:
        UserError: on every rank, the error of the first rank on which ``check`` raises it.
    """
    problem: UserError | None = None
    try:
        check()
    except UserError as error:
        problem = error
    found: list[UserError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    for error_of_rank in found:
        if error_of_rank is not None:
            raise error_of_rank


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _prepare_device() -> torch.device:
    # fp32 must not be rounded to TF32, which NVIDIA's containers allow
    # (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1): TF32 has 10 mantissa bits, fp32 has 23.
    torch.set_float32_matmul_precision("highest")
    problem = unusable_gpu()
    if problem is not None:
        raise UserError(problem)
    if install_cpu_stand_in():
        return torch.device("cpu")
    # torchrun's ranks all see the devices of their node. Without torchrun, a single visible device
    # belongs to this task (SLURM's --gpus-per-task=1), regardless of its local rank.
    count, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    if count == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        local_rank = 0
    if local_rank >= count:
        raise UserError(
            f"there are {count} CUDA device(s) here, too few for local rank {local_rank}; pass "
            f"--nproc-per-node {count}, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _new_store(timeout: datetime.timedelta) -> Store:
    """Return a new namespace in torchrun's store, for the process groups.

    Without a namespace, a process that creates groups a second time would read the addresses of the
    destroyed groups. Each rank counts how often it has created groups, so all ranks use the same
    number.

    Raises:
        UserError: if this rank cannot listen or connect.
    """
    try:
        store, rank, _ = next(rendezvous("env://", timeout=timeout))
    except (RuntimeError, ValueError) as error:
        names = ("MASTER_ADDR", "MASTER_PORT")
        place = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        raise UserError(
            f"rank {os.environ['RANK']} cannot meet the other ranks at {place} "
            f"({first_line(error)}); check that the address is rank 0's and the port is free"
        ) from error
    store.set_timeout(timeout)
    return PrefixStore(f"start-{store.add(f'starts-of-rank-{rank}', 1)}", store)
