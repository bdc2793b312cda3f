"""DoReMi: train the reference, then the proxy with its hook, and write the mixture.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1. The base model is trained with the mixture
afterwards, by pretrain_gpt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_chameleon.artifacts import Mixture, TrainingRun
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.blend.sampler import to_device
from megatron_chameleon.checkpoint.open_model import Model, open_model
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.doremi import DoremiOptions
from megatron_chameleon.methods.limits import epoch_limit
from megatron_chameleon.methods.output import by_name, warn
from megatron_chameleon.methods.train_proxy import (
    MeanWeightsHook,
    ProxyMethod,
    is_finished,
    on_rank_0,
    train_proxy,
    training_options,
)
from megatron_chameleon.mixture.doremi import (
    DoremiRule,
    DoremiState,
    domain_mean_weights,
    token_weights,
)
from megatron_chameleon.mixture.weights import natural_weights
from megatron_chameleon.model.config import name_of
from megatron_chameleon.model.flops import paper_flops
from megatron_chameleon.model.gpt import build_model_chunks, check_model_layout
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.ranges import flag_of
from megatron_chameleon.training.checkpointing import check_run_folder
from megatron_chameleon.training.hook import GlobalBatch
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import TrainingPlan, plan_training
from megatron_chameleon.training.step import BatchShape, Passes
from megatron_chameleon.training.stopping import StopRequests

REFERENCE, NATURAL = "reference", "natural"


class ExcessLossReweighting(MeanWeightsHook[DoremiState]):
    """Weight the loss of each domain by its excess loss.

    Samples always follow the run's mixture; only their loss weights change. In each step, the proxy
    and the reference first run a forward pass over the global batch; then the proxy trains on it
    with the updated weights.

    Args:
        plan: plan of the proxy's run.
        layout: layout of the ranks; the reference is sharded like the proxy. None if only a saved
            state is read.
        reference: the reference, which computes in the precision of the proxy.
        rule: parameters of the update rule.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        layout: Layout | None,
        reference: Model,
        rule: DoremiRule,
    ) -> None:
        names = plan.data.names
        first = DoremiState.first(len(names), plan.config.vocab_size, rule)
        settings = {"rule": dataclasses.asdict(rule), "reference": reference.hash}
        super().__init__(names, range(len(names)), first, settings)
        self._plan, self._layout, self._rule = plan, layout, rule
        self._reference, self._reference_shape = reference, reference.config
        sampling = np.array(plan.schedule.weights_at(0), np.float64)
        self._sampling = sampling / sampling.sum()
        self._passes: Passes | None = None

    def prepare(self) -> None:
        """Build the frozen reference and load its weights."""
        options, layout = self._plan.options, self._layout
        assert layout is not None
        model: Sequence[torch.nn.Module] = build_model_chunks(
            self._reference_shape,
            layout,
            options.seed,
            bf16=options.bf16,
            deterministic=options.deterministic and layout.device.type == "cuda",
        )
        self._reference.load(model)
        for chunk in model:
            chunk.eval().requires_grad_(False)
        shape = BatchShape.of(options, layout.data_size)
        self._passes = Passes(
            model, shape, len(self.names), document_attention=options.document_attention
        )

    def loss_weights(self, batch: GlobalBatch) -> torch.Tensor:
        """Update the weights by the excess losses of ``batch``; return the loss weight per domain.

        Raises:
            UserError: on every rank, if a loss of the reference is not finite.
        """
        assert self._passes is not None, "prepare() builds the reference"
        rule, proxy = self._rule, batch.token_losses()
        reference = batch.token_losses(self._passes, self._reference_shape)
        pairs = list(zip(proxy, reference, strict=True))
        excess = [mine - theirs for mine, theirs in pairs]
        if rule.clip_tokens:
            excess = [each.clamp(rule.floor, rule.ceiling) for each in excess]
        sums = batch.domain_sums(excess)
        # Check the losses too, since clipped excess losses would hide an infinite loss. Losses are
        # not negative, so the sum of both models' losses is infinite if either loss is infinite.
        losses = batch.domain_sums([mine + theirs for mine, theirs in pairs])
        totals = torch.stack([sums, batch.domain_tokens, losses]).cpu().numpy()
        tokens = totals[1]
        if np.isfinite(totals).all():
            self.state = self.state.after(totals[0], tokens, rule)
        else:  # no error if only the proxy's loss is not finite: the trainer skips the step
            finite = np.isfinite(batch.domain_sums(reference).cpu().numpy())
            if not finite.all():
                raise UserError(
                    f"the reference {self._reference.where} has a loss that is not "
                    f"finite on '{self.names[int(finite.argmin())]}'; use another reference, for "
                    "example one that was trained with a lower --lr"
                )
        if rule.domain_means:
            weights = domain_mean_weights(self.state.weights, tokens)
        else:
            weights = token_weights(self.state.log_weights, self._sampling, tokens)
        return to_device(torch.from_numpy(weights), sums.device)

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and excess losses in nats per token."""
        return {**super().metrics(), "excess": by_name(self.names, self.state.excess)}


class Doremi(ProxyMethod[DoremiOptions, DoremiState]):
    """DoReMi: mean weights of a proxy, updated by its excess loss over a reference."""

    name, title = "doremi", "DoReMi"

    def __init__(self, options: DoremiOptions) -> None:
        super().__init__(options)
        self.rule, corpus = options.rule.resolve(), self.corpus
        if len(corpus.names) < 2:
            raise UserError(
                f"{corpus.root}: DoReMi needs at least 2 domains, but there is only 1; add "
                "another domain"
            )
        epoch_limit(options, corpus, corpus.names).check()
        self.reference_dir = options.reference or self.work_dir / REFERENCE
        self.reference: Model | None = None
        if options.reference is not None:
            self.reference = self.load_reference()
            self._warn_reference_differences()
        # the mixture file is written later, so plan with a uniform mixture
        elif options.reference_mixture == NATURAL:
            plan_training(dataclasses.replace(self.reference_run, mixture="uniform"))
        else:
            check_run_folder(plan_training(self.reference_run))
        self.check_proxy()

    @property
    def reference_run(self) -> PretrainOptions:
        """Training options of the reference, used unless the reference is user-supplied."""
        options = self.options
        size = options.reference_model or options.proxy.model
        mixture = options.reference_mixture or "uniform"
        if mixture == NATURAL:
            mixture = str(self.work_dir / "reference-mixture.json")
        proxy = dataclasses.replace(options.proxy, model=size)
        return training_options(proxy, options.corpus, self.reference_dir, mixture)

    @property
    def runs(self) -> Sequence[Path]:
        """Folders of the runs that the method trains."""
        return [self.run.run_dir, *([] if self.options.reference else [self.reference_dir])]

    def prepare(self, stops: StopRequests) -> bool:
        """Train the reference unless it is user-supplied."""
        if self.options.reference is not None:
            return True
        run, parallel = self.reference_run, self.options.proxy.parallel
        if self.options.reference_mixture == NATURAL:
            shares = natural_weights(list(self.corpus.train_tokens.values()))
            mixture = Mixture(by_name(self.corpus.names, shares), method=NATURAL)
            on_rank_0(parallel, lambda: mixture.save(Path(str(run.mixture))))
        if not train_proxy(run, stops, name="DoReMi's reference"):
            return False
        self.reference = on_rank_0(parallel, self.load_reference)
        return True

    def load_reference(self) -> Model:
        """Load the last checkpoint of the trained reference.

        Raises:
            UserError: if its run is not finished, or it has another tokenizer or sequence length.
        """
        folder = self.reference_dir
        name = "--reference" if self.options.reference else "DoReMi's reference"
        if not is_finished(folder):
            raise UserError(
                f"{name} {folder}: the folder has no finished run; finish the run, or choose "
                "another --reference or --work-dir"
            )
        model = open_model(folder, name).for_corpus(self.corpus)
        config = model.config
        if config.vocab_size < self.corpus.tokenizer.vocab_size:
            raise UserError(
                f"{model.where} has {config.vocab_size} embeddings, and the tokenizer of "
                f"{self.corpus.root} {self.corpus.tokenizer.vocab_size} tokens, all of which the "
                "proxy has; use another --reference"
            )
        if not config.is_rotary and config.max_sequence_length != self.run.seq_length:
            raise UserError(
                f"{model.where} was trained with --seq-length {config.max_sequence_length}, but "
                f"the proxy uses {self.run.seq_length}; use the same length, or another --reference"
            )
        check_model_layout(config, self.run.parallel, self.run.seq_length)
        return model

    def make_hook(self, plan: TrainingPlan, layout: Layout | None) -> ExcessLossReweighting:
        """Construct the hook of the proxy's run."""
        self.reference = self.reference or self.load_reference()
        return ExcessLossReweighting(plan, layout, self.reference, self.rule)

    def _warn_reference_differences(self) -> None:
        """Warn if a user-supplied reference was trained on other data than the proxy."""
        run = TrainingRun.load(self.reference_dir)
        before = run.provenance.options.get("boundaries", {})
        differences = [
            flag_of(name)
            for name, value in json_values(self.run.boundaries).items()
            # If the proxy runs with --eod-mask-loss, the tokens that it masks have no excess loss,
            # so the reference need not mask them.
            if before.get(name, False) != value and not (name == "eod_mask_loss" and value)
        ]
        if run.provenance.options.get("target_tokens") != self.run.target_tokens:
            differences.append("--target-tokens")
        if run.provenance.inputs.get("corpus") != self.corpus.hash:
            differences.append("--corpus")
        if differences:
            warn(
                f"--reference {self.reference_dir} was trained with another "
                f"{' and '.join(differences)}, so the excess losses include the effect of this "
                "difference"
            )

    def write_mixture(self) -> None:
        """Write the mean weights of the finished proxy. Called on one rank."""
        rule, reference = self.rule, self.reference
        assert reference is not None
        trained, size = TrainingRun.load(self.reference_dir), reference.config
        run, hook, inputs = self.finished()
        variant = self.options.rule.doremi_variant
        self.write_mean_weights(
            hook,
            hook.state.counted - int(rule.count_first),
            [trained, run],
            settings={
                "variant": variant,
                "eta": rule.eta,
                "eps": rule.eps,
                "excess_floor": rule.floor,
                "excess_ceiling": rule.ceiling,
                "reference": {
                    "model": name_of(size),
                    "train_iters": trained.step,
                    "mixture": trained.mixture,
                },
            },
            scores=hook.state.excess,
            inputs={"reference": reference.hash, **inputs},
            paper_flops=paper_flops(size, trained_tokens=trained.tokens)
            + paper_flops(self.plan.config, trained_tokens=run.tokens),
            heading=f"\nDoReMi, {variant}, eta {rule.eta:g}, eps {rule.eps:g}: mean weights of "
            f"{run.step:,} steps, reference {trained.root}; the score is the last excess loss",
            hint="use a smaller --doremi-eta, a larger --doremi-eps or an --excess-ceiling",
        )
