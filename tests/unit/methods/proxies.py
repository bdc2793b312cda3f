"""DoReMi and DoGE on the small corpus with a nano proxy of six steps, and what they write."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import CheckpointRecord, TrainingRun
from megatron_chameleon.artifacts.checkpoint import HookState, step_folder
from megatron_chameleon.methods.doge.compute import Doge
from megatron_chameleon.methods.doge.options import DogeOptions, DogeRule
from megatron_chameleon.methods.doremi.compute import Doremi
from megatron_chameleon.methods.doremi.options import DoremiOptions, DoremiRule
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.training.options import OptimizerOptions

STEPS = 6
OPTIONS: dict[str, type[DoremiOptions | DogeOptions]] = {
    "doremi": DoremiOptions,
    "doge": DogeOptions,
}
RULES = {"doremi": DoremiRule(doremi_eta=0.1), "doge": DogeRule(doge_mu=0.2)}
PROXIES: dict[str, dict[str, Any]] = {
    # As in the fixture ``finished_run``, which is the reference.
    "doremi": {"global_batch_size": 8, "micro_batch_size": 4},
    "doge": {
        "global_batch_size": 6,
        "micro_batch_size": 2,
        "seed": 3,
        "optimizer": OptimizerOptions(lr=1e-2, min_lr=1e-3, lr_warmup_iters=2),
    },
}


def method_options(name: str, output: Path, **changes: Any) -> Any:
    """The options of a method; ``changes`` are of the method or of its proxy."""
    own = {field.name for field in dataclasses.fields(OPTIONS[name])}
    proxy = {
        "model_size": "nano",
        "seq_length": 32,
        "train_iters": STEPS,
        "log_interval": 1,
        "save_interval": 3,
        "optimizer": OptimizerOptions(lr=1e-2, lr_warmup_iters=2),
        **PROXIES[name],
        **{field: value for field, value in changes.items() if field not in own},
    }
    settings = {field: value for field, value in changes.items() if field in own}
    settings = {"rule": RULES[name], "proxy": ProxyOptions(**proxy), **settings}
    return OPTIONS[name](output=output, **settings)


def compute(options: DoremiOptions | DogeOptions) -> bool:
    return Doremi.compute(options) if isinstance(options, DoremiOptions) else Doge.compute(options)


def proxy_run(output: Path) -> TrainingRun:
    return TrainingRun.load(output.with_suffix("") / "proxy")


def hooks_of(output: Path) -> list[dict[str, Any]]:
    return [line["hook"] for line in proxy_run(output).metrics()]


def record_of(output: Path) -> CheckpointRecord:
    return CheckpointRecord.load(step_folder(proxy_run(output).root, STEPS))


def state_of(output: Path) -> dict[str, Any]:
    hook = record_of(output).hook
    assert hook is not None
    return hook.state


def edit_state(output: Path, **changes: Any) -> None:
    """Change the state of the hook in the proxy's last checkpoint."""
    record = record_of(output)
    assert record.hook is not None
    hook = HookState(record.hook.name, {**record.hook.state, **changes})
    dataclasses.replace(record, hook=hook).save()
