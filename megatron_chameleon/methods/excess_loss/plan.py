"""What DoReMi was asked for: its two runs and its update rule, all checked before any training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_chameleon.artifacts import Corpus, Mixture
from megatron_chameleon.artifacts.mixture import KIND
from megatron_chameleon.artifacts.output_path import check_output
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.common.epoch_limit import limit_of
from megatron_chameleon.methods.common.proxy_run import is_finished, training_options, way_out_of
from megatron_chameleon.methods.common.watched_proxy import (
    PROXY,
    WatchedPlan,
    Watcher,
    state_so_far,
)
from megatron_chameleon.methods.common.work_dir import BY_WORK_DIR, work_dir_of
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.excess_loss.hook import (
    ExcessLossReweighting,
    require_found_with,
    standing_of,
)
from megatron_chameleon.methods.excess_loss.reference import (
    FLAG,
    Compared,
    Reference,
    find_reference,
    warn_of_differences,
)
from megatron_chameleon.mixture.doremi import RECIPES, DoremiRecipe
from megatron_chameleon.mixture.natural import natural_weights
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.training import PretrainOptions
from megatron_chameleon.training.plan import TrainingPlan, plan_training
from megatron_chameleon.training.resume import check_run_folder

REFERENCE, NATURAL = "reference", "natural"
WATCHER = Watcher("DoReMi", ExcessLossReweighting)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoremiPlan(WatchedPlan):
    """The options with what they name, all checked.

    Attributes:
        options: what was asked for.
        recipe: of the update rule.
        reference_dir: folder of the reference's run.
        reference_run: how it is trained; None where one is given.
    """

    options: DoremiOptions
    recipe: DoremiRecipe
    reference_dir: Path
    reference_run: PretrainOptions | None

    @property
    def compared(self) -> Compared:
        """The proxy, as the reference has to fit it."""
        return Compared(self.corpus, self.proxy_run, self.shape)

    def reference(self) -> Reference:
        """The reference, trained.

        Raises:
            UserError: if it is no finished run, or its losses are not those of the proxy's samples.
        """
        called = "DoReMi's reference" if self.reference_run else FLAG
        return find_reference(self.reference_dir, self.compared, called)


def plan_doremi(
    options: DoremiOptions,
    reference_run: PretrainOptions | None = None,
    elsewhere: str = BY_WORK_DIR,
) -> DoremiPlan:
    """Read and check what ``options`` name, and what the runs' folders hold; nothing is written.

    Args:
        options: what is asked for.
        reference_run: how the reference is trained, where ``options`` do not say it.
        elsewhere: how a person chooses another folder for the runs.

    Raises:
        UserError: for the first mistake found.
    """
    recipe = recipe_of(options.rule)
    corpus = Corpus.load(options.corpus)
    if len(corpus.names) < 2:
        raise UserError(
            f"{corpus.root}: there is one domain, and nothing to weigh; add another one"
        )
    limit_of(options, corpus, corpus.names).check()
    check_output(options.output, KIND)
    folder = work_dir_of(options.output, options.work_dir)
    reference_run = reference_run or _reference_run(options, folder)
    reference_dir = options.reference
    if reference_dir is None:
        assert reference_run is not None
        reference_dir = reference_run.run_dir
    proxy_run = training_options(options.proxy, options.corpus, folder / PROXY)
    proxy = plan_training(proxy_run, way_out_of(proxy_run.run_dir, elsewhere))
    plan = DoremiPlan(
        options=options,
        corpus=corpus,
        recipe=recipe,
        reference_dir=reference_dir,
        reference_run=reference_run,
        proxy_run=proxy_run,
        shape=proxy.shape,
        elsewhere=elsewhere,
    )
    _check_folders(plan, proxy)
    return plan


def _check_folders(plan: DoremiPlan, proxy: TrainingPlan) -> None:
    """Refuse now what training would refuse when the reference is trained, or after it."""
    reference = None
    if plan.reference_run is None:
        reference = plan.reference()
        warn_of_differences(plan.reference_dir, plan.compared)
    else:
        _check_reference_run(plan, plan.reference_run)
    state = state_so_far(proxy, WATCHER)
    if state is None:
        return
    if reference is None and not is_finished(plan.reference_dir):
        raise UserError(
            f"{plan.proxy_run.run_dir} holds a proxy, and its reference is not in "
            f"{plan.reference_dir}, or not finished: put it back, or else {plan.way_out}"
        )
    require_found_with(state, plan.recipe, reference or plan.reference(), plan.way_out)
    standing_of(state, len(plan.corpus.names), plan.way_out)


def _check_reference_run(plan: DoremiPlan, run: PretrainOptions) -> None:
    way_out = way_out_of(run.run_dir, plan.elsewhere)
    if plan.options.reference_mixture == NATURAL:  # which is not written yet
        plan_training(dataclasses.replace(run, mixture="uniform"), way_out)
    else:
        check_run_folder(plan_training(run, way_out))


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
