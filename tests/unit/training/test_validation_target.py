"""Test the loss of a target, and the checkpoint with the lowest one, on one rank."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
import signal

import pytest

from megatron_chameleon.artifacts import MixtureWarning, TargetShares, TrainingRun
from megatron_chameleon.artifacts.checkpoint import FOLDER_NAME, CheckpointWarning, step_folder
from megatron_chameleon.corpus import target as target_module
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.options import (
    CheckpointingOptions,
    LoggingOptions,
    TargetOptions,
    ValidationOptions,
)
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain
from megatron_chameleon.training.validation import Validation
from tests.full_disk import largest_file_size
from tests.small_corpus import DOMAINS, with_text
from tests.unit.training.runs import before_steps, losses, metrics, record_at

EVERY_STEP = ValidationOptions(eval_interval=1)


@pytest.fixture
def options_for(pretrain_options, tmp_path):
    """``options_for(name="run", **changes)``: a run that validates a target after every step."""

    def options(name="run", **changes):
        settings = {
            "log_interval": 1,
            "logging": LoggingOptions(tensorboard=False),
            "validation": EVERY_STEP,
            "target": TargetOptions("news=3,code"),
            **changes,
        }
        return pretrain_options(tmp_path / name, **settings)

    return options


@pytest.fixture
def prescribe(monkeypatch):
    """``prescribe(*losses)``: the target losses of the next validations."""

    def apply(*values):
        found = iter(values)
        monkeypatch.setattr(Validation, "losses", lambda _: dict.fromkeys(DOMAINS, next(found)))

    return apply


def steps_in(run_dir):
    return sorted(int(path.name[-8:]) for path in (run_dir / FOLDER_NAME).glob("step-*"))


def best_of(run_dir):
    run = TrainingRun.load(run_dir)
    return run.best_step, run.best_target_loss


@pytest.fixture(scope="module")
def text_corpus(held_out_corpus, tmp_path_factory):
    """``held_out_corpus`` with its tokenizer, and the valid text of 'poems' as a file."""
    return with_text(held_out_corpus, tmp_path_factory.mktemp("text") / "corpus", "poems", "valid")


def test_loss_is_that_of_domains_held_out_domains_and_texts(
    options_for, text_corpus, tmp_path, capsys
):
    corpus, text = text_corpus
    value = f"news=1,poems=2,mine={text}=5"
    plain = options_for("plain", corpus=corpus.root, target=TargetOptions())
    pretrain(plain)
    assert "target loss" not in capsys.readouterr().out
    target = TargetOptions(value, target_text_key="words")
    options = options_for(corpus=corpus.root, target=target)
    pretrain(options)
    printed = capsys.readouterr().out
    assert losses(options.run_dir) == losses(plain.run_dir)
    found, expected = metrics(options.run_dir), metrics(plain.run_dir)
    for step, line in found.items():
        measured = line["validation_loss"]
        assert [*measured] == ["news", "code", "poems", "mine"]
        assert measured.pop("mine") == pytest.approx(measured["poems"], abs=1e-6)
        assert measured == expected[step]["validation_loss"]
        loss = (measured["news"] + 7 * measured["poems"]) / 8
        assert line["target_loss"] == pytest.approx(loss, abs=1e-5)
        assert f"target loss {line['target_loss']:.4f}" in printed
        assert "target_loss" not in expected[step]
    run, without = (TrainingRun.load(each.run_dir) for each in (options, plain))
    shares = {"news": 0.125, "poems": 0.25, "mine": 0.625}
    assert run.target == TargetShares(value, shares)
    best = min(found, key=lambda step: found[step]["target_loss"])
    assert best_of(options.run_dir) == (best, found[best]["target_loss"])
    assert (without.target, without.best_step) == (None, None)
    assert record_at(plain.run_dir, 6).hash == record_at(options.run_dir, 6).hash
    assert record_at(plain.run_dir, 6).best is None


def test_documents_of_the_target_in_the_training_text_are_a_warning(
    options_for, held_out_corpus, tmp_path
):
    corpus, leaked = with_text(held_out_corpus, tmp_path / "corpus", "code", "train")
    target = TargetOptions(f"mine={leaked}", target_text_key="words")
    once = ValidationOptions(eval_interval=6)
    with pytest.warns(MixtureWarning, match="'mine' are in the training text of 'code'"):
        pretrain(options_for(corpus=corpus.root, target=target, validation=once))


def test_a_held_out_target_that_is_short_or_in_the_training_text_is_a_warning(
    options_for, leaked_corpus, monkeypatch
):
    monkeypatch.setattr(target_module, "FEWEST_TARGET_TOKENS", 1_000_000)
    target, once = TargetOptions("poems"), ValidationOptions(eval_interval=6)
    with (
        pytest.warns(MixtureWarning, match="20 of 20 documents of 'poems' .* of 'news'"),
        pytest.warns(MixtureWarning, match="'poems' has .* mostly noise"),
    ):
        pretrain(options_for(corpus=leaked_corpus.root, target=target, validation=once))


@pytest.mark.parametrize("async_save", [False, True])
def test_best_checkpoint_is_kept_until_there_is_a_better_one(options_for, prescribe, async_save):
    checkpointing = CheckpointingOptions(async_save=async_save, keep_last_checkpoints=1)
    values = [5.0, 3.0, math.nan, 4.0, 3.5, 9.0]
    for name, last, kept in (("first", 9.0, (2, 6)), ("second", 2.0, (6,))):
        prescribe(*values[:5], last)
        options = options_for(name, checkpointing=checkpointing)
        pretrain(options)
        assert steps_in(options.run_dir) == [*kept]
        assert best_of(options.run_dir) == (kept[0], min(3.0, last))
    first = options.run_dir.parent / "first"
    assert record_at(first, 2).best == record_at(first, 6).best
    prescribe(*values)
    target = TargetOptions("news,code", keep_best=False)
    options = options_for("third", checkpointing=checkpointing, target=target)
    pretrain(options)
    assert steps_in(options.run_dir) == [6]
    assert best_of(options.run_dir) == (2, 3.0)


def test_killed_run_measures_the_best_checkpoint_again(options_for):
    options = options_for(checkpointing=CheckpointingOptions(keep_last_checkpoints=0))
    pretrain(options)
    run = TrainingRun.load(options.run_dir)
    for step in (4, 5, 6):  # as if killed after step 3
        shutil.rmtree(step_folder(options.run_dir, step))
    pretrain(options)
    resumed = TrainingRun.load(options.run_dir)
    assert (resumed.best_step, resumed.best_target_loss) == (run.best_step, run.best_target_loss)
    assert resumed.checkpoints == run.checkpoints


def test_an_interrupted_run_keeps_its_best_checkpoint_if_it_has_the_same_target(
    options_for, prescribe, monkeypatch
):
    prescribe(2.0, 3.0, 4.0, *[3.0] * 9)
    checkpointing = CheckpointingOptions(async_save=True, keep_last_checkpoints=1)
    options = options_for(checkpointing=checkpointing)
    with monkeypatch.context() as patched:
        before_steps(patched, {3: lambda _model: os.kill(os.getpid(), signal.SIGTERM)})
        pretrain(options)
    assert (best_of(options.run_dir), steps_in(options.run_dir)) == ((1, 2.0), [1, 3])
    copy, same = (
        shutil.copytree(options.run_dir, options.run_dir.with_name(name)) for name in "ab"
    )
    pretrain(dataclasses.replace(options, run_dir=same))
    assert (best_of(same), steps_in(same)) == ((1, 2.0), [1, 6])
    pretrain(dataclasses.replace(options, target=TargetOptions("code,poems")))
    assert (best_of(options.run_dir), steps_in(options.run_dir)) == ((4, 3.0), [4, 6])
    shutil.rmtree(step_folder(copy, 1))
    pretrain(dataclasses.replace(options, run_dir=copy))
    assert (best_of(copy), steps_in(copy)) == ((4, 3.0), [4, 6])


@pytest.mark.parametrize("async_save", [False, True])
def test_failed_save_keeps_the_best_checkpoint_before_it(
    options_for, prescribe, monkeypatch, capsys, async_save
):
    prescribe(4.0, 3.0, 2.0, 3.5, 2.5, 9.0)
    checkpointing = CheckpointingOptions(async_save=async_save, keep_last_checkpoints=1)
    options = options_for(checkpointing=checkpointing, save_interval=4)
    full = largest_file_size(100)
    actions = {3: lambda _: full.__enter__(), 4: lambda _: full.__exit__(None, None, None)}
    before_steps(monkeypatch, actions)
    with pytest.warns(CheckpointWarning, match="step-00000003"):
        pretrain(options)
    assert (best_of(options.run_dir), steps_in(options.run_dir)) == ((5, 2.5), [5, 6])


def test_target_of_the_mixture_is_the_default(options_for, tmp_path):
    def planned(shares, **changes):
        path = tmp_path / f"mixture-{next(numbers)}.json"
        target = {"value": "code", "shares": shares}
        weights = dict.fromkeys(DOMAINS, 1 / 3)
        path.write_text(json.dumps({"weights": weights, "parameters": {"target": target}}))
        return plan_training(options_for(**{"mixture": str(path), **changes})).target

    numbers, default = itertools.count(), {"target": TargetOptions()}
    found = planned({"news": 1, "code": 3}, **default)
    assert (found.value, found.shares) == ("code", {"news": 0.25, "code": 0.75})
    assert planned({"news": 1}).shares == {"news": 0.75, "code": 0.25}  # --target comes first
    assert planned({"news": 1, "text": 1}, **default) is None
    assert planned({"news": "many"}, **default) is None
    assert planned({"news": 1}, validation=ValidationOptions(eval_interval=0), **default) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"target": TargetOptions("news"), "validation": ValidationOptions(eval_interval=0)},
        {"target": TargetOptions("news"), "validation": ValidationOptions()},
        {"target": TargetOptions("unknown")},
        {"target": TargetOptions("mine=missing.jsonl")},
    ],
)
def test_target_that_cannot_be_measured_is_an_error(options_for, tmp_path, changes):
    with pytest.raises(UserError, match="--target"):
        pretrain(options_for(**changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "target", [TargetOptions(keep_best=False), TargetOptions("news", target_text_key="words")]
)
def test_option_without_effect_is_an_error(options_for, target):
    with pytest.raises(UserError, match="leave it out"):
        pretrain(options_for(target=target))


def test_overwrite_does_not_delete_the_text_of_the_target(options_for, trained_run, text_corpus):
    text = shutil.copy(text_corpus[1], trained_run)
    options = options_for(overwrite=True, target=TargetOptions(f"mine={text}"))
    options = dataclasses.replace(options, run_dir=trained_run)
    with pytest.raises(UserError, match=r"poems.jsonl is in .* --overwrite deletes"):
        pretrain(options)
