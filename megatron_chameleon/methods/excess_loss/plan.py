"""What DoReMi was asked for: its two runs and its update rule, all checked before any training."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, Mixture, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.checkpoint.reader import require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.proxy_run import training_options
from megatron_chameleon.methods.common.work_dir import work_dir_of
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.mixture.doremi import RECIPES, DoremiRecipe
from megatron_chameleon.mixture.natural import natural_weights
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.plan import plan_training

REFERENCE, PROXY = "reference", "proxy"
NATURAL = "natural"


@dataclasses.dataclass(frozen=True)
class DoremiPlan:
    """The options with what they name, all checked.

    Attributes:
        options: what was asked for.
        corpus: what both runs are trained on.
        recipe: of the update rule.
        reference_dir: folder of the reference's run.
        reference_run: how it is trained; None where one is given.
        proxy_run: how the proxy is trained.
        shape: of the proxy.
    """

    options: DoremiOptions
    corpus: Corpus
    recipe: DoremiRecipe
    reference_dir: Path
    reference_run: PretrainOptions | None
    proxy_run: PretrainOptions
    shape: ModelShape


@dataclasses.dataclass(frozen=True)
class Reference:
    """The last checkpoint of the reference's run, and the shape of its model."""

    checkpoint: CheckpointRecord
    shape: ModelShape


def plan_doremi(options: DoremiOptions) -> DoremiPlan:
    """Read and check what ``options`` name; nothing is written.

    Raises:
        UserError: for the first mistake found.
    """
    recipe = recipe_of(options.rule)
    corpus = Corpus.load(options.corpus)
    limit_of(options, corpus, corpus.names).check()
    folder = work_dir_of(options.output, options.work_dir)
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    shape = plan_training(proxy_run).shape
    plan = DoremiPlan(
        options=options,
        corpus=corpus,
        recipe=recipe,
        reference_dir=options.reference or folder / REFERENCE,
        reference_run=_reference_run(options, folder),
        proxy_run=proxy_run,
        shape=shape,
    )
    if plan.reference_run is None:
        find_reference(plan)
    elif options.reference_mixture == NATURAL:
        plan_training(dataclasses.replace(plan.reference_run, mixture="uniform"))
    else:
        plan_training(plan.reference_run)
    return plan


def recipe_of(rule: DoremiRule) -> DoremiRecipe:
    """The variant with the knobs that were given in place of its own.

    Raises:
        UserError: for a value that the rule cannot have.
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


def write_natural(plan: DoremiPlan) -> None:
    """Write the mixture that the reference is trained by, if it is the domains' own shares."""
    if plan.options.reference_mixture == NATURAL and plan.reference_run is not None:
        tokens = plan.corpus.train_tokens
        shares = natural_weights(list(tokens.values())).tolist()
        mixture = Mixture(dict(zip(tokens, shares, strict=True)), method=NATURAL)
        mixture.save(Path(str(plan.reference_run.mixture)))


def find_reference(plan: DoremiPlan) -> Reference:
    """The reference, trained.

    Raises:
        UserError: if it is no finished run, or its losses are not those of the proxy's samples.
    """
    folder, flag = plan.reference_dir, "--reference"
    if not TrainingRun.exists(folder):
        raise UserError(f"{flag} {folder}: there is no run; give the --run-dir of a finished one")
    run = TrainingRun.load(folder)
    if run.status != "finished":
        raise UserError(
            f"{flag} {folder}: the run is {run.status} at step {run.step} of {run.train_iters}; "
            "finish it first"
        )
    record = CheckpointRecord.load(find_checkpoint(folder, flag))
    reference = Reference(record, shape_of(record))
    _require_same_losses(reference, plan)
    if run.provenance.inputs.get("corpus") != plan.corpus.hash:
        warnings.warn(
            f"{flag} {folder} was trained on another corpus than {plan.corpus.root}: domains that "
            "it has not seen will look as if there were nothing to learn",
            MixtureWarning,
            stacklevel=2,
        )
    return reference


def _reference_run(options: DoremiOptions, folder: Path) -> PretrainOptions | None:
    """How the reference is trained; None where one is given.

    Raises:
        UserError: for options of a training that does not take place.
    """
    if options.reference is not None:
        for field in ("reference_mixture", "reference_model_size"):
            if (value := getattr(options, field)) is not None:
                raise UserError(
                    f"--{field.replace('_', '-')} {value}: --reference {options.reference} is "
                    "trained already; leave one of them out"
                )
        return None
    proxy = options.proxy
    if options.reference_model_size is not None:
        proxy = dataclasses.replace(proxy, model_size=options.reference_model_size)
    mixture = options.reference_mixture or "uniform"
    if mixture == NATURAL:
        mixture = str(folder / "reference-mixture.json")
    return training_options(proxy, options.corpus, folder / REFERENCE, mixture)


def _require_same_losses(reference: Reference, plan: DoremiPlan) -> None:
    """Raises UserError unless the two models' losses are of the same tokens."""
    where, shape, wanted = reference.checkpoint.root, reference.shape, plan.shape
    require_tokenizer(reference.checkpoint, plan.corpus)
    if shape.vocab_size != wanted.vocab_size:
        raise UserError(
            f"{where} has a vocabulary of {shape.vocab_size}, {plan.corpus.root} one of "
            f"{wanted.vocab_size}; give another --reference"
        )
    if shape.max_sequence_length != wanted.max_sequence_length:
        raise UserError(
            f"{where} was trained on samples of {shape.max_sequence_length} tokens, the proxy's "
            f"--seq-length is {wanted.max_sequence_length}; give that one, or another --reference"
        )
    check_model_layout(shape.size, plan.proxy_run.parallel, wanted.max_sequence_length)
