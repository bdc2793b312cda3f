"""Options of sweep_mixture."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.methods.chameleon import ExtractionOptions, WeightingOptions
from megatron_chameleon.methods.doge import DogeRuleOptions
from megatron_chameleon.methods.doremi import DoremiRuleOptions
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.ranges import CheckedOptions, Count, Positive

MethodName = Literal["chameleon", "doge", "doremi"]
# Method -> the option groups that it uses in addition to `axes` and `proxy`.
GROUPS: dict[MethodName, tuple[str, ...]] = {
    "chameleon": ("extraction", "weighting"),
    "doge": ("doge",),
    "doremi": ("doremi",),
}


@dataclasses.dataclass(frozen=True)
class AxisOptions(CheckedOptions):
    """The hyperparameters to vary, one at a time around the values of the other options."""

    sweep_steps: tuple[Count, ...] | None = None
    """Steps of one proxy run, at whose checkpoints the weights are computed (paper: 1000 2000 5000
    10000). The run has as many steps as the largest value, and its learning rate decays to its last
    step. Unless this is the value of --train-iters, the proxy of the centre is another run."""
    sweep_model: tuple[str, ...] | None = None
    """Values of --model (paper: 60m 82m 124m 210m)."""
    sweep_ridge: tuple[Positive, ...] | None = None
    """Values of --ridge (paper: 1 10 100). These values need no additional training or
    embedding."""
    sweep_num_windows: tuple[Count, ...] | None = None
    """Values of --num-windows (paper: 2k 4k 8k)."""


@dataclasses.dataclass(frozen=True)
class SweepOptions(CheckedOptions):
    """Compute the same mixture several times, with one hyperparameter changed at a time.

    The sweep shows how much the weights depend on each hyperparameter. The other options define the
    centre of the sweep. The same command resumes an interrupted sweep; with more values, it
    extends a finished sweep. Existing artifacts are reused.
    """

    corpus: Path
    """Folder written by preprocess_data."""
    output: Path
    """Run folder. Proxies, embeddings, mixtures and the report are written to its stage folders,
    and sweep.json lists the results."""
    method: MethodName = "chameleon"
    """The method that computes the mixtures."""
    mode: Literal["pretrain", "finetune"] = "pretrain"
    """'pretrain' upweights broad domains; 'finetune' upweights distinct domains."""
    axes: AxisOptions = dataclasses.field(default_factory=AxisOptions)
    proxy: ProxyOptions = dataclasses.field(default_factory=ProxyOptions)
    extraction: ExtractionOptions = dataclasses.field(default_factory=ExtractionOptions)
    weighting: WeightingOptions = dataclasses.field(default_factory=WeightingOptions)
    doge: DogeRuleOptions = dataclasses.field(default_factory=DogeRuleOptions)
    doremi: DoremiRuleOptions = dataclasses.field(default_factory=DoremiRuleOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that the method does not use."""
        super().__post_init__()
        others = [group for groups in GROUPS.values() for group in groups]
        unused = [group for group in others if group not in GROUPS[self.method]]
        if self.method != "chameleon":
            unused.append("mode")
        self.reject_changed(unused, f"--method {self.method} does not use it")
