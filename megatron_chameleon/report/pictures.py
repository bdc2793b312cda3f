"""The pictures of a report with their captions, and what they show in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.errors import UserError
from megatron_chameleon.report.comparison import BASELINE_METHOD, run_labels
from megatron_chameleon.report.curves import Curve, RunCurves, run_curves
from megatron_chameleon.report.document import Picture
from megatron_chameleon.report.figures import affinity_figure, loss_figure, weights_figure
from megatron_chameleon.report.names import unique_labels
from megatron_chameleon.report.run_folder import RunFolder
from megatron_chameleon.report.shown_domains import (
    bar_domains,
    bars_told,
    panel_domains,
    panels_told,
)
from megatron_chameleon.report.stability import (
    CAPTION,
    PICTURE,
    StabilityAxis,
    stability_words,
)
from megatron_chameleon.report.stability_figure import stability_figure
from megatron_chameleon.report.tables import format_weight, mode_of
from megatron_chameleon.report.window_map import WindowMap, window_map
from megatron_chameleon.report.window_map_figure import centroids, window_map_figure

MODE_LABELS = {"pretrain": "pretraining", "finetune": "fine-tuning"}
# A description names so many domains and runs; the tables have the others.
MOST_NAMED = 3
MOST_RUNS = 8


def weights_picture(folder: RunFolder) -> Picture:
    """A bar per domain and mixture."""
    picture = Picture("weights", "Weight of each domain")
    mixtures = weight_series(folder)
    if not mixtures:
        return dataclasses.replace(picture, missing="4-mixture holds no mixture but uniform")
    whiskers = any(mixture.intervals for mixture in mixtures.values())
    return dataclasses.replace(
        picture,
        caption="Share of training tokens by each mixture; the dashed line is uniform."
        + (" Whiskers are bootstrap intervals." if whiskers else "")
        + bars_told(mixtures),
        description=_weights_told(mixtures),
        figure=weights_figure(mixtures),
    )


def affinity_picture(folder: RunFolder) -> Picture:
    """The heat map of the first mixture that has an affinity."""
    picture = Picture("affinity", "Affinity of the domains")
    for label, mixture in weight_series(folder).items():
        if mixture.affinity is None:
            continue
        affinity, names = _square(label, mixture), list(mixture.weights)
        return dataclasses.replace(
            picture,
            caption=f"Inner products of the domains' embeddings, of the {label} mixture: red where "
            "two domains are alike, blue where they are opposites, white where neither.",
            description=_affinity_told(affinity, names),
            figure=affinity_figure(affinity, names),
        )
    return dataclasses.replace(picture, missing="no mixture in 4-mixture has an affinity matrix")


def loss_picture(folder: RunFolder) -> Picture:
    """Loss curves of the base runs, and of the proxies."""
    picture = Picture("loss", "Training loss")
    labels = run_labels(folder.base_runs, folder.base_runs)
    # Uniform first, as in the tables: a run has one colour throughout.
    names = sorted(
        folder.base_runs, key=lambda n: folder.base_runs[n].mixture_method != BASELINE_METHOD
    )
    runs = [run_curves(labels[name], folder.base_runs[name]) for name in names]
    proxies = [run_curves(f"proxy {name}", run) for name, run in folder.proxies.items()]
    if not any(len(run.total.steps) for run in (*runs, *proxies)):
        return dataclasses.replace(picture, missing="no training run has metrics")
    return dataclasses.replace(
        picture,
        caption="All domains together above, each by itself below. Thin lines are the recorded "
        "losses, bold ones their running mean, dots losses on held-out text." + panels_told(runs),
        description=_losses_told(runs, proxies, folder.base_runs),
        figure=loss_figure(runs, proxies),
    )


def stability_picture(swept: Sequence[StabilityAxis]) -> Picture:
    """A panel per knob of a sweep."""
    sentences = [f"{stability_words(axis)}." for axis in swept]
    return Picture(
        PICTURE,
        CAPTION,
        caption="A panel for each knob, a line for each domain: flat lines are weights that do not "
        "depend on the knob. The dashed line is the centre of the sweep.",
        description=" ".join([f"Line charts of the weights over {len(swept)} knobs.", *sentences]),
        figure=stability_figure(swept),
    )


def windows_picture(folder: RunFolder) -> Picture:
    """A point for each window of text."""
    picture = Picture("windows", "Map of window embeddings")
    found = window_map(folder)
    if found is None:
        return dataclasses.replace(picture, missing="no embedding store holds windows to draw")
    return dataclasses.replace(
        picture,
        caption=f"A point for each window of text, near others with like embeddings: {found.told}.",
        description=_windows_told(found),
        figure=window_map_figure(found),
    )


def weight_series(folder: RunFolder) -> dict[str, Mixture]:
    """Label -> mixture for the bar chart: pretraining first, uniform left out."""
    modes = {name: mode_of(name, mixture) for name, mixture in folder.mixtures.items()}
    order = [*MODE_LABELS, None]
    names = sorted(
        (name for name, m in folder.mixtures.items() if m.method != BASELINE_METHOD),
        key=lambda name: order.index(modes[name]) if modes[name] in order else len(order),
    )
    shown = [modes[name] for name in names]
    labels = unique_labels(
        {
            name: MODE_LABELS.get(mode or "", name) if shown.count(mode) == 1 else name
            for name, mode in zip(names, shown, strict=True)
        }
    )
    return {labels[name]: folder.mixtures[name] for name in names}


def _square(label: str, mixture: Mixture) -> NDArray[np.float64]:
    """The affinity as an array [k, k]."""
    rows, count = mixture.affinity or [], len(mixture.weights)
    if len(rows) != count or any(len(row) != count for row in rows):
        raise UserError(
            f"the {label} mixture in 4-mixture: field affinity is not {count} x {count}, which its "
            "weights ask for; run tools/compute_mixture.py again"
        )
    return np.array(rows, dtype=np.float64)


def _weights_told(mixtures: Mapping[str, Mixture]) -> str:
    sentences = []
    for label, mixture in mixtures.items():
        ranked = sorted(mixture.weights.items(), key=lambda item: -item[1])
        heaviest = ", ".join(f"{name} {format_weight(w)}" for name, w in ranked[:MOST_NAMED])
        name, weight = ranked[-1]
        sentences.append(
            f"{label}: the heaviest are {heaviest}; the lightest is {name} {format_weight(weight)}."
        )
    shown = len(bar_domains(mixtures))
    return " ".join([f"Bar chart of the weights of {shown} domains.", *sentences])


def _affinity_told(affinity: NDArray[np.float64], names: Sequence[str]) -> str:
    told = f"Heat map of {len(names)} by {len(names)} domains."
    if len(names) < 2:
        return told
    rows, columns = np.triu_indices(len(names), k=1)
    pairs = affinity[rows, columns]
    most, least = (
        f"{names[rows[i]]} and {names[columns[i]]} ({pairs[i]:.3g})"
        for i in (pairs.argmax(), pairs.argmin())
    )
    return f"{told} Most alike are {most}, least alike {least}."


def _windows_told(found: WindowMap) -> str:
    told = f"Scatter plot of {len(found.points):,} windows of {len(found.names)} domains."
    if len(found.names) < 2:
        return told
    centres = centroids(found)
    rows, columns = np.triu_indices(len(found.names), k=1)
    distances = np.linalg.norm(centres[rows] - centres[columns], axis=1)
    nearest, farthest = (
        f"{found.names[rows[i]]} and {found.names[columns[i]]}"
        for i in (distances.argmin(), distances.argmax())
    )
    return f"{told} On average {nearest} lie nearest to each other, {farthest} farthest apart."


def _losses_told(
    runs: Sequence[RunCurves], proxies: Sequence[RunCurves], found: Mapping[str, TrainingRun]
) -> str:
    shown = [run for run in (*runs, *proxies) if len(run.total.steps)]
    sentences = [f"{run.label} goes {_ends(run.total.smoothed())}." for run in shown[:MOST_RUNS]]
    if len(shown) > MOST_RUNS:
        sentences.append(f"{len(shown) - MOST_RUNS} more runs are drawn.")
    domains = panel_domains(runs)
    panels = f", and a panel for each of {len(domains)} domains" if domains else ""
    return " ".join(
        [f"Line chart of the training loss of {len(found)} base runs{panels}.", *sentences]
    )


def _ends(curve: Curve) -> str:
    """For example 'from 8.20 at step 4 to 3.11 at step 197'."""
    first, last = (f"{curve.losses[i]:.2f} at step {curve.steps[i]:,.0f}" for i in (0, -1))
    return f"from {first} to {last}"
