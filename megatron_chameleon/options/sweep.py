"""Options of tools/sweep_mixture.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from megatron_chameleon.options.doge import DogeRule
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.mixture import ExtractionOptions, RecipeOptions
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.ranges import Count, Positive

Method = Literal["chameleon", "doge", "doremi"]


@dataclasses.dataclass(frozen=True)
class AxisOptions:
    """What is varied. Along each axis one knob takes these values while the others stay."""

    sweep_train_iters: tuple[Count, ...] | None = None
    """Values of --train-iters (paper: 1000 2000 5000 10000). Each is a run of its own, with a
    learning rate that decays to its last step."""
    sweep_model_size: tuple[str, ...] | None = None
    """Values of --model-size (paper: 60m 82m 124m 210m)."""
    sweep_ridge: tuple[Positive, ...] | None = None
    """Values of --ridge (paper: 1 10 100). Nothing is trained or embedded for them."""
    sweep_num_windows: tuple[Count, ...] | None = None
    """Values of --num-windows (paper: 2k 4k 8k)."""


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Find the same mixture again and again, with one knob changed at a time.

    Weights that stay where they are do not depend on the knob. The other options say where the
    knobs stand at the centre. Run the same command again to go on after an interruption, or with
    more values: what is there already is used.
    """

    corpus: Path
    """Folder written by tools/preprocess_data.py."""
    output: Path
    """Run folder: proxies, embeddings, mixtures and the report go into its stages, and sweep.json
    says which is which."""
    method: Method = "chameleon"
    """What finds the mixtures."""
    mode: Literal["pretrain", "finetune"] = "pretrain"
    """'pretrain' weights broad domains up, 'finetune' distinct ones."""
    axes: AxisOptions = dataclasses.field(default_factory=AxisOptions)
    proxy: ProxyOptions = dataclasses.field(default_factory=ProxyOptions)
    extraction: ExtractionOptions = dataclasses.field(default_factory=ExtractionOptions)
    weighting: RecipeOptions = dataclasses.field(default_factory=RecipeOptions)
    doge: DogeRule = dataclasses.field(default_factory=DogeRule)
    doremi: DoremiRule = dataclasses.field(default_factory=DoremiRule)
