"""A resumed run reads the same samples as an uninterrupted one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from megatron_chameleon.artifacts import CheckpointRecord, MixturePhase
from megatron_chameleon.artifacts.checkpoint import step_folder
from megatron_chameleon.blend.options import DataOptions
from megatron_chameleon.errors import UserError
from megatron_chameleon.training.checkpointing import check_same_samples, resumed_schedule
from megatron_chameleon.training.plan import plan_training
from megatron_chameleon.training.trainer import pretrain, samples_of
from tests.small_corpus import DOMAINS, word_tokenizer
from tests.unit.training.progress import losses


@pytest.fixture(scope="module")
def changed_run(pretrain_options, tmp_path_factory):
    """A run on all domains up to step 3, then on poems alone; checkpoints at 3 and 6."""
    folder = tmp_path_factory.mktemp("changed")
    poems = {"news": 0.0, "code": 0.0, "poems": 1.0}
    (folder / "poems.json").write_text(json.dumps({"weights": poems}))
    pretrain(pretrain_options(folder / "run", data=changing(f"3={folder}/poems.json")))
    return folder


def changing(*changes):
    return DataOptions(mixture_change=(changes,) if changes else (), permutation="epoch")


def test_a_checkpoint_says_where_each_domain_stands(changed_run):
    first, last = (CheckpointRecord.load(step_folder(changed_run / "run", s)) for s in (3, 6))
    assert first.domain_samples == dict.fromkeys(DOMAINS, 8)
    assert [phase.first_sample for phase in first.mixture_phases] == [0]
    assert last.domain_samples == {"news": 8, "code": 8, "poems": 8 + 24}
    assert last.mixture_phases[1] == MixturePhase(24, {"news": 0.0, "code": 0.0, "poems": 1.0})
    assert last.domain_tokens == {name: n * 32 for name, n in last.domain_samples.items()}


def test_a_change_at_the_very_step_of_the_checkpoint_lies_ahead(changed_run, pretrain_options):
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 3))
    assert [phase.first_sample for phase in checkpoint.mixture_phases] == [0]
    uniform = (1 / 3,) * 3
    for changes, weights in {
        (f"3={changed_run}/poems.json",): [uniform, (0.0, 0.0, 1.0)],
        ("3=uniform",): [uniform, uniform],
        (): [uniform],
    }.items():
        plan = plan_training(pretrain_options(changed_run / "run", data=changing(*changes)))
        schedule = resumed_schedule(plan, checkpoint)
        assert [phase.first_sample for phase in schedule.phases] == [0, 24][: len(weights)]
        assert [phase.weights for phase in schedule.phases] == weights


def test_a_data_path_may_have_moved_but_not_changed(pretrain_options, corpus, tmp_path):
    poems = tmp_path / "poems.json"
    poems.write_text(json.dumps({"weights": {"poems": 0.9, "news": 0.1, "code": 0.0}}))
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json")

    def options(folder, run="run"):
        data = DataOptions(
            data_path=" ".join(f"1 {folder / name}" for name in DOMAINS),
            split="1",
            tokenizer_model=tokenizer,
            permutation="epoch",
            mixture_change=((f"2={poems}",),),
        )
        return pretrain_options(tmp_path / run, corpus=None, data=data)

    here = corpus.prefix("news", "train").parent
    pretrain(options(here))
    whole = losses(tmp_path / "run")
    shutil.rmtree(step_folder(tmp_path / "run", 6))
    there = Path(shutil.copytree(here, tmp_path / "elsewhere"))
    pretrain(options(there))
    assert losses(tmp_path / "run") == whole

    flipped = there / "code.bin"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\1")
    message = "holds a run with corpus .*news.* .SHA-256"
    with pytest.raises(UserError, match=message):
        pretrain(options(there))
    shutil.copy(here / "code.bin", flipped)
    for suffix in (".bin", ".idx"):
        (there / f"code{suffix}").rename(there / f"programs{suffix}")
    renamed = dataclasses.replace(options(there).data, mixture_change=())
    given = str(renamed.data_path).replace("elsewhere/code", "elsewhere/programs")
    with pytest.raises(UserError, match="programs"):
        pretrain(
            dataclasses.replace(options(there), data=dataclasses.replace(renamed, data_path=given))
        )


def test_changes_that_lie_ahead_may_be_others_than_were_planned(
    changed_run, pretrain_options, tmp_path
):
    run_dir = Path(shutil.copytree(changed_run / "run", tmp_path / "run"))
    shutil.rmtree(step_folder(run_dir, 6))
    changes = (f"4={changed_run}/poems.json", "5=uniform")
    pretrain(pretrain_options(run_dir, data=changing(*changes)))
    checkpoint = CheckpointRecord.load(step_folder(run_dir, 6))
    assert [phase.first_sample for phase in checkpoint.mixture_phases] == [0, 32, 40]
    assert checkpoint.domain_samples == {"news": 13, "code": 14, "poems": 21}
    # The same run in one go: what comes after the checkpoint does not hang on the interruption.
    whole = tmp_path / "whole"
    pretrain(pretrain_options(whole, data=changing(*changes)))
    assert CheckpointRecord.load(step_folder(whole, 6)).domain_samples == checkpoint.domain_samples
    assert losses(run_dir) == losses(whole)


def test_a_change_that_the_run_has_passed_without_making_it_is_refused(
    changed_run, pretrain_options
):
    plan = plan_training(pretrain_options(changed_run / "run", data=changing("2=uniform")))
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 3))
    with pytest.raises(UserError, match="--mixture-change 2="):
        resumed_schedule(plan, checkpoint)


def test_a_checkpoint_at_which_the_domains_stand_elsewhere_is_refused(
    changed_run, pretrain_options
):
    plan = plan_training(pretrain_options(changed_run / "run", data=changing()))
    checkpoint = CheckpointRecord.load(step_folder(changed_run / "run", 3))
    samples = samples_of(plan, plan.schedule)
    check_same_samples(samples, checkpoint)
    other = dataclasses.replace(checkpoint, domain_samples={"news": 9, "code": 8, "poems": 7})
    older = dataclasses.replace(checkpoint, order_version=1)
    with pytest.raises(UserError, match="version 1"):
        check_same_samples(samples, older)
    with pytest.raises(UserError, match="'news'"):
        check_same_samples(samples, other)
