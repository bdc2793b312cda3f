"""A run whose mixture is a file that changes during training."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron_chameleon.artifacts import MixtureWarning, TrainingRun
from megatron_chameleon.artifacts.checkpoint import FOLDER_NAME
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.options import LoggingOptions, OnlineOptions, ReloadOptions
from megatron_chameleon.training.reload import LOG_NAME, read_log
from megatron_chameleon.training.trainer import pretrain
from tests.small_corpus import DOMAINS
from tests.unit.training.runs import before_steps, losses

FIRST, *_ = DOMAINS
ONLY_FIRST = {name: float(name == FIRST) for name in DOMAINS}
MOST = {name: 0.8 if name == FIRST else 0.1 for name in DOMAINS}


@pytest.fixture
def options_for(pretrain_options, tmp_path):
    """``options_for(name, **changes)``: a run that reads the file after every two steps."""

    def options(name, **changes):
        settings = {
            "log_interval": 1,
            "logging": LoggingOptions(tensorboard=False),
            "data": DataOptions(permutation="epoch"),
            "reload": ReloadOptions(tmp_path / "live.json", reload_interval=2),
            **changes,
        }
        return pretrain_options(tmp_path / name, **settings)

    return options


@pytest.fixture
def write(tmp_path):
    """``write(value)``: return an action that replaces the file by ``value`` as JSON."""
    path = tmp_path / "live.json"

    def action(value):
        return lambda _model: path.write_text(value if value == "{" else json.dumps(value))

    return action


def phases_of(options):
    size = options.global_batch_size
    run = TrainingRun.load(options.run_dir)
    return [(phase.first_sample // size, phase.weights) for phase in run.mixture_phases]


def test_all_later_steps_have_the_weights_of_the_file(options_for, write, monkeypatch):
    options = options_for("run")
    uniform = dict.fromkeys(DOMAINS, 1 / len(DOMAINS))
    # The file is read before steps 3 and 5, and is then damaged.
    actions = {2: write({"weights": ONLY_FIRST}), 4: write("{"), 6: write({"weights": uniform})}
    before_steps(monkeypatch, actions)
    with pytest.warns(MixtureWarning, match="unchanged"):
        pretrain(options)
    phases = phases_of(options)
    assert phases == [(0, uniform), (2, ONLY_FIRST)]
    lines = list(TrainingRun.load(options.run_dir).metrics())
    assert [set(line["domain_tokens"]) for line in lines[2:]] == [{FIRST}] * 4
    assert [line["hook"]["changes"] for line in lines] == [0, 0, 1, 1, 1, 1]


def test_resumed_run_equals_the_uninterrupted_run(options_for, write, monkeypatch):
    options = {name: options_for(name) for name in ("whole", "resumed")}
    for run in options.values():
        write({"weights": dict.fromkeys(DOMAINS, 1 / len(DOMAINS))})(None)
        with monkeypatch.context() as patched:
            before_steps(patched, {2: write({"weights": ONLY_FIRST}), 4: write({"weights": MOST})})
            pretrain(run)
    # The changes after steps 2 and 4 are in the log, and the file has other weights by now.
    shutil.rmtree(options["resumed"].run_dir / FOLDER_NAME)
    write({"weights": {**ONLY_FIRST, FIRST: 0.0, DOMAINS[1]: 1.0}})(None)
    pretrain(options["resumed"])
    assert losses(options["whole"].run_dir) == losses(options["resumed"].run_dir)
    assert phases_of(options["whole"]) == phases_of(options["resumed"])


def test_a_truncated_line_of_the_log_does_not_damage_the_next_one(options_for, write):
    options = options_for("run")
    write({"weights": MOST})(None)
    pretrain(options)
    log = options.run_dir / LOG_NAME
    whole = read_log(log)
    assert [*whole] == [2, 4]
    log.write_bytes(log.read_bytes()[:-10])
    shutil.rmtree(options.run_dir / FOLDER_NAME)
    pretrain(options)
    assert read_log(log) == whole


@pytest.mark.parametrize(
    "changes",
    [
        {"online": OnlineOptions(online="odm")},
        {"data": DataOptions(permutation="megatron")},
    ],
    ids=["online", "megatron"],
)
def test_other_sources_of_weights_are_rejected(options_for, changes):
    with pytest.raises(UserError, match="--reload-mixture"):
        pretrain(options_for("run", **changes))
