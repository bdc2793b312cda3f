"""Predict memory, communication and time of a training run from its options.

The predicted time of a step is the sum of

- compute: the step's FLOPs at the stated speed of a device, divided equally among the ranks;
- recomputation: repeated forward passes, at the same speed;
- imbalance: the FLOPs of the last pipeline stage, which has the output layer, beyond the mean of
  all stages;
- tensor-parallel and pipeline communication during the forward and backward passes, without any
  overlap with computation;
- pipeline bubble: (p - 1) / (v * m) of all of the above, with p pipeline stages, v virtual stages
  per rank and m micro-batches (Narayanan et al. 2021, "Efficient Large-Scale Language Model
  Training on GPU Clusters", section 2.2);
- communication once per step: gradients and parameters. With ``--overlap-grad-reduce``, only the
  part that exceeds the backward pass of the last micro-batch is counted; with
  ``--overlap-param-gather``, the part that exceeds the forward pass of the first micro-batch.

A collective takes the bytes that a rank sends (see model/communication.py), divided by the
bandwidth of the slowest link of its group. Latency and congestion are not counted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_chameleon.artifacts import Corpus
from megatron_chameleon.blend.dataset import check_enough_tokens
from megatron_chameleon.console import align_columns
from megatron_chameleon.corpus.domains import Domains, open_domains
from megatron_chameleon.model.communication import Communication, step_communication
from megatron_chameleon.model.config import DEFAULT_MODEL, ModelConfig
from megatron_chameleon.model.flops import (
    BACKWARD_OVER_FORWARD,
    forward_flops,
    head_forward_flops,
    recomputed_flops,
    training_flops,
)
from megatron_chameleon.model.gpt import padded_vocab_size
from megatron_chameleon.model.huggingface_config import describe
from megatron_chameleon.model.memory import FLOAT32_BYTES, TrainingSetup, estimate_memory
from megatron_chameleon.model.options import resolve_model
from megatron_chameleon.parallel.layout import check_layout, rank_groups
from megatron_chameleon.training.options import PlanRunOptions
from megatron_chameleon.training.out_of_memory import MEMORY_HINT, training_setup
from megatron_chameleon.training.plan import (
    ROUNDING,
    check_model,
    limit_repetition,
    load_mixture,
    planned_epochs,
    staged_schedule,
    warn_of_repeats,
    weights_for,
)

Wanted = Callable[[Communication], bool]

GB = 1e9
COMPILE_SECONDS = 60.0
"""Time that torch.compile adds to the first step; see docs/training.md."""


@dataclasses.dataclass(frozen=True)
class GroupShape:
    """Process groups of one kind.

    Attributes:
        count: number of groups.
        ranks: ranks in each group.
        ranks_per_node: smallest number of ranks of a group on a node that has any.
        nodes: largest number of nodes of a group.
    """

    count: int
    ranks: int
    ranks_per_node: int
    nodes: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], devices_per_node: int) -> GroupShape:
        """Describe ``groups`` of ranks that are numbered node by node."""
        on_nodes = [[rank // devices_per_node for rank in ranks] for ranks in groups]
        return cls(
            count=len(groups),
            ranks=len(groups[0]),
            ranks_per_node=min(nodes.count(node) for nodes in on_nodes for node in set(nodes)),
            nodes=max(len(set(nodes)) for nodes in on_nodes),
        )


@dataclasses.dataclass(frozen=True)
class DomainEstimate:
    """Predicted sampling of a domain.

    Attributes:
        weight: share of the tokens of the whole run.
        tokens: training tokens of the domain, after the cut by ``--target-tokens``.
        epochs: passes over these tokens.
        planned_epochs: passes that the mixture plans; ``--max-repetition-action`` may lower them.
        max_repetition: most passes that the mixture permits; None without a limit.
    """

    weight: float
    tokens: int
    epochs: float
    planned_epochs: float
    max_repetition: float | None


@dataclasses.dataclass(frozen=True)
class RunEstimate:
    """Prediction for a run. Sizes are in bytes, times in seconds; None if a speed is not stated.

    Attributes:
        model: description of the model.
        world_size: number of ranks.
        setup: inputs of the memory estimate.
        train_iters: number of steps.
        tokens: number of training tokens.
        step_flops: FLOPs of a step, over all ranks, without recomputation.
        recomputed_flops: FLOPs of a step that recomputation adds.
        groups: kind of process groups -> their shape.
        memory: for each pipeline stage, component -> bytes at the peak of a step.
        communication: for each pipeline stage, the collectives of a step.
        communication_seconds: duration of each entry of ``communication``.
        step_seconds: part of a step -> its time.
        checkpoint_bytes: size of a checkpoint.
        checkpoint_seconds: time to write, or to read, a checkpoint.
        validation_seconds: time of all validations; the count of windows is an upper bound.
        saving_seconds: time of all checkpoints that training waits for.
        start_up_seconds: time from the start of the command to the first step of a new run.
        total_seconds: time of the run; without communication whose bandwidth is not stated.
        mfu: model FLOPs utilization of the steps.
        domains: domain -> its predicted sampling; None without ``--corpus``.
    """

    model: str
    world_size: int
    setup: TrainingSetup
    train_iters: int
    tokens: int
    step_flops: float
    recomputed_flops: float
    groups: dict[str, GroupShape]
    memory: list[dict[str, int]]
    communication: list[list[Communication]]
    communication_seconds: list[list[float | None]]
    step_seconds: dict[str, float] | None
    checkpoint_bytes: int
    checkpoint_seconds: float | None
    validation_seconds: float | None
    saving_seconds: float | None
    start_up_seconds: float | None
    total_seconds: float | None
    mfu: float | None
    domains: dict[str, DomainEstimate] | None

    @property
    def peak_bytes(self) -> list[int]:
        """Memory of a rank of each pipeline stage."""
        return [sum(stage.values()) for stage in self.memory]

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with bytes that a rank sends in each collective."""
        fields = dataclasses.asdict(self)
        setup = fields.pop("setup")
        for name in ("data_parallel_size", "num_microbatches"):
            fields[name] = setup[name]
        fields["peak_bytes"] = self.peak_bytes
        fields["communication"] = [
            [
                {**dataclasses.asdict(one), "sent_bytes": one.sent_bytes, "seconds": seconds}
                for one, seconds in zip(stage, times, strict=True)
            ]
            for stage, times in zip(
                self.communication, fields.pop("communication_seconds"), strict=True
            )
        ]
        return fields


def estimate_run(options: PlanRunOptions) -> RunEstimate:
    """Predict the run that ``options`` describe.

    The process groups of all ranks are built in this process, which must not have groups already.

    Raises:
        UserError: the error that training with these options would raise.
    """
    options = options.with_steps()
    vocab_size, num_domains, domains = options.vocab_size, options.num_domains, None
    if options.corpus is not None:
        corpus = Corpus.load(options.corpus)
        data = open_domains(corpus).cut(options.tokens, options.target_tokens)
        domains = estimate_domains(options, data)
        vocab_size = data.tokenizer.vocab_size
        num_domains = sum(domain.tokens >= 2 for domain in data.splits.get("valid", {}).values())
    parallel, length = options.parallel, options.seq_length
    check_layout(parallel, options.world_size)
    config = resolve_model(options.model or DEFAULT_MODEL, options.architecture, vocab_size, length)
    check_model(config, options)
    setup = training_setup(options, config, options.world_size)
    groups = {
        kind: GroupShape.of(ranks, options.devices_per_node)
        for kind, ranks in rank_groups(parallel, options.world_size).items()
    }
    step_tokens = options.global_batch_size * length
    chunks = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    step_flops = training_flops(config, step_tokens, length)
    recomputed = recomputed_flops(config, parallel.recompute, step_tokens, length, chunks)
    communication = step_communication(setup)
    times = [
        [transfer_seconds(one, groups[one.group], options) for one in stage]
        for stage in communication
    ]

    def slowest(wanted: Wanted) -> float:
        return max(
            sum(time or 0.0 for one, time in zip(stage, found, strict=True) if wanted(one))
            for stage, found in zip(communication, times, strict=True)
        )

    size = checkpoint_bytes(setup)
    writing = size / GB / options.disk_bandwidth if options.disk_bandwidth else None
    saves = math.ceil(options.train_iters / options.save_interval)
    if options.checkpointing.async_save:
        saves = 1  # training waits for its last checkpoint only
    speed = device_speed(options, step_flops / step_tokens)
    step_seconds = validation = saving = start_up = total = mfu = None
    if speed is not None:
        all_ranks = options.world_size * speed
        passes, once = _step_seconds(setup, step_flops, recomputed, all_ranks, slowest)
        step_seconds = {**passes, **once}
        step = sum(step_seconds.values())
        mfu = step_flops / step / options.world_size / (options.peak_tflops * 1e12)
        evaluated, _ = _step_seconds(setup, step_flops, 0.0, all_ranks, slowest)
        forward = sum(evaluated.values()) / (1 + BACKWARD_OVER_FORWARD)
        validation = _validation_batches(options, num_domains) * forward
        saving = saves * (writing or 0.0)
        start_up = options.start_up_seconds + COMPILE_SECONDS * options.compile_layers
        total = start_up + options.train_iters * step + validation + saving
    return RunEstimate(
        model=describe(config),
        world_size=options.world_size,
        setup=setup,
        train_iters=options.train_iters,
        tokens=options.tokens,
        step_flops=step_flops,
        recomputed_flops=recomputed,
        groups=groups,
        memory=estimate_memory(setup),
        communication=communication,
        communication_seconds=times,
        step_seconds=step_seconds,
        checkpoint_bytes=size,
        checkpoint_seconds=writing,
        validation_seconds=validation,
        saving_seconds=saving,
        start_up_seconds=start_up,
        total_seconds=total,
        mfu=mfu,
        domains=domains,
    )


def estimate_domains(options: PlanRunOptions, data: Domains) -> dict[str, DomainEstimate]:
    """Predict how the run of ``options`` samples the domains ``data``.

    Raises:
        UserError: if the mixture is invalid, or ``--max-repetition-action`` rejects the run.
    """
    mixture = load_mixture(options.mixture, data.names, may_change=True)
    weights = weights_for(data, mixture)
    planned = staged_schedule(options, options.mixture, data, mixture, weights)
    schedule, _ = limit_repetition(options, data, mixture, planned)
    for phase in schedule.phases:
        check_enough_tokens(data, phase.weights, options.seq_length)
    warn_of_repeats(options, data, mixture, schedule)
    before, epochs = (planned_epochs(options, data, each) for each in (planned, schedule))
    limits = mixture.max_repetition or {}
    return {
        name: DomainEstimate(
            weight=epochs[name] * tokens / options.tokens,
            tokens=tokens,
            epochs=epochs[name],
            planned_epochs=before[name],
            max_repetition=limits.get(name),
        )
        for name, tokens in data.tokens.items()
    }


def device_speed(options: PlanRunOptions, flops_per_token: float) -> float | None:
    """Return the stated speed of a device in FLOP/s; None if it is not stated."""
    if options.tokens_per_second is not None:
        return options.tokens_per_second * flops_per_token
    return None if options.mfu is None else options.mfu * options.peak_tflops * 1e12


def transfer_seconds(
    one: Communication, group: GroupShape, options: PlanRunOptions
) -> float | None:
    """Return how long a collective takes; None if the bandwidth of its links is not stated.

    Ranks of a group that share a node also share the cards of this node: a ring leaves the node
    once, so its bandwidth between nodes is that of all these cards, but at most the bandwidth
    within the node. A send uses the card of one rank.
    """
    within, between = options.intra_node_bandwidth, options.inter_node_bandwidth
    bandwidth = within
    if group.nodes > 1:
        if between is None:
            return None
        cards = 1 if one.operation == "send" else group.ranks_per_node
        bandwidth = cards * between
        if group.ranks_per_node > 1 and within is not None:
            bandwidth = min(bandwidth, within)
    return None if bandwidth is None else one.sent_bytes / GB / bandwidth


def checkpoint_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the tensors in a checkpoint, over all ranks.

    A checkpoint holds each weight in the compute dtype, the moments of Adam or Muon in float32,
    and, in bfloat16 or with a sharded optimizer, the weight in float32. Replicated tensors and tied
    embeddings are stored once; the embedding is padded as in training. Not counted are random
    states, 25 kB for each rank, and about 2 kB that torch adds to each shard of a tensor.
    """
    config, parallel = setup.config, setup.parallel
    matrices = 2 if config.untie_embeddings_and_output_weights else 1
    rows = padded_vocab_size(config.vocab_size, parallel.tensor_model_parallel_size)
    padding = matrices * (rows - config.vocab_size) * config.hidden_size
    has_main_weights = setup.bf16 or parallel.use_distributed_optimizer
    of_parameter = setup.element_bytes + (3 if has_main_weights else 2) * FLOAT32_BYTES
    matrices_of_layers = config.num_layers * config.layer_matrix_parameters
    without = setup.muon * matrices_of_layers * FLOAT32_BYTES  # Muon has one moment
    return (config.num_parameters + padding) * of_parameter - without


def _step_seconds(
    setup: TrainingSetup,
    flops: float,
    recomputed: float,
    speed: float,
    slowest: Callable[[Wanted], float],
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the time of each part of the passes of a step, and of each part after the passes.

    Args:
        setup: the run.
        flops: FLOPs of a step.
        recomputed: FLOPs that recomputation adds.
        speed: FLOP/s of all ranks together.
        slowest: returns the time of the selected communication on the slowest pipeline stage.
    """
    parallel = setup.parallel
    last = parallel.pipeline_model_parallel_size - 1
    rounds = parallel.num_virtual_stages_per_pipeline_rank * setup.num_microbatches

    def during(group: str) -> float:
        return slowest(lambda one: one.group == group and not one.once_per_step)

    passes = {
        "compute": flops / speed,
        "recomputation": recomputed / speed,
        "imbalance": flops / speed * _imbalance(setup.config, setup.seq_length, last + 1),
        "tensor-parallel communication": during("tensor"),
        "pipeline communication": during("pipeline"),
    }
    busy = sum(passes.values())
    passes["pipeline bubble"] = busy * last / rounds
    forward = busy / setup.num_microbatches / (1 + BACKWARD_OVER_FORWARD)
    hidden_by_forward = forward if parallel.overlap_param_gather else 0.0
    hidden_by_backward = BACKWARD_OVER_FORWARD * forward if parallel.overlap_grad_reduce else 0.0
    reduction = slowest(lambda one: one.group == "data" and one.operation != "all_gather")
    others = slowest(lambda one: one.once_per_step and one.group != "data")
    gathering = slowest(lambda one: one.group == "data" and one.operation == "all_gather")
    return passes, {
        "gradient reduction": max(0.0, reduction - hidden_by_backward),
        "parameter gathering": max(0.0, gathering - hidden_by_forward),
        "embedding and norm gradients": others,
    }


def _imbalance(config: ModelConfig, seq_length: int, stages: int) -> float:
    """Return the fraction by which FLOPs of the last stage exceed the mean of all stages."""
    head, total = head_forward_flops(config), forward_flops(config, 1, seq_length)
    last = (total - head) / stages + head
    return last * stages / total - 1


def _validation_batches(options: PlanRunOptions, num_domains: int) -> int:
    """Return the number of global batches of all validations, if every valid split is large."""
    validation, batch = options.validation, options.global_batch_size
    if validation.eval_interval == 0:
        return 0
    count, rest = divmod(options.train_iters, validation.eval_interval)
    count += validation.eval_last_step and rest > 0
    if validation.eval_tokens is None:
        return count * validation.eval_iters
    windows = num_domains * (validation.eval_tokens // options.seq_length)
    return count * math.ceil(windows / batch)


def plan_run(options: PlanRunOptions) -> int:
    """Print the prediction; return exit status 1 if the run does not fit in memory, else 0.

    Raises:
        UserError: if the options do not describe a possible run.
    """
    estimate = estimate_run(options)
    peak, memory = max(estimate.peak_bytes) / GB, options.device_memory_gb
    is_too_large = memory is not None and peak >= memory
    if options.json:
        print(json.dumps(estimate.to_json(), indent=1))
    else:
        print("\n".join(_lines(estimate, options)))
    return int(is_too_large)


def _lines(estimate: RunEstimate, options: PlanRunOptions) -> Iterator[str]:
    setup, parallel = estimate.setup, options.parallel
    nodes = math.ceil(estimate.world_size / options.devices_per_node)
    yield estimate.model
    yield (
        f"{estimate.world_size} rank(s) on {nodes} node(s): tensor "
        f"{parallel.tensor_model_parallel_size}, pipeline {parallel.pipeline_model_parallel_size}, "
        f"data {setup.data_parallel_size}; {setup.num_microbatches} micro-batch(es) of "
        f"{options.micro_batch_size} x {options.seq_length} tokens in "
        f"{'bfloat16' if options.bf16 else 'float32'}"
    )
    yield (
        f"{estimate.train_iters:,} steps, {estimate.tokens:.4g} tokens, "
        f"{estimate.train_iters * estimate.step_flops:.3g} FLOPs"
        + (f" and {estimate.recomputed_flops / estimate.step_flops:.0%} recomputation")
        * (estimate.recomputed_flops > 0)
    )
    yield from _domain_lines(estimate.domains or {})
    yield from _memory_lines(estimate, options.device_memory_gb)
    yield from _communication_lines(estimate, options)
    yield from _time_lines(estimate, options)


def _domain_lines(domains: dict[str, DomainEstimate]) -> Iterator[str]:
    if not domains:
        return
    rows = [["domain", "weight", "tokens", "epochs", "limit"]]
    remarks = [""]
    for name, one in domains.items():
        limit = "" if one.max_repetition is None else f"{one.max_repetition:g}"
        rows.append([name, f"{one.weight:.4f}", f"{one.tokens:,}", f"{one.epochs:.2f}", limit])
        remark = ""
        if one.max_repetition is not None and one.epochs > one.max_repetition * (1 + ROUNDING):
            remark = "  exceeds its limit (--max-repetition-action)"
        elif one.epochs < one.planned_epochs * (1 - ROUNDING):
            remark = f"  lowered from {one.planned_epochs:.2f} epochs"
        remarks.append(remark)
    yield ""
    yield from map(operator.add, align_columns(rows), remarks)


def _memory_lines(estimate: RunEstimate, device_memory_gb: float | None) -> Iterator[str]:
    totals = estimate.peak_bytes
    total = max(totals)
    fullest = totals.index(total)
    yield "\npeak memory of each rank"
    for name, size in [*estimate.memory[fullest].items(), ("total", total)]:
        yield f"  {name.replace('_', ' '):<14}{size / GB:10.2f} GB{size / total:7.0%}"
    others = [f"stage {n} {size / GB:.2f}" for n, size in enumerate(totals) if n != fullest]
    if others:
        yield f"pipeline stage {fullest} needs the most; other stages, in GB: {', '.join(others)}"
    if device_memory_gb is not None:
        left = device_memory_gb - total / GB
        if left > 0:
            yield f"fits in {device_memory_gb:g} GB: {left:.2f} GB are left for CUDA"
        else:
            yield (
                f"does not fit in {device_memory_gb:g} GB: {-left:.2f} GB are missing; "
                f"{MEMORY_HINT}"
            )


def _communication_lines(estimate: RunEstimate, options: PlanRunOptions) -> Iterator[str]:
    sent = [sum(one.sent_bytes for one in stage) for stage in estimate.communication]
    busiest = sent.index(max(sent))
    stage, times = estimate.communication[busiest], estimate.communication_seconds[busiest]
    if not stage:
        return
    where = f" of pipeline stage {busiest}" if len(sent) > 1 else ""
    yield f"\nsent by each rank{where} in a step"
    for one, seconds in zip(stage, times, strict=True):
        group = estimate.groups[one.group]
        span = f"{group.nodes} nodes" if group.nodes > 1 else "one node"
        time = "" if seconds is None else f"{1000 * seconds:10.2f} ms"
        yield (
            f"  {one.purpose:<24}{one.operation:<15}{one.group:<10}{one.ranks:>5} ranks, "
            f"{span:<10}{one.calls:>7} calls{one.sent_bytes / GB:12.4f} GB{time}"
        )
    if estimate.groups["tensor"].nodes > 1:
        yield (
            f"tensor-parallel groups span nodes, whose links are slow: use a "
            f"--tensor-model-parallel-size that divides --devices-per-node "
            f"{options.devices_per_node}"
        )


def _time_lines(estimate: RunEstimate, options: PlanRunOptions) -> Iterator[str]:
    missing = [
        flag
        for flag, spans in (("--intra-node-bandwidth", False), ("--inter-node-bandwidth", True))
        for stage, times in zip(estimate.communication, estimate.communication_seconds, strict=True)
        for one, seconds in zip(stage, times, strict=True)
        if seconds is None and (estimate.groups[one.group].nodes > 1) == spans
    ]
    size, seconds = estimate.checkpoint_bytes, estimate.checkpoint_seconds
    kept = options.checkpointing.keep_last_checkpoints
    yield ""
    if estimate.step_seconds is not None:
        assert estimate.total_seconds is not None
        step = sum(estimate.step_seconds.values())
        yield "time of a step"
        for name, part in [*estimate.step_seconds.items(), ("total", step)]:
            if part > 0:
                yield f"  {name:<32}{1000 * part:10.2f} ms{part / step:7.0%}"
        yield (
            f"{options.global_batch_size * options.seq_length / step:,.0f} tokens/s, MFU "
            f"{estimate.mfu:.1%} of {options.peak_tflops:g} TFLOP/s"
        )
        yield "\ntime of the run"
        for name, spent in (
            ("steps", estimate.train_iters * step),
            ("validation, at most", estimate.validation_seconds),
            ("checkpoints", estimate.saving_seconds),
            ("start-up", estimate.start_up_seconds),
            ("total", estimate.total_seconds),
        ):
            if spent:
                yield f"  {name:<32}{spent / 3600:10.2f} h"
        yield (
            f"{estimate.total_seconds / 3600 * estimate.world_size:,.1f} device-hours"
            f"{', without the communication' if missing else ''}"
        )
    duration = "" if seconds is None else f", {seconds:.1f} s to write or to read"
    yield (
        f"checkpoint: {size / GB:.2f} GB{duration}; "
        + (f"{kept} are kept: {kept * size / GB:.2f} GB" if kept else "all are kept")
    )
    if estimate.step_seconds is None:
        missing.append("--tokens-per-second (or --mfu)")
    if seconds is None:
        missing.append("--disk-bandwidth")
    if missing:
        yield f"for more times, pass {', '.join(dict.fromkeys(missing))}"
