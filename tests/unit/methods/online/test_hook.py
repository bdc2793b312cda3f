"""--online: methods that change the mixture by losses, in real runs of a nano model."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import numpy as np
import pytest

from megatron_chameleon import methods
from megatron_chameleon.artifacts import CheckpointRecord, Mixture, MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.methods.ado.hook import LossHistory
from megatron_chameleon.methods.online import SHARED_HELP
from megatron_chameleon.methods.online.options import (
    OnlineOptions,
    find_online_methods,
    hook_class,
    online_options,
)
from megatron_chameleon.mixture.ado import AdoState, fit_scaling_laws, preference
from megatron_chameleon.mixture.aioli import aioli_weights, mixing_matrix, normalized_gains
from megatron_chameleon.mixture.odm import odm_weights, updated_rewards
from megatron_chameleon.model.config import ModelConfig
from megatron_chameleon.model.flops import training_flops
from megatron_chameleon.model.gpt import unwrap
from megatron_chameleon.ranges import CheckedOptions
from megatron_chameleon.training.options import TargetOptions, ValidationOptions
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import DOMAINS, with_text
from tests.unit.training.runs import before_steps, poison

INTERVAL = 2
ONLINE = {
    "chameleon": OnlineOptions(
        online="chameleon",
        online_interval=INTERVAL,
        online_windows=12,
        online_recipe="scaled",
        online_smoothing=0.3,
    ),
    "odm": OnlineOptions(online="odm", online_interval=INTERVAL, online_smoothing=0.5),
    "ado": OnlineOptions(
        online="ado", online_interval=INTERVAL, online_smoothing=0.25, online_warmup_iters=0
    ),
    "aioli": OnlineOptions(  # the mixture is perturbed from step 1 on, and changes at step 4
        online="aioli",
        online_interval=4,
        online_windows=3,
        aioli_steps=1,
        aioli_sweeps=1,
        aioli_eta=20.0,
    ),
}


@pytest.fixture
def options(pretrain_options, tmp_path):
    """``options(method, name, **changes)``: a run of 6 steps with an online method."""

    def make(method, name="run", **changes):
        return pretrain_options(tmp_path / name, **settings_of(method), **changes)

    return make


@pytest.fixture(scope="module")
def whole_run(pretrain_options, tmp_path_factory):
    """``whole_run(method)``: an uninterrupted run of 6 steps, for reading only."""
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(
        lambda method: train(pretrain_options(folder / method, **settings_of(method)))
    )


def settings_of(method):
    online = ONLINE[method]
    return {"data": DataOptions(permutation="epoch"), "online": online, "log_interval": 1}


def train(options):
    pretrain(options, hook_class(options.online.online))
    return TrainingRun.load(options.run_dir)


def weights_of(run):
    """First sample and weights of each mixture."""
    return [(phase.first_sample, list(phase.weights.values())) for phase in run.mixture_phases]


def figures_of(run):
    return [(line["loss"], line["domain_tokens_sampled"], line["hook"]) for line in run.metrics()]


def kill(_model):
    raise RuntimeError("killed")


def test_every_method_has_a_hook_and_defaults_of_its_flags():
    assert list(find_online_methods()) == ["chameleon", "ado", "aioli", "odm"]
    for name, method in find_online_methods().items():
        assert callable(hook_class(name))
        own = {field.name for field in dataclasses.fields(method.options or CheckedOptions)}
        assert own <= method.defaults.keys() <= {*own, *SHARED_HELP}


LONGEST_NAME = """
import dataclasses
from megatron_chameleon.methods.online import Default, OnlineMethod
from megatron_chameleon.ranges import CheckedOptions, Positive

@dataclasses.dataclass(frozen=True)
class LongestNameOptions(CheckedOptions):
    name_power: Positive | None = None

ONLINE = OnlineMethod(
    name="longest-name", follows="the names", hook="builtins:int", options=LongestNameOptions,
    defaults={"online_interval": Default(7), "name_power": Default(2.0)},
)
"""


def test_a_folder_adds_a_method(tmp_path, monkeypatch):
    """With its flags; flags of other methods are rejected, and a broken folder is skipped."""
    for name, source in {"longest_name": LONGEST_NAME, "broken": "raise ImportError"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.setitem(sys.modules, f"{methods.__name__}.{name}", None)
        monkeypatch.delitem(sys.modules, f"{methods.__name__}.{name}")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    options_type: Any = online_options(find_online_methods())
    options = options_type(online="longest-name", name_power=3.0)
    assert (options.setting("online_interval"), options.setting("name_power")) == (7, 3.0)
    for changes in ({"online_windows": 2}, {"online": "odm"}, {"online": None}):
        with pytest.raises(UserError, match=r"--(online-windows|name-power)"):
            dataclasses.replace(options, **changes)
    with pytest.raises(UserError, match="has no target"):
        options.check_run(100, "news")


@pytest.mark.parametrize("method", ONLINE)
def test_a_resumed_run_equals_an_uninterrupted_one(options, whole_run, monkeypatch, method):
    """The run is killed after step 5 and resumes from the checkpoint of step 3."""
    whole, parts = whole_run(method), options(method, "parts")
    with monkeypatch.context() as patched:
        before_steps(patched, {6: kill})
        with pytest.raises(RuntimeError, match="killed"):
            train(parts)
    if method == "aioli":
        changed = dataclasses.replace(ONLINE[method], online_windows=2)
        with pytest.raises(UserError, match="--online-windows 3, not 2"):
            train(dataclasses.replace(parts, online=changed))
    run = train(parts)
    assert figures_of(run) == figures_of(whole)
    assert weights_of(run) == weights_of(whole)
    assert len(weights_of(whole)) > 1
    one, other = (CheckpointRecord.load(step_folder(each.root, 6)).hook for each in (whole, run))
    assert one == other


def test_odm_follows_the_losses_of_accepted_steps(options, monkeypatch):
    """Step 3 is skipped, so its losses are no rewards; the domain with weight 0 keeps it.

    With a warm-up of three steps, the weights change at step 4, but not at step 2.
    """
    online = dataclasses.replace(ONLINE["odm"], online_warmup_iters=3)
    made = dataclasses.replace(options("odm"), online=online)
    Mixture(dict(zip(DOMAINS, [0.5, 0.5, 0.0], strict=True))).save(made.run_dir.parent / "m.json")
    before_steps(monkeypatch, {3: poison(np.inf)})
    run = train(dataclasses.replace(made, mixture=str(made.run_dir.parent / "m.json")))
    weights, rewards, expected = np.array([0.5, 0.5]), np.zeros(2), [[0.5, 0.5, 0]]
    for line in run.metrics():
        if not line.get("skipped"):
            tokens = np.array([line["domain_tokens"].get(name, 0) for name in DOMAINS[:2]])
            losses = np.array([line["domain_loss"].get(name, 0.0) for name in DOMAINS[:2]])
            rewards = updated_rewards(rewards, losses * tokens, tokens, weights, 0.5)
        if line["step"] == 4:
            weights = odm_weights(rewards, line["step"] + 1)
            expected.append([*weights, 0])
    assert run.skipped_steps == 1
    starts, found = zip(*weights_of(run), strict=True)
    assert starts == (0, 32)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.abs(np.diff(found, axis=0)).max(axis=1).min() > 1e-3


def test_ado_follows_the_laws_of_the_losses(whole_run):
    run = whole_run("ado")
    lines = list(run.metrics())[:4]
    losses, tokens = (
        np.array([[line[field].get(name, 0.0) for name in DOMAINS] for line in lines])
        for field in ("domain_loss", "domain_tokens")
    )
    laws = fit_scaling_laws(np.arange(1.0, 5) * 8, losses, tokens)
    prior = np.full(3, 1 / 3)
    preferred = preference(prior, prior, laws.learning_speed(32.0), 0.01)
    state = AdoState(prior, prior, prior, step=2)  # step 2 has too few losses for an update
    state = state.updated(4, preferred, 0.25)
    expected = state.policy
    assert np.ptp(expected) > 0.05
    starts, found = zip(*weights_of(run), strict=True)
    assert starts == (0, 32)
    np.testing.assert_allclose(found, [prior, expected], atol=2e-6)
    saved = CheckpointRecord.load(step_folder(run.root, 6)).hook
    assert saved is not None
    np.testing.assert_allclose(saved.state["policy"]["average"], state.average)


def test_ado_keeps_a_bounded_history():
    history, every = LossHistory(2), np.random.default_rng(0).random((1000, 4))
    for step, row in enumerate(every, 1):
        history.add(step, row[:2], 1 + row[2:])
    steps, losses, tokens = history.arrays()
    assert (len(steps), history.width) == (125, 8)
    np.testing.assert_allclose(steps, np.arange(1, 1001).reshape(125, 8).mean(1))
    np.testing.assert_allclose(tokens.sum(0), 1000 + every[:, 2:].sum(0))
    np.testing.assert_allclose(losses[-1], every[-8:, :2].sum(0) / tokens[-1])


def drops_of(losses, weights):
    """Drop [m, k] of the ``losses`` [m] of each step while each domain was emphasized."""
    drops = np.zeros((len(losses[0]), 3))
    for number in (1, 2, 3):
        drops[:, np.argmax(weights[number])] = losses[number - 1] - losses[number]
    return drops


def test_aioli_follows_the_validation_losses(options):
    """The run's own validations read the same windows, so the log has the losses of Aioli."""
    validation = ValidationOptions(eval_interval=1, eval_tokens=3 * 32)
    run = train(options("aioli", validation=validation))
    losses = [np.array(list(line["validation_loss"].values())) for line in run.metrics()]
    starts, weights = zip(*weights_of(run), strict=True)
    assert starts == (0, 8, 16, 24, 32)
    np.testing.assert_allclose(np.sort(weights[1:4]), [[0.125, 0.125, 0.75]] * 3)
    gains = normalized_gains(mixing_matrix(drops_of(losses, weights), 0.75))
    expected = aioli_weights(np.full(3, 1 / 3), gains, 20.0)
    assert np.ptp(expected) > 0.05
    np.testing.assert_allclose(weights[4], expected, atol=2e-6)
    plain = train_plain(options("aioli", "plain", validation=validation))
    config = ModelConfig(**run.model)
    training = training_flops(config, run.tokens, 32)
    assert run.cost.flops - plain.cost.flops == pytest.approx(
        4 / 6 * (plain.cost.flops - training), rel=1e-6
    )


def test_aioli_follows_the_losses_of_a_target(options, corpus, tmp_path):
    """The log has the target's losses, of a text that is no domain."""
    copy, text = with_text(corpus, tmp_path / "corpus", "poems", "valid")
    settings: dict[str, Any] = {
        "corpus": copy.root,
        "validation": ValidationOptions(eval_interval=1, eval_tokens=3 * 32),
        "target": TargetOptions(f"mine={text}=3,code", "words", keep_best=False),
    }
    whole = train(options("aioli", **settings))
    losses = [
        np.array([line["validation_loss"][name] for name in ("mine", "code")])
        for line in whole.metrics()
    ]
    weights = [each for _start, each in weights_of(whole)]
    drops = drops_of(losses, weights)
    gains = normalized_gains(mixing_matrix(drops, 0.75), np.array([0.75, 0.25]))
    np.testing.assert_allclose(weights[4], aioli_weights(np.full(3, 1 / 3), gains, 20), atol=2e-6)


def test_aioli_keeps_the_mixture_if_a_validation_loss_is_not_finite(options, monkeypatch):
    """The model's loss is NaN in the validation after step 2 alone."""

    def poison_validation(model):
        def damage(module, _inputs, output):
            return output if module.training else output * np.nan

        handles.append(unwrap(model[0]).register_forward_hook(damage))

    handles: list[Any] = []
    before_steps(monkeypatch, {3: poison_validation, 4: lambda _model: handles.pop().remove()})
    with pytest.warns(MixtureWarning, match="step 2"):
        run = train(options("aioli"))
    assert [start for start, _weights in weights_of(run)] == [0, 8, 16]
    assert weights_of(run)[2][1] == pytest.approx([1 / 3] * 3, abs=1e-6)


def train_plain(options):
    pretrain(dataclasses.replace(options, online=OnlineOptions()))
    return TrainingRun.load(options.run_dir)


def test_mistakes_write_nothing(options):
    measured = {"validation": ValidationOptions(eval_interval=2), "target": TargetOptions("news")}
    for method, changes, named in (
        ("odm", {"data": DataOptions()}, "--permutation epoch"),
        ("aioli", {"train_iters": 4}, "--online-interval 4: must be < --train-iters"),
        ("aioli", {"online": dataclasses.replace(ONLINE["aioli"], aioli_steps=2)}, "above 6"),
        ("aioli", {"online": dataclasses.replace(ONLINE["aioli"], aioli_emphasis=0.3)}, "1 / 3"),
        ("odm", measured, "--online odm has no target"),
        ("ado", measured, "--online ado has no target"),
        ("chameleon", measured, "--online chameleon has no target"),
    ):
        with pytest.raises(UserError, match=named):
            train(dataclasses.replace(options(method, "other"), **changes))
        assert not options(method, "other").run_dir.exists()
