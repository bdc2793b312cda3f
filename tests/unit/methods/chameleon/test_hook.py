"""--online chameleon: the mixture follows the trained model's own domain embeddings."""

from __future__ import annotations

import dataclasses
import math
import os
import signal

import pytest
import torch

from megatron_chameleon.artifacts import (
    CheckpointRecord,
    EmbeddingStore,
    Mixture,
    MixtureWarning,
    TrainingRun,
)
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.checkpoint.state import random_states
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.chameleon import (
    ChameleonOptions,
    ExtractionOptions,
    WeightingOptions,
)
from megatron_chameleon.methods.chameleon import weigh as weigh_module
from megatron_chameleon.methods.chameleon.compute import compute_mixture
from megatron_chameleon.methods.chameleon.hook import OnlineChameleon
from megatron_chameleon.methods.online.options import OnlineOptions
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import DOMAINS, without_training_text
from tests.unit.training.runs import before_steps

WINDOWS, SEED = 12, 5
ROUNDING = 1e-6
EPOCH = DataOptions(permutation="epoch")
ONLINE = OnlineOptions(
    online="chameleon",
    online_interval=3,
    online_windows=WINDOWS,
    online_recipe="scaled",
    online_smoothing=0.0,
)


@pytest.fixture
def options(pretrain_options, tmp_path):
    """``options(**changes)``: a run of 6 steps; after step 3, a checkpoint and new weights."""

    def make(name="run", **changes):
        settings = {"seed": SEED, "data": EPOCH, "online": ONLINE, "log_interval": 1, **changes}
        return pretrain_options(tmp_path / name, **settings)

    return make


@pytest.fixture
def weigh(corpus, tmp_path):
    """``weigh(checkpoint, layer)``: weights and FLOPs from tools/compute_mixture.py."""

    def run(checkpoint, layer):
        folder = tmp_path / f"weighed-{checkpoint.name}"
        options = ChameleonOptions(
            corpus=corpus.root,
            checkpoint=checkpoint,
            output=folder / "mixture.json",
            extraction=ExtractionOptions(num_windows=WINDOWS, extraction_seed=SEED, layer=layer),
            weighting=WeightingOptions("scaled", shrink=True, bootstrap_resamples=2),
        )
        compute_mixture(options)
        flops = EmbeddingStore.load(folder / "embeddings").cost.flops
        return Mixture.load(options.output).weights, flops

    return run


def online(**changes):
    return dataclasses.replace(ONLINE, **changes)


def phases_of(run_dir):
    return [phase.weights for phase in TrainingRun.load(run_dir).mixture_phases]


def figures_of(run_dir):
    return [
        (line["loss"], line["grad_norm"], line["domain_tokens_sampled"], line.get("hook"))
        for line in TrainingRun.load(run_dir).metrics()
    ]


def test_weights_and_cost_are_those_of_the_checkpoint_of_that_step(
    options, weigh, monkeypatch, tmp_path
):
    """New weights are averaged with the current weights; the cost of each update is recorded."""
    monkeypatch.setattr(weigh_module, "shrinkage_factor", lambda _directions, _count: 0.5)
    Mixture(dict(zip(DOMAINS, [0.5, 0.3, 0.2], strict=True))).save(tmp_path / "start.json")
    settings = {"mixture": str(tmp_path / "start.json"), "save_interval": 2}
    every_two = online(online_interval=2, online_layer=1, online_smoothing=0.75, online_shrink=True)
    made = options(online=every_two, **settings)
    plain = options("plain", online=OnlineOptions(), **settings)
    with pytest.warns(MixtureWarning, match="step 2: .* multiplied log weights by 0.50"):
        pretrain(made, OnlineChameleon)
    pretrain(plain)
    phases = phases_of(made.run_dir)
    for step, before, after in zip((2, 4), phases[:-1], phases[1:], strict=True):
        found, flops = weigh(step_folder(made.run_dir, step), 1)
        smoothed = {name: 0.75 * before[name] + 0.25 * found[name] for name in DOMAINS}
        assert after == pytest.approx(smoothed, abs=2 * ROUNDING)
        assert max(abs(found[name] - before[name]) for name in DOMAINS) > 0.01
    run, without = (TrainingRun.load(each.run_dir) for each in (made, plain))
    assert run.cost.flops - without.cost.flops == pytest.approx(2 * flops)
    lines = list(run.metrics())
    assert [line["hook"]["recomputed"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert lines[-1]["hook"]["weights"] == phases[-1]
    seconds = [line["phase_seconds"].get("mixture", 0) for line in lines]
    assert [each > 0 for each in seconds] == [False, False, True, False, True, False]


class ReadOnly(OnlineChameleon):
    """A hook that computes new weights but discards them."""

    def new_mixture(self, step, model):
        before = random_states()
        assert super().new_mixture(step, model)
        for name, state in random_states().items():
            torch.testing.assert_close(state, before[name], rtol=0, atol=0)
        assert all(module.training for chunk in model for module in chunk.modules())
        assert all(buffer.grad_data.eq(0).all() for chunk in model for buffer in chunk.buffers)


def test_embedding_has_no_side_effect_on_training(options):
    read, plain = options(bf16=True), options("plain", bf16=True, online=OnlineOptions())
    pretrain(read, ReadOnly)
    pretrain(plain)
    assert [f[:3] for f in figures_of(read.run_dir)] == [f[:3] for f in figures_of(plain.run_dir)]
    assert figures_of(read.run_dir)[-1][3]["recomputed"] == 1


def test_a_run_stopped_before_its_weights_change_equals_an_uninterrupted_one(options, monkeypatch):
    """The checkpoint of step 4 is saved before the change of the weights after this step."""
    settings = {"online": online(online_interval=2, online_smoothing=0.3)}
    whole, parts = options("whole", **settings), options("parts", **settings)
    pretrain(whole, OnlineChameleon)
    with monkeypatch.context() as patched:
        before_steps(patched, {4: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        pretrain(parts, OnlineChameleon)
    pretrain(parts, OnlineChameleon)
    assert figures_of(parts.run_dir) == figures_of(whole.run_dir)
    assert phases_of(parts.run_dir) == phases_of(whole.run_dir)
    one, other = (CheckpointRecord.load(step_folder(o.run_dir, 6)).hook for o in (whole, parts))
    assert one is not None
    assert one == other
    assert one.state["recomputed"] == 2


def test_non_finite_hidden_states_leave_the_mixture_unchanged(options, monkeypatch):
    def poison(model):
        def hook(module, _inputs, output):
            return output if module.training else (output[0] * math.nan, *output[1:])

        unwrap(model[0]).decoder.layers[0].register_forward_hook(hook)

    made = options(online=online(online_interval=2))
    before_steps(monkeypatch, {4: poison})
    with pytest.warns(MixtureWarning, match="step 4.*'news'"):
        pretrain(made, OnlineChameleon)
    run = TrainingRun.load(made.run_dir)
    assert run.status == "finished"
    assert [line["hook"]["recomputed"] for line in run.metrics()] == [0, 0, 1, 1, 1, 1]


def test_an_empty_domain_with_weight_0_is_allowed(options, corpus, tmp_path):
    root = without_training_text(corpus, tmp_path / "corpus", "poems").root
    Mixture({"news": 0.4, "code": 0.6, "poems": 0.0}).save(tmp_path / "two.json")
    made = options(corpus=root, mixture=str(tmp_path / "two.json"))
    pretrain(made, OnlineChameleon)
    weights = phases_of(made.run_dir)[1]
    assert weights.pop("poems") == 0
    assert all(weight > 0.05 for weight in weights.values())
    with pytest.raises(UserError, match="domain 'poems'"):
        pretrain(options("other", corpus=root), OnlineChameleon)


def test_a_mistake_writes_nothing(options, tmp_path):
    alone = tmp_path / "alone.json"
    Mixture({"news": 0.0, "code": 1.0, "poems": 0.0}).save(alone)
    for changes, named in (
        ({"online": online(online_layer=5)}, "--online-layer 5"),
        ({"data": DataOptions()}, "--permutation epoch"),
        ({"mixture": str(alone)}, "'code'"),
    ):
        with pytest.raises(UserError, match=named):
            pretrain(options(**changes), OnlineChameleon)
        assert not options().run_dir.exists()
