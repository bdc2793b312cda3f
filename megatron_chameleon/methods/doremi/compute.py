"""DoReMi end to end: train the reference and the proxy, write the mixture.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1. The base model is trained with the mixture
afterwards, by tools/pretrain_gpt.py.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from megatron_chameleon.artifacts import Mixture, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.checkpoint.load import require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doremi.hook import ExcessLossReweighting, Reference
from megatron_chameleon.methods.doremi.options import DoremiOptions, DoremiRule
from megatron_chameleon.methods.output import epoch_limit
from megatron_chameleon.methods.proxy import (
    ProxyMethod,
    forward_only,
    is_finished,
    train_proxy,
    training_options,
)
from megatron_chameleon.mixture.doremi import RECIPES, DoremiRecipe, DoremiState
from megatron_chameleon.mixture.weights import natural_weights
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.model.gpt import check_model_layout
from megatron_chameleon.model.sizes import name_of
from megatron_chameleon.parallel.layout import Layout, distributed, from_main
from megatron_chameleon.ranges import flag_of
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import TrainingPlan, plan_training
from megatron_chameleon.training.stopping import StopRequests

REFERENCE, NATURAL = "reference", "natural"


class Doremi(ProxyMethod[DoremiOptions, DoremiState]):
    """DoReMi: mean weights of a proxy, updated by its excess loss over a reference."""

    name, title, hook = "doremi", "DoReMi", ExcessLossReweighting

    def __init__(self, options: DoremiOptions) -> None:
        super().__init__(options)
        self.recipe, corpus = recipe_of(options.rule), self.corpus
        if len(corpus.names) < 2:
            raise UserError(
                f"{corpus.root}: DoReMi needs at least 2 domains, there is 1; add another"
            )
        epoch_limit(options, corpus, corpus.names).check()
        self.reference_dir = options.reference or self.work_dir / REFERENCE
        self.reference: Reference | None = None
        if options.reference is not None:
            self.reference = self.load_reference()
            self._warn_reference_differences()
        else:
            run = self.reference_run
            if options.reference_mixture == NATURAL:  # not written yet
                plan_training(dataclasses.replace(run, mixture="uniform"))
            else:
                check_run_folder(plan_training(run))
        self.check_proxy()

    @property
    def reference_run(self) -> PretrainOptions:
        """Training options of the reference, if it is not user-supplied."""
        options = self.options
        size = options.reference_model_size or options.proxy.model_size
        mixture = options.reference_mixture or "uniform"
        if mixture == NATURAL:
            mixture = str(self.work_dir / "reference-mixture.json")
        proxy = dataclasses.replace(options.proxy, model_size=size)
        return training_options(proxy, options.corpus, self.reference_dir, mixture)

    def prepare(self, stops: StopRequests) -> bool:
        """Train the reference unless it is user-supplied."""
        if self.options.reference is not None:
            return True
        run, parallel = self.reference_run, forward_only(self.options.proxy.parallel)
        if self.options.reference_mixture == NATURAL:
            tokens = self.corpus.train_tokens
            shares = natural_weights(list(tokens.values())).tolist()
            mixture = Mixture(dict(zip(tokens, shares, strict=True)), method=NATURAL)
            with distributed(parallel, seed=0):
                from_main(lambda: mixture.save(Path(str(run.mixture))))
        if not train_proxy(run, stops, name="DoReMi's reference"):
            return False
        with distributed(parallel, seed=0):
            self.reference = from_main(self.load_reference)
        return True

    def load_reference(self) -> Reference:
        """Load the trained reference.

        Raises:
            UserError: if it is not finished, or has another tokenizer or sequence length.
        """
        folder = self.reference_dir
        name = "--reference" if self.options.reference else "DoReMi's reference"
        if not is_finished(folder):
            raise UserError(
                f"{name} {folder}: no finished run there; finish it, or choose another "
                "--reference or --work-dir"
            )
        record = CheckpointRecord.load(find_checkpoint(folder, name))
        require_tokenizer(record, self.corpus)
        shape = shape_of(record)
        if shape.max_sequence_length != self.run.seq_length:
            raise UserError(
                f"{record.root} was trained with --seq-length {shape.max_sequence_length}, the "
                f"proxy has {self.run.seq_length}; use the same, or another --reference"
            )
        check_model_layout(shape.size, self.run.parallel, shape.max_sequence_length)
        return Reference(record, shape)

    def make_hook(self, plan: TrainingPlan, layout: Layout | None) -> ExcessLossReweighting:
        """Construct the hook of the proxy's run."""
        self.reference = self.reference or self.load_reference()
        return ExcessLossReweighting(plan, layout, self.reference, self.recipe)

    def _warn_reference_differences(self) -> None:
        """Warn if a user-supplied reference was trained on other data than the proxy."""
        run = TrainingRun.load(self.reference_dir)
        before = run.provenance.options.get("boundaries", {})
        differences = [
            flag_of(name)
            for name, value in json_values(self.run.boundaries).items()
            # With --eod-mask-loss, the masked tokens have no excess loss either.
            if before.get(name, False) != value and not (name == "eod_mask_loss" and value)
        ]
        if run.provenance.inputs.get("corpus") != self.corpus.hash:
            differences.append("--corpus")
        if differences:
            warnings.warn(
                f"--reference {self.reference_dir} was trained with another "
                f"{' and '.join(differences)}: the excess losses include that difference",
                MixtureWarning,
                stacklevel=2,
            )

    def write_mixture(self) -> None:
        """Write the mean weights of the finished proxy. Called on one rank."""
        recipe, variant = self.recipe, self.options.rule.doremi_variant
        trained = TrainingRun.load(self.reference_dir)
        run, proxy_hash, state = self.finished()
        reference = self.reference
        assert reference is not None
        models = (reference.shape.size, trained.tokens), (self.plan.shape.size, run.tokens)
        flops = [paper_flops(size, trained_tokens=tokens) for size, tokens in models]
        self.write_mean_weights(
            state,
            state.counted - int(recipe.count_first),
            [trained, run],
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
            },
            scores=state.excess,
            inputs={"reference": reference.checkpoint.hash, "proxy": proxy_hash},
            paper_flops=sum(flops),
            heading=f"\nDoReMi, {variant}, eta {recipe.eta:g}, eps {recipe.eps:g}: mean weights of "
            f"{run.step:,} steps, reference {trained.root}; score: last excess loss",
            hint="use a smaller --doremi-eta, a larger --doremi-eps or an --excess-ceiling",
        )


def recipe_of(rule: DoremiRule) -> DoremiRecipe:
    """Recipe of the variant; values set in ``rule`` replace its defaults.

    Raises:
        UserError: for values that contradict each other.
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
