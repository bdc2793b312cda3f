"""DoReMi end to end: train the reference and the proxy, write the mixture.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1. The base model is trained with the mixture
afterwards, by tools/pretrain_gpt.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from megatron_chameleon.artifacts import Corpus, Mixture, MixtureWarning, Stopwatch, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.record import check_output, json_values
from megatron_chameleon.checkpoint.load import require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doremi.hook import (
    ExcessLossReweighting,
    Reference,
    parse_state,
)
from megatron_chameleon.methods.doremi.options import DoremiOptions, DoremiRule
from megatron_chameleon.methods.output import epoch_limit
from megatron_chameleon.methods.proxy import (
    PROXY,
    HookedProxy,
    WeightPath,
    forward_only,
    is_finished,
    resolve_work_dir,
    train_proxy,
    training_options,
    write_mean_weights,
)
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.doremi import RECIPES, DoremiRecipe
from megatron_chameleon.mixture.natural import natural_weights
from megatron_chameleon.model.flops import PaperSettings, paper_flops
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import ModelShape, name_of
from megatron_chameleon.parallel.layout import distributed, from_main
from megatron_chameleon.ranges import flag_of
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.run_folder import FRESH_START
from megatron_chameleon.training.stopping import StopRequests

REFERENCE, NATURAL = "reference", "natural"


@dataclasses.dataclass(frozen=True)
class DoremiPlan:
    """Validated options and the artifacts that they name.

    Attributes:
        options: of the method.
        corpus: of the domains.
        recipe: of the update rule.
        reference_dir: run folder of the reference.
        reference_run: its training options; None for a user-supplied reference.
        proxy: its run.
        shape: of the proxy.
    """

    options: DoremiOptions
    corpus: Corpus
    recipe: DoremiRecipe
    reference_dir: Path
    reference_run: PretrainOptions | None
    proxy: HookedProxy
    shape: ModelShape

    def reference(self) -> Reference:
        """The trained reference.

        Raises:
            UserError: if it is not finished, or its losses are not of the proxy's tokens.
        """
        folder, name = self.reference_dir, "--reference"
        if self.reference_run:
            name = "DoReMi's reference"
        if not TrainingRun.exists(folder):
            raise UserError(f"{name} {folder}: no run there; pass the folder of a finished run")
        run = TrainingRun.load(folder)
        if run.status != "finished":
            raise UserError(
                f"{name} {folder}: the run is {run.status} at step {run.step} of "
                f"{run.train_iters}; finish it first"
            )
        record = CheckpointRecord.load(find_checkpoint(folder, name))
        require_tokenizer(record, self.corpus)
        shape = shape_of(record)
        for flag, theirs, mine in (
            ("a vocabulary of", shape.vocab_size, self.shape.vocab_size),
            ("--seq-length", shape.max_sequence_length, self.shape.max_sequence_length),
        ):
            if theirs != mine:
                raise UserError(
                    f"{record.root} was trained with {flag} {theirs}, the proxy has {mine}; use "
                    "the same, or another --reference"
                )
        check_model_layout(shape.size, self.proxy.options.parallel, shape.max_sequence_length)
        return Reference(record, shape)


def compute_doremi(
    options: DoremiOptions,
    stops: StopRequests | None = None,
    reference_run: PretrainOptions | None = None,
) -> bool:
    """Train what is not trained yet, and write the mixture. Called on every rank.

    Args:
        options: of the method.
        stops: stop-signal handler; created for this call if None.
        reference_run: training options of the reference, if ``options`` do not determine them.

    Returns:
        Whether the mixture was written; False after a stop signal.

    Raises:
        UserError: for a mistake in the options or in what they name, before any training; later,
            as training does.
    """
    stops = stops or StopRequests(options.proxy.stopping)
    parallel = forward_only(options.proxy.parallel)
    with distributed(parallel, seed=0):
        plan = from_main(lambda: plan_doremi(options, reference_run))
        from_main(lambda: _write_natural(plan))
    run = plan.reference_run
    if run and not train_proxy(run, stops, name="DoReMi's reference"):
        return False
    with distributed(parallel, seed=0):
        reference = from_main(plan.reference)
    finished = train_proxy(
        plan.proxy.options,
        stops,
        lambda run, layout: ExcessLossReweighting(run, layout, reference, plan.recipe),
        name="DoReMi's proxy",
    )
    if finished:
        with distributed(parallel, seed=0):
            from_main(lambda: _write_mixture(plan, reference))
    return finished


def plan_doremi(
    options: DoremiOptions,
    reference_run: PretrainOptions | None = None,
) -> DoremiPlan:
    """Validate the options, what they name, and the content of the run folders. Writes nothing.

    Args:
        options: of the method.
        reference_run: training options of the reference, if ``options`` do not determine them.

    Raises:
        UserError: for the first mistake found.
    """
    recipe = recipe_of(options.rule)
    corpus = Corpus.load(options.corpus)
    if len(corpus.names) < 2:
        raise UserError(f"{corpus.root}: DoReMi needs at least 2 domains, there is 1; add another")
    epoch_limit(options, corpus, corpus.names).check()
    check_output(options.output, Mixture.KIND)
    folder = resolve_work_dir(options.output, options.work_dir)
    if options.reference is not None:
        reference_run = None
    elif reference_run is None:
        size = options.reference_model_size or options.proxy.model_size
        mixture = options.reference_mixture or "uniform"
        if mixture == NATURAL:
            mixture = str(folder / "reference-mixture.json")
        reference_run = training_options(
            dataclasses.replace(options.proxy, model_size=size),
            options.corpus,
            folder / REFERENCE,
            mixture,
        )
    reference_dir = reference_run.run_dir if reference_run else options.reference
    assert reference_dir is not None
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    training_plan = plan_training(proxy_run)
    plan = DoremiPlan(
        options=options,
        corpus=corpus,
        recipe=recipe,
        reference_dir=reference_dir,
        reference_run=reference_run,
        proxy=HookedProxy("DoReMi", ExcessLossReweighting, proxy_run),
        shape=training_plan.shape,
    )
    reference = None
    if reference_run is None:
        reference = plan.reference()
        _warn_reference_differences(plan)
    elif options.reference_mixture == NATURAL:  # not written yet
        plan_training(dataclasses.replace(reference_run, mixture="uniform"))
    else:
        check_run_folder(plan_training(reference_run))

    def parse(state: dict[str, Any]) -> None:
        if reference is None and not is_finished(plan.reference_dir):
            raise UserError(
                f"the reference of this proxy, {plan.reference_dir}, is missing or not finished: "
                f"restore it, or {FRESH_START}"
            )
        parse_state(state, len(corpus.names), recipe, reference or plan.reference())

    plan.proxy.check_saved(training_plan, parse)
    return plan


def recipe_of(rule: DoremiRule) -> DoremiRecipe:
    """The recipe of the variant, with the values that ``rule`` sets.

    Raises:
        UserError: for values that do not go together.
    """
    recipe = RECIPES[rule.doremi_variant]
    try:
        return dataclasses.replace(
            recipe,
            eta=recipe.eta if rule.doremi_eta is None else rule.doremi_eta,
            eps=recipe.eps if rule.doremi_eps is None else rule.doremi_eps,
            floor=rule.excess_floor,
            ceiling=rule.excess_ceiling,
        )
    except ValueError as error:
        raise UserError(
            f"--doremi-eta, --doremi-eps, --excess-floor or --excess-ceiling: {error}"
        ) from error


def _warn_reference_differences(plan: DoremiPlan) -> None:
    """Warn if a user-supplied reference was trained on other data than the proxy."""
    run = TrainingRun.load(plan.reference_dir)
    before = run.provenance.options.get("boundaries", {})
    differences = []
    if run.provenance.inputs.get("corpus") != plan.corpus.hash:
        differences.append(f"on another corpus than {plan.corpus.root}")
    for name, value in json_values(plan.proxy.options.boundaries).items():
        # With --eod-mask-loss, the masked tokens have no excess loss either.
        if before.get(name, False) != value and not (name == "eod_mask_loss" and value):
            differences.append(f"with {flag_of(name)} {before.get(name, False)}, not {value}")
    if differences:
        warnings.warn(
            f"--reference {plan.reference_dir} was trained {' and '.join(differences)}: the excess "
            "losses include that difference",
            MixtureWarning,
            stacklevel=2,
        )


def _write_natural(plan: DoremiPlan) -> None:
    """Write the natural mixture if the reference is trained with it."""
    if plan.options.reference_mixture == NATURAL and plan.reference_run is not None:
        tokens = plan.corpus.train_tokens
        shares = natural_weights(list(tokens.values())).tolist()
        mixture = Mixture(dict(zip(tokens, shares, strict=True)), method=NATURAL)
        mixture.save(Path(str(plan.reference_run.mixture)))


def _write_mixture(plan: DoremiPlan, reference: Reference) -> None:
    """Write the mean weights of the finished proxy and print them, on one rank."""
    stopwatch, recipe, variant = Stopwatch(), plan.recipe, plan.options.rule.doremi_variant
    trained = TrainingRun.load(plan.reference_dir)
    run, proxy_hash, saved = plan.proxy.finished()
    names = plan.corpus.names
    state = parse_state(saved, len(names), recipe, reference)

    def by_name(values: Array) -> dict[str, float]:
        return dict(zip(names, values.tolist(), strict=True))

    # Chameleon's formula counts pairs of runs of one size and length; each run is half of a pair.
    flops = [
        paper_flops("doremi", PaperSettings(model_size=size, trained_tokens=each.tokens)) / 2
        for size, each in ((reference.shape.size, trained), (plan.shape.size, run))
    ]
    write_mean_weights(
        WeightPath(
            last=by_name(state.weights),
            mean=by_name(state.mean),
            moved=state.moved,
            steps=state.counted - int(recipe.count_first),
            averaged=state.counted,
        ),
        [trained, run],
        plan.options,
        plan.corpus,
        stopwatch,
        method="doremi",
        settings={
            "variant": variant,
            "eta": recipe.eta,
            "eps": recipe.eps,
            "excess_floor": recipe.floor,
            "excess_ceiling": recipe.ceiling,
            "reference": {
                "model_size": name_of(reference.shape.size),
                "train_iters": trained.step,
                "mixture": trained.mixture,
            },
            "proxy": {
                "model_size": name_of(plan.shape.size),
                "train_iters": plan.proxy.options.train_iters,
            },
        },
        scores=by_name(state.excess),
        inputs={"reference": reference.checkpoint.hash, "proxy": proxy_hash},
        paper_flops=sum(flops),
        heading=f"\nDoReMi, {variant}, eta {recipe.eta:g}, eps {recipe.eps:g}: mean weights of "
        f"{run.step:,} steps, reference {trained.root}; score: last excess loss",
        fix_unsettled="use a smaller --doremi-eta, a larger --doremi-eps or an --excess-ceiling",
    )
