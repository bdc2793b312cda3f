"""A point of a sweep of Chameleon."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_chameleon.artifacts import Corpus, EmbeddingStore
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.methods.chameleon import ChameleonOptions
from megatron_chameleon.methods.chameleon.compute import (
    compute_mixture,
    default_window_length,
    embedding_recipe,
)
from megatron_chameleon.methods.options import ProxyOptions
from megatron_chameleon.methods.output import require_training_tokens
from megatron_chameleon.methods.sweep import Values
from megatron_chameleon.methods.sweep.sweep import MIXTURES, STORES, Point, plain_run, require_kept
from megatron_chameleon.methods.train_proxy import forward_only, train_proxy
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.readout import check_layer, check_window, default_window
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.stopping import StopRequests


def chameleon_point(options: Any, values: Values, proxy: ProxyOptions) -> Point:
    """Construct a point of a sweep: a proxy, its embeddings, and the mixture."""
    run = plain_run(options, proxy)
    windows, weighting, step = int(values["num_windows"]), options.weighting, int(values["steps"])
    name, checkpoint = run.run_dir.name, run.run_dir
    if step != run.train_iters:
        name, checkpoint = f"{name}-step{step}", step_folder(run.run_dir, step)
    name = f"{name}-{windows}windows"
    store, name = options.output / STORES / name, f"chameleon-{options.mode}-{name}"
    if "ridge" in values:
        weighting = dataclasses.replace(weighting, ridge=float(values["ridge"]))
        name = f"{name}-ridge{values['ridge']:g}"
    mixture = options.output / MIXTURES / f"{name}.json"
    method = ChameleonOptions(
        corpus=options.corpus,
        checkpoint=checkpoint,
        output=mixture,
        mode=options.mode,
        store=store,
        extraction=dataclasses.replace(options.extraction, num_windows=windows),
        weighting=weighting,
        parallel=forward_only(run.parallel),
    )

    def check() -> None:
        plan, corpus = plan_training(run), Corpus.load(options.corpus)
        check_run_folder(plan)
        require_kept(run.run_dir, step)
        weighting.resolve()
        extraction, config = method.extraction, plan.config
        layer = check_layer(config.num_layers, extraction.layer)
        default = default_window_length(extraction, default_window(config))
        window = check_window(config.max_positions, default, extraction.window_length)
        recipe = embedding_recipe(extraction, "", layer, window, corpus.tokenizer.sha256)
        check_model_layout(config, method.parallel, window)
        if EmbeddingStore.exists(store):
            stored = EmbeddingStore.load(store)
            # The proxy's hash is unknown before its training, so it is not compared.
            model_hash = stored.recipe.model_hash
            stored.require_recipe(dataclasses.replace(recipe, model_hash=model_hash))
        require_training_tokens(corpus, corpus.names, "to embed")

    def compute(stops: StopRequests) -> bool:
        finished = train_proxy(run, stops, name="Chameleon's proxy")
        # A stop signal ends the process while embedding, but the store keeps embedded domains.
        if finished:
            compute_mixture(method)
        return finished

    return Point(values, mixture, (run.run_dir, store), check, compute)
