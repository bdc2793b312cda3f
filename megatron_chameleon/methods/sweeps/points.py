"""Which mixtures a sweep consists of: the centre, and along each axis one changed knob."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import KnobValue
from megatron_chameleon.artifacts.files import sha256_of_json
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.changed_flags import changed_flags
from megatron_chameleon.methods.common.watched_proxy import PROXY
from megatron_chameleon.mixture.doge import DogeRecipe
from megatron_chameleon.mixture.doremi import DoremiRecipe
from megatron_chameleon.model.sizes import ModelShape, model_size
from megatron_chameleon.options.proxy import ProxyOptions
from megatron_chameleon.options.sweep import AxisOptions, SweepOptions
from megatron_chameleon.training.stopping import StopRequests

Knobs = dict[str, KnobValue]
"""Knob -> where it stands. A knob has the name of the option that sets it at the centre."""
WatchedRule = DogeRecipe | DoremiRecipe

# Where a sweep puts what it makes. The mixtures have a folder of their own: a report shows those
# beside it as ones to train by.
PROXIES, STORES, MIXTURES = "2-proxy", "3-embeddings", "4-mixture/sweep"
DIGITS_OF_A_RULE = 8
# Groups of options that every method reads.
FOR_ALL = ("axes", "proxy")
_TOLD = {
    "model_size": "{}",
    "train_iters": "{:,} steps",
    "num_windows": "{:,} windows",
    "ridge": "ridge {:g}",
}


@dataclasses.dataclass(frozen=True)
class PointFiles:
    """Where the artifacts of a point lie: the mixture, and the folders that it was made from."""

    mixture: Path
    made_from: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class SweptMethod:
    """What a sweep has to know of a method.

    Attributes:
        centre: the knobs that the method has, where the options put them.
        check: raises UserError if the mixture at these knobs could not be found.
        compute: finds and writes the mixture at these knobs; False if it was asked to stop. Every
            rank calls it.
        files: where it writes.
        groups: the groups of a sweep's options that it reads, beside those that all methods do.
    """

    centre: Callable[[SweepOptions], Knobs]
    check: Callable[[SweepOptions, Knobs], None]
    compute: Callable[[SweepOptions, Knobs, StopRequests], bool]
    files: Callable[[SweepOptions, Knobs], PointFiles]
    groups: tuple[str, ...]


def told(knobs: Knobs) -> str:
    """``knobs`` for a message: '82m, 2,000 steps, 4,096 windows, ridge 10'."""
    return ", ".join(form.format(knobs[knob]) for knob, form in _TOLD.items() if knob in knobs)


def size_and_steps(options: SweepOptions) -> Knobs:
    """Where the options put the knobs that every proxy has."""
    return {"model_size": options.proxy.model_size, "train_iters": options.proxy.train_iters}


def proxy_at(options: SweepOptions, knobs: Knobs) -> ProxyOptions:
    """How the proxy of a point is trained."""
    return dataclasses.replace(
        options.proxy,
        model_size=str(knobs["model_size"]),
        train_iters=int(knobs["train_iters"]),
    )


def proxy_name(options: SweepOptions, knobs: Knobs) -> str:
    """The name of a point's proxy, as it is trained for Chameleon."""
    return f"{knobs['model_size']}-{knobs['train_iters']}steps-seed{options.proxy.seed}"


def watched_name(
    options: SweepOptions, knobs: Knobs, rule: WatchedRule, default: WatchedRule
) -> str:
    """The name of a proxy that the method watches by ``rule``, and of its mixture.

    A rule other than ``default`` is in it by a digest, so that one sweep after another may try
    several in the same folder.
    """
    name = f"{options.method}-{proxy_name(options, knobs)}"
    if rule == default:
        return name
    return f"{name}-{sha256_of_json(dataclasses.asdict(rule))[:DIGITS_OF_A_RULE]}"


def watched_files(
    options: SweepOptions,
    knobs: Knobs,
    rule: WatchedRule,
    default: WatchedRule,
    made_before: Sequence[Path] = (),
) -> PointFiles:
    """Where the mixture lies and the proxy that is watched for it, the proxy last.

    Args:
        options: of the sweep.
        knobs: of the point.
        rule: by which the proxy is watched.
        default: the method's rule where none is given.
        made_before: folders of what is trained before the proxy.
    """
    name = watched_name(options, knobs, rule, default)
    return PointFiles(
        mixture=options.output / MIXTURES / f"{name}.json",
        made_from=(*made_before, options.output / PROXIES / name / PROXY),
    )


def watched_options(options: SweepOptions, knobs: Knobs, files: PointFiles) -> dict[str, Any]:
    """The options that every method has which watches a proxy, at one point."""
    return {
        "corpus": options.corpus,
        "output": files.mixture,
        "work_dir": files.made_from[-1].parent,
        "proxy": proxy_at(options, knobs),
    }


def require_pretraining(options: SweepOptions, method: str) -> None:
    """Raises UserError if weights are asked for that only Chameleon has."""
    if options.mode != "pretrain":
        raise UserError(
            f"--mode {options.mode}: {method} has no weights of that kind; leave it out, or give "
            "--method chameleon"
        )


def check_groups(options: SweepOptions, method: SweptMethod) -> None:
    """Raises UserError for an option that the method does not read."""
    default = SweepOptions(corpus=options.corpus, output=options.output)
    for group in dataclasses.fields(SweepOptions):
        given = getattr(options, group.name)
        if group.name in (*FOR_ALL, *method.groups) or not dataclasses.is_dataclass(given):
            continue
        for flag, value in changed_flags(given, getattr(default, group.name)):
            raise UserError(
                f"{flag} {value}: --method {options.method} has no use for it; leave it out"
            )


def axes_of(options: AxisOptions, centre: Knobs, method: str) -> dict[str, list[KnobValue]]:
    """Knob -> its values in order, each once, the centre's among them; for the knobs to vary.

    Raises:
        UserError: if no knob is to be varied, one without a value, or one that ``method`` does
            not have at ``centre``.
    """
    axes = {}
    for field in dataclasses.fields(options):
        values, knob = getattr(options, field.name), field.name.removeprefix("sweep_")
        if values is None:
            continue
        flag = f"--{field.name.replace('_', '-')}"
        if not values:
            raise UserError(f"{flag}: give the values to try, or leave it out")
        if knob not in centre:
            raise UserError(
                f"{flag}: {method} has no such knob, or none that stands at a number by these "
                f"options; leave it out, or give --{knob.replace('_', '-')} for the centre"
            )
        axes[knob] = _in_order(knob, [centre[knob], *values])
    if not axes:
        flags = (f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options))
        raise UserError(f"there is nothing to vary: give at least one of {', '.join(flags)}")
    return axes


def points_of(axes: dict[str, list[KnobValue]], centre: Knobs) -> list[Knobs]:
    """The centre, then the other points axis by axis; no point twice."""
    points = [centre]
    for knob, values in axes.items():
        points += [{**centre, knob: value} for value in values if value != centre[knob]]
    return points


def _in_order(knob: str, values: Sequence[KnobValue]) -> list[KnobValue]:
    """Numbers by size, models by their parameters without the embedding, each once."""
    once = list(dict.fromkeys(values))
    if knob == "model_size":
        return sorted(once, key=lambda name: ModelShape(model_size(str(name)), 0, 0).num_parameters)
    return sorted(once, key=float)
