"""Chameleon at one point of a sweep: a proxy, its embeddings, and the weights they give."""

from __future__ import annotations

import dataclasses

from megatron_chameleon.artifacts import Corpus, EmbeddingStore
from megatron_chameleon.embedding.embed import require_recipe
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.common.check_text import check_text
from megatron_chameleon.methods.common.proxy_run import (
    forward_only,
    train_proxy,
    training_options,
    way_out_of,
)
from megatron_chameleon.methods.common.work_dir import BY_OUTPUT
from megatron_chameleon.methods.leverage.compute import compute_mixture
from megatron_chameleon.methods.leverage.plan import (
    embedding_recipe,
    resolve_options,
)
from megatron_chameleon.methods.sweeps.points import (
    MIXTURES,
    PROXIES,
    STORES,
    Knobs,
    PointFiles,
    SweptMethod,
    proxy_at,
    proxy_name,
    size_and_steps,
)
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.options.ranges import check_ranges
from megatron_chameleon.options.sweep import SweepOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.resume import check_run_folder
from megatron_chameleon.training.stopping import StopRequests


def centre_of(options: SweepOptions) -> Knobs:
    """Where the options put Chameleon's knobs.

    The ridge is the recipe's own unless given. A recipe may take it relative to the embeddings; it
    then stands at no number, and is no knob.
    """
    knobs: Knobs = {**size_and_steps(options), "num_windows": options.extraction.num_windows}
    recipe = resolve_options(options.weighting)
    return knobs if recipe.ridge_relative else {**knobs, "ridge": recipe.ridge}


def files_of(options: SweepOptions, knobs: Knobs) -> PointFiles:
    """The proxy's run, the embedding store and the mixture; points share what is alike."""
    proxy = proxy_name(options, knobs)
    store = f"{proxy}-{knobs['num_windows']}windows"
    ridge = f"-ridge{knobs['ridge']:g}" if "ridge" in knobs else ""
    return PointFiles(
        mixture=options.output / MIXTURES / f"chameleon-{options.mode}-{store}{ridge}.json",
        made_from=(options.output / PROXIES / proxy, options.output / STORES / store),
    )


def run_options(options: SweepOptions, knobs: Knobs) -> PretrainOptions:
    """The run of the proxy."""
    run_dir = files_of(options, knobs).made_from[0]
    return training_options(proxy_at(options, knobs), options.corpus, run_dir)


def mixture_options(options: SweepOptions, knobs: Knobs) -> ChameleonOptions:
    """What finds the weights with that proxy."""
    files = files_of(options, knobs)
    run_dir, store = files.made_from
    weighting = options.weighting
    if "ridge" in knobs:
        weighting = dataclasses.replace(weighting, ridge=float(knobs["ridge"]))
    return ChameleonOptions(
        corpus=options.corpus,
        checkpoint=run_dir,
        output=files.mixture,
        mode=options.mode,
        store=store,
        extraction=dataclasses.replace(options.extraction, num_windows=int(knobs["num_windows"])),
        weighting=weighting,
        parallel=forward_only(options.proxy.parallel),
    )


def check(options: SweepOptions, knobs: Knobs) -> None:
    """Raises UserError for what would end the point after the proxy has been trained, or before."""
    run = run_options(options, knobs)
    proxy = plan_training(run, way_out_of(run.run_dir, BY_OUTPUT))
    check_run_folder(proxy)
    shape = proxy.shape
    weighing = mixture_options(options, knobs)
    check_ranges(weighing)
    resolve_options(weighing.weighting)
    corpus = Corpus.load(options.corpus)
    recipe = embedding_recipe(weighing.extraction, shape, "", corpus.tokenizer.sha256)
    check_model_layout(shape.size, weighing.parallel, recipe.window_length)
    assert weighing.store is not None
    if EmbeddingStore.exists(weighing.store):
        there = EmbeddingStore.load(weighing.store).recipe
        # Which proxy it is of shows when that is trained.
        require_recipe(
            weighing.store, there, dataclasses.replace(recipe, model_hash=there.model_hash)
        )
    check_text(corpus, corpus.names, "to embed")


def compute(options: SweepOptions, knobs: Knobs, stops: StopRequests) -> bool:
    """Train the proxy unless it is there, embed what is not, and write the weights."""
    # While embedding, a signal ends the process: what is embedded is kept.
    run = run_options(options, knobs)
    finished = train_proxy(run, stops, what="Chameleon's proxy", elsewhere=BY_OUTPUT)
    if finished:
        compute_mixture(mixture_options(options, knobs))
    return finished


CHAMELEON = SweptMethod(
    centre=centre_of,
    check=check,
    compute=compute,
    files=files_of,
    groups=("extraction", "weighting"),
)
