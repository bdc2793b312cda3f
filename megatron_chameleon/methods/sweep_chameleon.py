"""Chameleon at one point of a sweep: a proxy, its embeddings, and the weights they give."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, EmbeddingStore, TrainingRun
from megatron_chameleon.embedding.fill_store import require_recipe
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import compute_mixture
from megatron_chameleon.methods.chameleon_plan import (
    check_numbers,
    check_text,
    embedding_recipe,
    resolve_options,
)
from megatron_chameleon.methods.sweep_points import Knobs, PointFiles, SweptMethod
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.options.mixture import MixtureOptions
from megatron_chameleon.options.parallel import ParallelOptions
from megatron_chameleon.options.sweep import ProxyOptions, SweepOptions
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.pretrain import pretrain
from megatron_chameleon.training.stopping import StopRequests

# The mixtures have a folder of their own: a report shows those beside it as ones to train by.
PROXIES, STORES, MIXTURES = "2-proxy", "3-embeddings", "4-mixture/sweep"


def centre_of(options: SweepOptions) -> Knobs:
    """Where the options put Chameleon's knobs.

    The ridge is the recipe's own unless given. A recipe may take it relative to the embeddings; it
    then stands at no number, and is no knob.
    """
    proxy = options.proxy
    knobs: Knobs = {
        "model_size": proxy.model_size,
        "train_iters": proxy.train_iters,
        "num_windows": options.extraction.num_windows,
    }
    recipe = resolve_options(options.weighting)
    return knobs if recipe.ridge_relative else {**knobs, "ridge": recipe.ridge}


def files_of(options: SweepOptions, knobs: Knobs) -> PointFiles:
    """The proxy's run, the embedding store and the mixture; points share what is alike."""
    proxy = f"{knobs['model_size']}-{knobs['train_iters']}steps-seed{options.proxy.seed}"
    store = f"{proxy}-{knobs['num_windows']}windows"
    ridge = f"-ridge{knobs['ridge']:g}" if "ridge" in knobs else ""
    return PointFiles(
        mixture=options.output / MIXTURES / f"chameleon-{options.mode}-{store}{ridge}.json",
        made_from=(options.output / PROXIES / proxy, options.output / STORES / store),
    )


def training_options(options: SweepOptions, knobs: Knobs) -> PretrainOptions:
    """The run of the proxy."""
    fields = {f.name: getattr(options.proxy, f.name) for f in dataclasses.fields(ProxyOptions)}
    return PretrainOptions(
        run_dir=files_of(options, knobs).made_from[0],
        corpus=options.corpus,
        mixture="uniform",
        **{
            **fields,
            "model_size": str(knobs["model_size"]),
            "train_iters": int(knobs["train_iters"]),
        },
    )


def mixture_options(options: SweepOptions, knobs: Knobs) -> MixtureOptions:
    """What finds the weights with that proxy."""
    files = files_of(options, knobs)
    run_dir, store = files.made_from
    weighting = options.weighting
    if "ridge" in knobs:
        weighting = dataclasses.replace(weighting, ridge=float(knobs["ridge"]))
    return MixtureOptions(
        corpus=options.corpus,
        checkpoint=run_dir,
        output=files.mixture,
        mode=options.mode,
        store=store,
        extraction=dataclasses.replace(options.extraction, num_windows=int(knobs["num_windows"])),
        weighting=weighting,
        parallel=forward_only(options.proxy.parallel),
    )


def forward_only(options: ParallelOptions) -> ParallelOptions:
    """How the ranks share a model that is only read; interleaved stages are for training."""
    names = [field.name for field in dataclasses.fields(ParallelOptions)]
    return ParallelOptions(**{name: getattr(options, name) for name in names})


def check(options: SweepOptions, knobs: Knobs) -> None:
    """Raises UserError for what would end the point after the proxy has been trained, or before."""
    shape = plan_training(training_options(options, knobs)).shape
    weighing = mixture_options(options, knobs)
    check_numbers(weighing)
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
    check_text(corpus, corpus.names)


def compute(options: SweepOptions, knobs: Knobs, stops: StopRequests) -> bool:
    """Train the proxy unless it is there, embed what is not, and write the weights."""
    training, weighing = training_options(options, knobs), mixture_options(options, knobs)
    run_dir = training.run_dir
    try:
        with stops:  # while embedding, a signal ends the process: what is embedded is kept
            pretrain(training, stops=stops)
    except UserError as error:
        raise UserError(f"{error} (in a sweep, --run-dir is {run_dir})") from error
    gc.collect()  # a trainer and its model refer to each other, and the next model needs the room
    with distributed(weighing.parallel, seed=0):
        finished = from_main(lambda: _is_finished(run_dir))
    if finished:
        compute_mixture(weighing)
    return finished


def _is_finished(run_dir: Path) -> bool:
    """Whether the proxy has been trained to its end; one that was stopped at once has no record."""
    return TrainingRun.exists(run_dir) and TrainingRun.load(run_dir).status == "finished"


CHAMELEON = SweptMethod(centre=centre_of, check=check, compute=compute, files=files_of)
