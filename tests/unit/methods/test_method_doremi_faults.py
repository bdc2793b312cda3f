"""DoReMi where something is wrong: memory, losses, options, references."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    Mixture,
    MixtureWarning,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import find_checkpoint, step_folder
from megatron_chameleon.checkpoint.load import load_weights
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.excess_loss import compute as compute_module
from megatron_chameleon.methods.excess_loss import hook as hook_module
from megatron_chameleon.methods.excess_loss.compute import compute_doremi
from megatron_chameleon.methods.excess_loss.hook import ExcessLossReweighting
from megatron_chameleon.methods.excess_loss.plan import plan_doremi
from megatron_chameleon.mixture.exponentiated import LOWEST_LOG
from megatron_chameleon.model.memory_advice import training_setup
from megatron_chameleon.options.doremi import DoremiRule
from megatron_chameleon.options.guards import GuardOptions
from megatron_chameleon.options.training import DocumentBoundaryOptions
from megatron_chameleon.training.global_batch import GlobalBatch
from tests.small_corpus import write_small_corpus
from tests.unit.methods.doremi_runs import (
    STEPS,
    found,
    half_done,
    hook_lines,
    options,
    proxy_of,
    state_of,
)
from tests.unit.training.bad_steps import before_steps, poison, run_out

__all__ = ["found", "half_done", "options"]  # fixtures


def test_a_reference_that_does_not_fit_is_told(options, monkeypatch):
    monkeypatch.setattr(hook_module, "build_model_chunks", run_out)
    given = options()
    with pytest.raises(UserError, match=r"^DoReMi's proxy: out of memory: .*, the reference 0\.0"):
        compute_doremi(given)
    assert not (given.output.with_suffix("") / "proxy").exists()


def test_the_memory_of_the_reference_is_counted(options, monkeypatch):
    counted = []

    class Counting(ExcessLossReweighting):
        def prepare(self):
            super().prepare()
            assert self._passes is not None
            (model,) = self._passes.model
            held = sum(part.numel() * part.element_size() for part in model.parameters())
            setup = training_setup(self._plan.options, self._plan.shape, 1)
            counted.append((held, self.extra_bytes(setup, 0, 3)))

    Counting.__name__ = ExcessLossReweighting.__name__
    monkeypatch.setattr(compute_module, "ExcessLossReweighting", Counting)
    compute_doremi(options(proxy={"train_iters": 3}))
    ((held, told),) = counted
    assert told == {"the reference": held}


def test_a_skipped_step_is_undone(options, monkeypatch):
    given = options()
    before_steps(monkeypatch, {4: poison(torch.nan)})
    compute_doremi(given)
    lines = hook_lines(given.output)
    assert lines[3] == lines[2]
    assert lines[4]["weights"] != lines[3]["weights"]
    state = state_of(given.output)
    assert state["counted"] == 1 + STEPS - 1
    path = np.array([[1 / 3] * 3, *(list(line["weights"].values()) for line in lines)])
    moves = np.abs(np.diff(path, axis=0)).sum(1) / 2
    told = Mixture.load(given.output).parameters["moved_per_step"]
    assert told == pytest.approx(moves.sum() / (STEPS - 1))
    assert proxy_of(given.output).skipped_steps == 1


def bad_losses(monkeypatch, factor, *, of_reference):
    """All losses of a model are multiplied by ``factor`` in the third step."""
    token_losses = GlobalBatch.token_losses

    def losses(batch, other=None, other_shape=None):
        bad = batch.step == 2 and (other is not None) == of_reference
        return [(factor if bad else 1.0) * part for part in token_losses(batch, other, other_shape)]

    monkeypatch.setattr(GlobalBatch, "token_losses", losses)


@pytest.mark.parametrize(
    ("factor", "ceiling"), [(math.nan, None), (math.inf, None), (math.inf, 0.3)]
)
def test_losses_of_the_proxy_that_are_no_numbers_leave_the_weights(
    options, monkeypatch, factor, ceiling
):
    bad_losses(monkeypatch, factor, of_reference=False)
    given = options(rule=DoremiRule(doremi_eta=0.1, excess_ceiling=ceiling))
    compute_doremi(given)
    lines = hook_lines(given.output)
    assert lines[2] == lines[1]
    assert state_of(given.output)["counted"] == STEPS


@pytest.mark.parametrize(
    ("factor", "variant"),
    [(math.nan, "original"), (math.inf, "original"), (math.inf, "fork")],
)
def test_losses_of_the_reference_that_are_no_numbers_end_the_run(
    options, monkeypatch, factor, variant
):
    """Also those that are infinite, of which clipping would make an excess loss of 0."""
    bad_losses(monkeypatch, factor, of_reference=True)
    with pytest.raises(UserError, match="has a loss that is not a finite number on 'news'"):
        compute_doremi(options(rule=DoremiRule(variant, 0.1)))


def test_a_reference_without_finite_losses_is_told(options, monkeypatch):
    def spoiled(record, model):
        load_weights(record, model)
        with torch.no_grad():
            next(model[0].parameters()).mul_(torch.nan)

    monkeypatch.setattr(hook_module, "load_weights", spoiled)
    with pytest.raises(UserError, match="has a loss that is not a finite number on 'news'"):
        compute_doremi(options())


def test_a_proxy_that_gives_up_advises_what_the_command_can_do(options, monkeypatch):
    given = options(proxy={"guards": GuardOptions(max_consecutive_skipped_steps=2)})
    before_steps(monkeypatch, {2: poison(torch.nan), 3: poison(torch.nan)})
    with pytest.raises(UserError, match=r"^DoReMi's proxy: 2 steps in a row were skipped") as told:
        compute_doremi(given)
    proxy = given.output.with_suffix("") / "proxy"
    way_out = f"for a new run give another --work-dir, or delete {proxy} to start anew"
    assert str(told.value).endswith(f"look at these domains and mend their text; {way_out}")


def edited_state(half_done, **changes):
    """Change what the proxy's last checkpoint keeps of the hook."""
    path = step_folder(half_done / "proxy", STEPS) / CheckpointRecord.FILE_NAME
    body = json.loads(path.read_text())
    body["hook"]["state"] |= changes
    body.pop("checksum", None)
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "damage",
    [{"mean": [0.5, 0.5]}, {"log_weights": [[0.0] * 3]}, {"excess": [1.0, None, 2.0]}],
)
def test_weights_of_other_domains_are_refused(options, half_done, damage, capsys):
    edited_state(half_done, **damage)
    (name,) = damage
    said = f"is damaged: its '{name}' is not the 3 finite numbers of its domains; give another --w"
    with pytest.raises(UserError, match=said):
        compute_doremi(options())
    assert capsys.readouterr().out == ""


def test_weights_that_have_not_settled_or_are_nearly_all_on_one_domain_are_told(options):
    given = options(rule=DoremiRule(doremi_eta=1e300))
    with pytest.warns(MixtureWarning) as caught:
        compute_doremi(given)
    said = " ".join(str(warning.message) for warning in caught)
    assert "(total variation) from their mean" in said
    assert "they have not settled; try a smaller --doremi-eta" in said
    assert min(state_of(given.output)["log_weights"]) >= LOWEST_LOG


def test_a_mixture_that_is_nearly_one_hot_is_told(options, half_done):
    """As a proxy of many steps would leave it."""
    edited_state(half_done, mean=[0.01, 0.98, 0.01])
    with pytest.warns(MixtureWarning, match="'code' has 98% of the weight, so the others are"):
        compute_doremi(options())


def test_the_limit_of_epochs_holds(options, corpus):
    budget = sum(corpus.train_tokens.values())
    given = options(token_budget=budget, max_epochs=1.01, proxy={"train_iters": 3})
    compute_doremi(given)
    mixture = Mixture.load(given.output)
    assert mixture.epochs is not None
    assert max(mixture.epochs.values()) <= 1.01 + 1e-9
    assert mixture.unconstrained is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rule": DoremiRule(doremi_eta=0.0)}, "eta is 0.0: it must be a finite number above 0"),
        ({"rule": DoremiRule(doremi_eta=math.inf)}, "eta is inf: it must be a finite number"),
        ({"rule": DoremiRule(doremi_eps=1.0)}, "eps is 1.0: it lies from 0 on and below 1"),
        ({"rule": DoremiRule(excess_ceiling=-1.0)}, "ceiling is -1.0: it must be a finite number"),
        (
            {"reference_mixture": "natural"},
            "--reference-mixture natural: --reference .* is trained",
        ),
        (
            {"reference_model_size": "tiny"},
            "--reference-model-size tiny: --reference .* is trained",
        ),
        ({"reference": Path("lost")}, "--reference lost: there is no run; give the folder"),
        ({"reference": None, "reference_model_size": "big"}, "big: there is no such size"),
        ({"reference": None, "reference_mixture": "lost.json"}, "lost.json"),
        ({"proxy": {"seq_length": 16}}, "samples of 32 tokens, the proxy's --seq-length is 16"),
        ({"proxy": {"train_iters": 0}}, "--train-iters 0: "),
        (
            {"reference": None, "reference_mixture": "natural", "proxy": {"global_batch_size": 6}},
            "^--global-batch-size 6 is not a multiple of 4, the --micro-batch-size 4 times 1 data",
        ),
        ({"max_epochs": 2.0}, "--max-epochs limits the epochs of a --token-budget"),
        ({"output": Path("doremi.txt")}, "--output doremi.txt: give a name that ends with .json"),
        ({"output": Path("/dev/null/doremi.json")}, "/dev/null cannot be written to; choose"),
        ({"output": Path("/tmp")}, "--output /tmp is a folder; give the name of a file"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(options, tmp_path, changes, said):
    given = dataclasses.replace(options(proxy=changes.pop("proxy", None), work_dir=None), **changes)
    with pytest.raises(UserError, match=said):
        compute_doremi(given)
    assert not (tmp_path / "4-mixture").exists()


def test_a_reference_that_is_not_finished_is_refused(options, trained_run):
    run = TrainingRun.load(trained_run)
    dataclasses.replace(run, status="interrupted", step=3).save()
    with pytest.raises(UserError, match="the run is interrupted at step 3 of 6; finish it first"):
        compute_doremi(options(reference=trained_run))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("tokenizer_hash", "0" * 64, "trained with another tokenizer than"),
        ("vocab_size", 300, "has a vocabulary of 300, .* one of 251; give another --reference"),
    ],
)
def test_a_reference_of_another_vocabulary_is_refused(
    options, trained_run, tmp_path, field, value, said
):
    path = find_checkpoint(trained_run) / CheckpointRecord.FILE_NAME
    body = json.loads(path.read_text())
    (body["model"] if field == "vocab_size" else body)[field] = value
    body.pop("checksum", None)
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=said):
        compute_doremi(options(reference=trained_run))
    assert not (tmp_path / "4-mixture").exists()


def test_a_reference_of_another_corpus_and_other_documents_is_warned_of_once(options, tmp_path):
    other = write_small_corpus(tmp_path / "corpus", seed=1)
    boundaries = DocumentBoundaryOptions(reset_position_ids=True)
    with pytest.warns(MixtureWarning) as caught:
        compute_doremi(
            options(corpus=other.root, proxy={"train_iters": 3, "boundaries": boundaries})
        )
    said = [str(warning.message) for warning in caught]
    assert len([line for line in said if "was trained on another corpus than" in line]) == 1
    (line,) = [line for line in said if "at the ends of documents" in line]
    assert "was trained with --reset-position-ids False, the proxy is with True" in line


@pytest.mark.parametrize(
    ("boundaries", "warned"),
    [
        (DocumentBoundaryOptions(eod_mask_loss=True), False),  # tokens that are compared nowhere
        (DocumentBoundaryOptions(reset_attention_mask=True), True),
    ],
)
def test_boundaries_are_warned_of_where_they_make_a_difference(
    options, recwarn, boundaries, warned
):
    plan_doremi(options(proxy={"boundaries": boundaries}))
    said = [str(warning.message) for warning in recwarn]
    assert any("at the ends of documents" in line for line in said) is warned


def test_a_corpus_of_one_domain_is_refused(options, tmp_path):
    alone = write_small_corpus(tmp_path / "corpus", ("news",))
    with pytest.raises(UserError, match="there is one domain, and nothing to weigh"):
        compute_doremi(options(corpus=alone.root))
    assert not (tmp_path / "4-mixture").exists()
