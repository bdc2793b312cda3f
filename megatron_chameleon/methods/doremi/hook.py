"""DoReMi's training hook: weigh domains by the excess loss of the proxy over a frozen reference.

Xie et al.: DoReMi, NeurIPS 2023, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_chameleon.artifacts import Corpus, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import CheckpointRecord, find_checkpoint
from megatron_chameleon.artifacts.record import json_values
from megatron_chameleon.blend.prefetch import to_device
from megatron_chameleon.checkpoint.load import load_weights, require_tokenizer, shape_of
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.proxy import require_same_rule, state_arrays
from megatron_chameleon.mixture.checks import Array
from megatron_chameleon.mixture.doremi import DoremiRecipe, DoremiState, token_weights
from megatron_chameleon.model.gpt import build_model_chunks, check_model_layout
from megatron_chameleon.model.memory import TrainingSetup, stage_parameters
from megatron_chameleon.model.sizes import ModelShape
from megatron_chameleon.parallel.layout import Layout
from megatron_chameleon.training.hook import GlobalBatch, TokenValues, TrainingHook
from megatron_chameleon.training.optimizer import batch_shape
from megatron_chameleon.training.options import PretrainOptions
from megatron_chameleon.training.plan import TrainingPlan
from megatron_chameleon.training.run_folder import FRESH_START
from megatron_chameleon.training.step import Passes


@dataclasses.dataclass(frozen=True)
class Reference:
    """The last checkpoint of the reference, and its model shape."""

    checkpoint: CheckpointRecord
    shape: ModelShape


class ExcessLossReweighting(TrainingHook):
    """Weighs the loss of each domain by its excess loss.

    Samples always follow the run's mixture; only their loss weights change. Proxy and reference run
    forward over the global batch, and the step is trained with the updated weights.

    Args:
        plan: of the proxy's run.
        layout: of the ranks; the reference is sharded like the proxy.
        reference: computes in the precision that the proxy is trained in.
        recipe: of the update rule.
    """

    def __init__(
        self, plan: TrainingPlan, layout: Layout, reference: Reference, recipe: DoremiRecipe
    ) -> None:
        super().__init__()
        self._plan, self._layout = plan, layout
        self._names, self._recipe, self._reference = plan.data.names, recipe, reference
        sampling = np.array(plan.schedule.weights_at(0), np.float64)
        self._sampling = sampling / sampling.sum()
        self._passes: Passes | None = None
        self._state = DoremiState.first(len(self._names), plan.shape.vocab_size, recipe)

    def prepare(self) -> None:
        """Build the frozen reference and load its weights."""
        options = self._plan.options
        model: Sequence[torch.nn.Module] = build_model_chunks(
            self._reference.shape,
            self._layout,
            options.seed,
            bf16=options.bf16,
            deterministic=options.deterministic and self._layout.device.type == "cuda",
        )
        load_weights(self._reference.checkpoint, model)
        for chunk in model:
            chunk.eval().requires_grad_(False)
        self._passes = Passes(model, batch_shape(self._plan, self._layout), len(self._names))

    def extra_bytes(self, setup: TrainingSetup, stage: int, num_domains: int) -> dict[str, int]:
        """The reference's weights, in the precision that the proxy is trained in."""
        of_reference = dataclasses.replace(setup, shape=self._reference.shape)
        return {"the reference": stage_parameters(of_reference, stage) * setup.element_bytes}

    def loss_weights(self, batch: GlobalBatch) -> torch.Tensor:
        """Update the weights by the excess losses of ``batch``, and weigh its tokens by them.

        Raises:
            UserError: on every rank, if a loss of the reference is not finite.
        """
        assert self._passes is not None, "prepare() builds the reference"
        proxy = batch.token_losses()
        reference = batch.token_losses(self._passes, self._reference.shape)
        excess = batch.domain_sums(self._clipped_excess(proxy, reference))
        # Finiteness is checked before clipping, which hides an infinite loss. Losses are not
        # negative, so that a sum of both models' hides neither.
        losses = batch.domain_sums([p + r for p, r in zip(proxy, reference, strict=True)])
        totals = torch.stack([excess, batch.domain_tokens, losses]).cpu().numpy()
        sums, tokens = totals[:2]
        if np.isfinite(totals).all():
            self._state = self._state.after(sums, tokens, self._recipe)
        else:  # if it is the proxy's, the step is skipped as without a hook
            self._require_finite(batch, reference)
        weights = token_weights(self._state.log_weights, self._sampling, tokens)
        return to_device(torch.from_numpy(weights), excess.device)

    def metrics(self) -> dict[str, Any]:
        """Weights after the last step, their mean, and excess losses in nats per token."""
        return {
            "weights": self._by_name(self._state.weights),
            "mean_weights": self._by_name(self._state.mean),
            "excess": self._by_name(self._state.excess),
            "moved": self._state.moved,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state of the weights, and the rule and reference that produced it."""
        return {
            **_found_with(self._recipe, self._reference),
            "log_weights": self._state.log_weights.tolist(),
            "excess": self._state.excess.tolist(),
            "mean": self._state.mean.tolist(),
            "counted": self._state.counted,
            "moved": self._state.moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state``.

        Raises:
            UserError: if it is of another rule or reference, or damaged.
        """
        self._state = parse_state(state, len(self._names), self._recipe, self._reference)

    def _by_name(self, values: Array) -> dict[str, float]:
        return dict(zip(self._names, values.tolist(), strict=True))

    def _clipped_excess(self, proxy: TokenValues, reference: TokenValues) -> list[torch.Tensor]:
        """Excess loss per token, [b, s] float32 for each micro-batch."""
        pairs = zip(proxy, reference, strict=True)
        if not self._recipe.clip_tokens:
            return [mine - theirs for mine, theirs in pairs]
        floor, ceiling = self._recipe.floor, self._recipe.ceiling
        return [(mine - theirs).clamp(floor, ceiling) for mine, theirs in pairs]

    def _require_finite(self, batch: GlobalBatch, reference: TokenValues) -> None:
        sums = batch.domain_sums(reference).cpu().numpy()
        for name, total in zip(self._names, sums, strict=True):
            if not np.isfinite(total):
                raise UserError(
                    f"the reference {self._reference.checkpoint.root} has a loss that is not "
                    f"finite on '{name}'; use another one, for example trained with a lower --lr"
                )


def parse_state(
    state: dict[str, Any],
    num_domains: int,
    recipe: DoremiRecipe,
    reference: Reference,
) -> DoremiState:
    """Validate and convert the result of :meth:`ExcessLossReweighting.state_dict`.

    Raises:
        UserError: if it is of another rule, reference or number of domains, or damaged.
    """
    wanted = _found_with(recipe, reference)
    require_same_rule(state["rule"], wanted["rule"])
    if state["reference"] != wanted["reference"]:
        raise UserError(
            f"the proxy was trained with another reference than {reference.checkpoint.root}; "
            f"{FRESH_START}"
        )
    shapes = dict.fromkeys(("log_weights", "excess", "mean"), (num_domains,))
    arrays = state_arrays(state, shapes)
    return DoremiState(**arrays, counted=state["counted"], moved=state["moved"])


def _found_with(recipe: DoremiRecipe, reference: Reference) -> dict[str, Any]:
    return {"rule": dataclasses.asdict(recipe), "reference": reference.checkpoint.hash}


def find_reference(
    folder: Path, corpus: Corpus, proxy: PretrainOptions, shape: ModelShape, name: str
) -> Reference:
    """The reference in a finished run.

    Args:
        folder: of the run.
        corpus: the proxy's.
        proxy: the proxy's training options.
        shape: the proxy's.
        name: of the reference in messages.

    Raises:
        UserError: if the run is not finished, or its losses are not of the proxy's tokens.
    """
    if not TrainingRun.exists(folder):
        raise UserError(f"{name} {folder}: no run there; pass the folder of a finished run")
    run = TrainingRun.load(folder)
    if run.status != "finished":
        raise UserError(
            f"{name} {folder}: the run is {run.status} at step {run.step} of {run.train_iters}; "
            "finish it first"
        )
    record = CheckpointRecord.load(find_checkpoint(folder, name))
    reference = Reference(record, shape_of(record))
    require_tokenizer(record, corpus)
    vocab_size, length = reference.shape.vocab_size, reference.shape.max_sequence_length
    if vocab_size != shape.vocab_size:
        raise UserError(
            f"{record.root} has a vocabulary of {vocab_size}, {corpus.root} one of "
            f"{shape.vocab_size}; use another --reference"
        )
    if length != shape.max_sequence_length:
        raise UserError(
            f"{record.root} was trained with --seq-length {length}, the proxy has "
            f"{shape.max_sequence_length}; use the same, or another --reference"
        )
    check_model_layout(reference.shape.size, proxy.parallel, shape.max_sequence_length)
    return reference


def warn_reference_differences(folder: Path, corpus: Corpus, proxy: PretrainOptions) -> None:
    """Warn if a user-supplied reference was trained on other data than the proxy.

    Args:
        folder: of the reference's run.
        corpus: the proxy's.
        proxy: the proxy's training options.
    """
    run = TrainingRun.load(folder)
    if run.provenance.inputs.get("corpus") != corpus.hash:
        warnings.warn(
            f"--reference {folder} was trained on another corpus than {corpus.root}: domains that "
            "it has not seen will seem to have no excess loss",
            MixtureWarning,
            stacklevel=2,
        )
    before = run.provenance.options.get("boundaries", {})
    for name, value in json_values(proxy.boundaries).items():
        if name == "eod_mask_loss" and value:  # masked tokens have no excess loss either
            continue
        if before.get(name, False) != value:
            flag = f"--{name.replace('_', '-')}"
            warnings.warn(
                f"--reference {folder} was trained with {flag} {before.get(name, False)}, the "
                f"proxy with {value}: excess losses at document boundaries include that difference",
                MixtureWarning,
                stacklevel=2,
            )
