"""Sweeps: compute the same mixture several times, with one hyperparameter changed at a time.

A method declares itself by ``SWEEP`` in the ``__init__.py`` of its folder; options.py collects
these declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from megatron_chameleon.artifacts import SettingValue
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.ranges import CheckedOptions, Count

Values = dict[str, SettingValue]
"""Name of an option, such as ``ridge`` -> its value at a point of the sweep."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """A hyperparameter of one method that a sweep can vary.

    Attributes:
        type: type of the flag: a tuple of values.
        help: help text of its flag.
        form: format of a value in messages.
    """

    type: Any
    help: str
    form: str


@dataclasses.dataclass(frozen=True)
class SweptMethod:
    """The ``SWEEP`` of a method's folder. It imports no torch.

    Attributes:
        name: the value of ``--method``.
        point: function of a point, as MODULE:FUNCTION: (options, values, proxy's options) -> Point.
        groups: name -> options that the method uses in addition to ``axes`` and ``proxy``.
        axes: option -> hyperparameter that only this method has.
        centre: options -> values of ``axes`` at the centre, if they can be varied.
        has_mode: whether the method uses ``--mode``.
    """

    name: str
    point: str
    groups: Mapping[str, type[CheckedOptions]]
    axes: Mapping[str, Axis] = dataclasses.field(default_factory=dict)
    centre: Callable[[Any], Values] = lambda _options: {}
    has_mode: bool = False


@dataclasses.dataclass(frozen=True)
class ProxyAxes(CheckedOptions):
    """The hyperparameters to vary, one at a time around the values of the other options."""

    sweep_steps: tuple[Count, ...] | None = None
    """Steps of one proxy run, at whose checkpoints the weights are computed (paper: 1000 2000 5000
    10000). The run has as many steps as the largest value, and its learning rate decays to its last
    step. Unless this is the value of --train-iters, the proxy of the centre is another run."""
    sweep_model: tuple[str, ...] | None = None
    """Values of --model (paper: 60m 82m 124m 210m)."""


@dataclasses.dataclass(frozen=True)
class SharedSweepOptions(CheckedOptions):
    """Compute the same mixture several times, with one hyperparameter changed at a time.

    The sweep shows how much the weights depend on each hyperparameter. The other options define the
    centre of the sweep. The same command resumes an interrupted sweep; with more values, it
    extends a finished sweep. Existing artifacts are reused.
    """

    METHODS: ClassVar[Mapping[str, SweptMethod]] = {}

    corpus: Path
    """Folder written by preprocess_data."""
    output: Path
    """Run folder. Proxies, embeddings, mixtures and the report are written to its stage folders,
    and sweep.json lists the results."""
    method: str = "chameleon"
    """The method that computes the mixtures."""
    mode: Literal["pretrain", "finetune"] = "pretrain"
    """'pretrain' upweights broad domains; 'finetune' upweights distinct domains."""
    axes: ProxyAxes = dataclasses.field(default_factory=ProxyAxes)
    proxy: ProxyOptions = dataclasses.field(default_factory=ProxyOptions)

    def __post_init__(self) -> None:
        """Raise UserError for options that the method does not use."""
        super().__post_init__()
        used = self.METHODS[self.method]
        groups = [group for each in self.METHODS.values() for group in each.groups]
        unused = [group for group in groups if group not in used.groups]
        if not used.has_mode:
            unused.append("mode")
        self.reject_changed(unused, f"--method {self.method} does not use it")
